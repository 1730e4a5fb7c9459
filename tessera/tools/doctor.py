"""`tessera doctor`: is this installation whole, and what will Tessera find on this machine?

Each check is a name, what was found, and whether that is right (`True`), wrong (`False`) or optional and
absent (`None`). Only a wrong one makes the command fail.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tessera.executors import default
from tessera.executors.base import FusionExecutor, known
from tessera.tile.targets import TARGETS, missing
from tessera.tools.command import Command, json_argument, write_json
from tessera.tools.machine import cxx_compiler, machine
from tessera.util.config import config

OLDEST_TORCH = (2, 11)
CXX_REMEDY = "try: apt install g++"
# package: (what for, what installs it)
OPTIONAL = {
    "triton": ("GPU kernels", "pip install 'tessera[gpu]'"),
    "cuda-tile": ("kernels by NVIDIA's tile compiler", "pip install 'tessera[cutile]'"),
    "xdsl": ("the tile dialect", "pip install xdsl"),
    "llvmlite": ("CPU kernels", "pip install llvmlite"),
    "transformers": ("tests on whole models", "pip install transformers"),
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
        cxx_compiler() or f"none: only TorchInductor needs one; {CXX_REMEDY}",
        True if cxx_compiler() else None,
    )
    for package, (purpose, remedy) in OPTIONAL.items():
        yield _package(package, purpose, remedy)
    yield from _targets()
    yield from _executors()


def _targets() -> Iterator[Check]:
    """Who makes kernels, and for which of the devices that are here."""
    for name in TARGETS:
        if reason := missing(name):
            yield Check(f"target {name}", reason, None)
        elif name != "cpu" and not torch.cuda.is_available():
            yield Check(f"target {name}", "installed; no GPU here to run its kernels", None)
        else:
            yield Check(f"target {name}", "ready", True)


def _executors() -> Iterator[Check]:
    """Who may run operators; those of the default list are marked."""
    chosen = default.named(config.executors)
    for executor in known():
        kind = "fuses regions" if isinstance(executor, FusionExecutor) else "runs single operators"
        note = f", needs a C++ compiler; {CXX_REMEDY}" if executor.name == "inductor" and not cxx_compiler() else ""
        place = "in the default list" if executor.name in chosen else "named by executors=[…]"
        yield Check(f"executor {executor.name}", f"{kind}, {place}{note}", None if note else True)


def _torch(installed: str) -> Check:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release >= OLDEST_TORCH:
        return Check("torch", installed, True)
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Check("torch", f"expected {oldest} or newer, got {installed}; try: pip install 'torch>={oldest}'", False)


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


def _package(package: str, purpose: str, remedy: str) -> Check:
    try:
        return Check(package, f"{version(package)}, for {purpose}", True)
    except PackageNotFoundError:
        return Check(package, f"absent, for {purpose}; try: {remedy}", None)


def run(args: Namespace) -> int:
    """Print every check; fail if one of them is wrong."""
    results = list(checks())
    if not write_json(args, [asdict(check) for check in results]):
        table = Table("check", "found", "")
        for check in results:
            mark = {True: "[green]ok", False: "[red]wrong", None: "[dim]absent"}[check.ok]
            table.add_row(escape(check.name), escape(check.found), mark)
        Console().print(table)
    return int(any(check.ok is False for check in results))


COMMAND = Command(json_argument, run)
