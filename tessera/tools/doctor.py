"""`tessera doctor`: is this installation whole, and what will Tessera find on this machine?

Each check is a name, what was found, and whether that is right (`True`), wrong (`False`) or optional and
absent (`None`). Only a wrong one makes the command fail.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from rich.console import Console
from rich.table import Table

from tessera.tools.command import Command
from tessera.tools.machine import cxx_compiler, machine

OLDEST_TORCH = (2, 11)
OPTIONAL = {
    "triton": "GPU kernels",
    "xdsl": "the tile dialect",
    "llvmlite": "CPU kernels",
    "onnx": "the ONNX frontend",
    "transformers": "tests on whole models",
}


@dataclass(frozen=True)
class Check:
    """One finding. `ok` is None where something optional is absent."""

    name: str
    found: str
    ok: bool | None


def checks() -> Iterator[Check]:
    """Everything worth knowing before asking for help, in the order worth reading."""
    here = machine()
    yield Check("CPU", f"{here.cpu}, {here.cores} cores, {here.simd}", True)
    yield Check("GPU", here.gpu or "none: kernels run on the CPU", True if here.gpu else None)
    yield _torch(here.torch)
    yield _backend()
    yield Check(
        "C++ compiler",
        cxx_compiler() or "none: only TorchInductor needs one",
        True if cxx_compiler() else None,
    )
    for package, purpose in OPTIONAL.items():
        yield _package(package, purpose)


def _torch(found: str) -> Check:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release >= OLDEST_TORCH:
        return Check("torch", found, True)
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Check("torch", f"expected {oldest} or newer, got {found}; try: pip install 'torch>={oldest}'", False)


def _backend() -> Check:
    name = 'torch.compile(backend="tessera")'
    points = entry_points(group="torch_dynamo_backends", name="tessera")
    if not points:
        return Check(name, "not registered: the package is not installed; try: pip install -e .", False)
    try:
        points["tessera"].load()
    except (ImportError, AttributeError) as error:
        return Check(name, f"registered, but does not load: {error}", False)
    return Check(name, "registered", True)


def _package(package: str, purpose: str) -> Check:
    try:
        return Check(package, f"{version(package)}, for {purpose}", True)
    except PackageNotFoundError:
        return Check(package, f"absent, for {purpose}", None)


def arguments(parser: ArgumentParser) -> None:
    """Nothing to choose."""


def run(args: Namespace) -> int:
    """Print every check; fail if one of them is wrong."""
    found = list(checks())
    table = Table("check", "found", "")
    for check in found:
        mark = {True: "[green]ok", False: "[red]wrong", None: "[dim]absent"}[check.ok]
        table.add_row(check.name, check.found, mark)
    Console().print(table)
    return int(any(check.ok is False for check in found))


COMMAND = Command("check the installation and the machine", arguments, run)
