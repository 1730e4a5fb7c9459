"""Errors about a mesh, a plan or a batch name the user's line, since torchrun may show a rank's message alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tessera.ir.record import user_line
from tessera.util.errors import TesseraError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_NAMED = re.compile(r"\S+:\d+: ")  # a file and a line


def at_users_line(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The function, whose errors say where the user called it, unless they begin with a line already: further in they
    may name another one, such as the model's, which may be somebody else's code."""

    @functools.wraps(function)
    def located(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except TesseraError as error:
            line = str(user_line())
            if line and not _NAMED.match(str(error)):
                error.args = (f"{line}: {error}",)
            raise

    return located
