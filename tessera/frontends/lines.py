"""Whose line it is: the user's, or that of PyTorch, Python or Tessera, where a user cannot change anything."""

from __future__ import annotations

import inspect
import os

import torch

from tessera.frontends.frames import OWN_FILE

QUIET = (torch.__path__[0], os.path.dirname(os.path.dirname(__file__)))  # how file names of PyTorch's and ours begin
_STDLIB = os.path.dirname(os.__file__) + "/"


def is_library(file: str) -> bool:
    """PyTorch's, ours, or Python's own."""
    return file.startswith((*QUIET, OWN_FILE)) or (file.startswith(_STDLIB) and "site-packages" not in file)


def calling_line() -> str:
    """The innermost frame that is neither PyTorch's nor ours: whose call is being compiled."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((*QUIET, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
