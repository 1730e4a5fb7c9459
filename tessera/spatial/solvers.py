"""The solvers of the extra `plan`, which are imported when somebody asks for one.

In: a name. Out: its module, or in words why there is none. A solver that is installed may still not load: ortools and
some versions of highspy each bring a shared library of HiGHS under one name, and whoever comes second gets the other's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from tessera.util.errors import OptionError

INSTALL = "pip install tessera[plan]"
# What each is for, and where it lies.
SOLVERS = {"ortools": ("CP-SAT", "ortools.sat.python.cp_model"), "highspy": ("HiGHS, which chooses cuts,", "highspy")}


@functools.cache
def _found(name: str) -> ModuleType | str:
    what, module = SOLVERS[name]
    if importlib.util.find_spec(name) is None:
        return f"{what} is part of {name}, which is not installed: {INSTALL}"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return f"{what} is part of {name}, which is installed but cannot be loaded ({error}); try {INSTALL}"


def missing(name: str) -> str:
    """Why there is no such solver; empty where there is one."""
    found = _found(name)
    return found if isinstance(found, str) else ""


def solver(name: str) -> ModuleType:
    found = _found(name)
    if isinstance(found, str):
        raise OptionError(found)
    return found
