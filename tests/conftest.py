"""What all tests share. Its being here puts this folder on the path, so that tests can import `programs`."""

from __future__ import annotations

import os

# Tests look at how programs are compiled, and change it: what an earlier run left on disk would hide that.
os.environ.setdefault("TESSERA_PROGRAM_CACHE", "0")

import pytest  # noqa: E402
import torch  # noqa: E402

# Kernels are written for a GPU in many tests; where there is none to ask, it is this one.
if not torch.cuda.is_available():
    os.environ.setdefault("TESSERA_MACHINE", "h200")

torch.set_num_threads(1)  # tests run side by side


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
