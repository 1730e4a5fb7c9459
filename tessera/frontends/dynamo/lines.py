"""Whose line it is: the user's, or that of PyTorch, Python or Tessera, where a user cannot change anything."""

from __future__ import annotations

import inspect
import logging
import os

import torch

from tessera.frontends.dynamo.frames import OWN_FILE
from tessera.torch_internals import dynamo, fake
from tessera.util.files import PACKAGE

QUIET = (torch.__path__[0], PACKAGE)  # how file names of PyTorch's and ours begin
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


class _SaidElsewhere(logging.Filter):
    """Keeps back what PyTorch logs of a call of ours, at length, and what is said elsewhere in fewer words.

    - The shapes of a call, of a transform's function or of an edit do not fit. The call then runs eagerly, and eager
      PyTorch raises the same in one line; the others raise it themselves.
    - A graph ends at a line such as `.item()`. `explain` names the line, and what to do about it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_filename.startswith(_COMPILES):
                return False
            frame = frame.f_back
        return True


_COMPILES = tuple(os.path.join(PACKAGE, folder, "") for folder in ("just_in_time", "training", "func", "inspection"))
for _name in (fake.LOGGER, *dynamo.BREAK_LOGGERS):
    logging.getLogger(_name).addFilter(_SaidElsewhere())
