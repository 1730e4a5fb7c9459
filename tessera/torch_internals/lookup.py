"""How a private symbol of PyTorch is looked up.

In: its path, and what Tessera needs it for. Out: the object itself. Where this PyTorch has none, out comes what is used
instead, or an object that raises when it is first used: a release that drops one symbol takes away what relies on it,
with an error that names both, and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tessera.util.errors import InternalsError

_REQUIRED = object()
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Symbol:
    """What is known of one symbol; the smoke test goes through all that have been looked up."""

    path: str  # `torch._C._set_grad_enabled`
    why: str  # what Tessera needs it for
    since: tuple[int, int]  # the first version that has it
    cuda: bool  # only builds with CUDA have it
    there: bool  # this PyTorch has it

    @property
    def expected(self) -> bool:
        """Whether this version and build of PyTorch is known to have it."""
        return self.since <= VERSION and (not self.cuda or torch.version.cuda is not None)


SYMBOLS: dict[str, Symbol] = {}


def symbol(
    path: str, why: str, *, since: tuple[int, int] = (2, 11), cuda: bool = False, otherwise: object = _REQUIRED
) -> Any:
    """PyTorch's object of that path; `otherwise` is taken where there is none. Versions from `since` on have it."""
    try:
        given, there = _resolve(path), True
    except (ImportError, AttributeError) as error:
        given, there = _Missing(path, why, error) if otherwise is _REQUIRED else otherwise, False
    SYMBOLS[path] = Symbol(path, why, since, cuda, there)
    return given


def missing(given: object) -> str:
    """Why what `symbol` gave is not there; empty where it is."""
    return str(given.cause) if isinstance(given, _Missing) else ""


def owner_of(path: str, why: str) -> Any:
    """The module or class in which PyTorch itself looks up what has this path: who replaces it, replaces it there."""
    if isinstance(absent := symbol(path, why), _Missing):
        absent()
    owner = path.rpartition(".")[0]
    return sys.modules.get(owner) or _resolve(owner)


def _resolve(path: str) -> object:
    """Of a function and a module of one name in a package, as `torch._higher_order_ops.scan`, the function."""
    head, _, name = path.rpartition(".")
    try:
        owner = importlib.import_module(head)
    except ModuleNotFoundError:
        owner = _resolve(head)
    try:
        return getattr(owner, name)
    except AttributeError:
        return importlib.import_module(path)


class _Missing:
    """What stands where a symbol should: the first use of it says what is missing."""

    def __init__(self, path: str, why: str, cause: Exception) -> None:
        self.path, self.why, self.cause = path, why, cause

    def _refuse(self) -> NoReturn:
        raise InternalsError(
            f"PyTorch {torch.__version__} has no {self.path}, which Tessera needs for {self.why}. Tessera is tested "
            "with PyTorch 2.11, 2.12 and 2.13: please use one of these, or report this with the version you have"
        ) from self.cause

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks, as copy and inspect do
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, instance: object) -> NoReturn:
        self._refuse()

    def __mro_entries__(self, bases: tuple) -> NoReturn:
        self._refuse()
