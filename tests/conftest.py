"""What all tests share. Its being here puts this folder on the path, so that tests can import `programs`."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tests run side by side
