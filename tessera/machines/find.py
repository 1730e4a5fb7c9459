"""`tessera.machine`: any machine that is described, by its name or by its file.

In: a name or a path. Out: a `Machine` (GPUs and CPUs, described in JSON) or a `SpatialMachine` (TOML).
"""

from __future__ import annotations

import functools
from importlib.resources import files
from pathlib import Path

from tessera.machines import describe
from tessera.machines.describe import Machine
from tessera.machines.spatial import SpatialMachine, read
from tessera.util.errors import MachineError, OptionError


def machine(which: str | Path) -> Machine | SpatialMachine:
    """The machine of that name, or the one that a file describes: "toy", or "mine.toml".

    `print` it for every number and where it comes from.
    """
    path = Path(which)
    if path.suffix == ".toml":
        return spatial_file(path)
    if (key := str(which).lower()) in spatial_machines():
        return _shipped(key)
    if path.suffix == ".json" or key in describe.known():
        return describe.machine(which)
    names = ", ".join((*describe.known(), *spatial_machines()))
    raise OptionError(f"machine: unknown {str(which)!r}; there are {names}, or a TOML or JSON file")


def spatial_machine(which: str | Path) -> SpatialMachine:
    """As `machine`, where only a spatial one will do."""
    found = machine(which)
    if not isinstance(found, SpatialMachine):
        names = ", ".join(spatial_machines())
        raise OptionError(f"machine: expected a spatial one ({names}, or a TOML file); {found.key} is a {found.kind}")
    return found


def spatial_file(path: Path) -> SpatialMachine:
    if not path.is_file():
        raise OptionError(f"machine: there is no file {path}")
    try:
        return read(path.name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise MachineError(f"{path.name}: expected text in UTF-8: {error}") from None


@functools.cache
def spatial_machines() -> tuple[str, ...]:
    names = (file.name for file in (files("tessera.machines") / "data").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@functools.cache
def _shipped(key: str) -> SpatialMachine:
    return read(key, (files("tessera.machines") / "data" / f"{key}.toml").read_text(encoding="utf-8"))
