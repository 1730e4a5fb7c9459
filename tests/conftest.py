"""What all tests share. Its being here puts this folder on the path, so that tests can import `programs`."""

from __future__ import annotations

import os

# Tests look at how programs are compiled, and change it: what an earlier run left on disk would hide that.
os.environ.setdefault("TESSERA_PROGRAM_CACHE", "0")

import torch  # noqa: E402

torch.set_num_threads(1)  # tests run side by side
