"""`tessera.machine`: any machine that is described, by its name or by its file.

In: a name or a path. Out: a `Machine` (GPUs and CPUs) or a `SpatialMachine`, by the `kind` that its TOML file names.
"""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

from tessera.machines import describe
from tessera.machines.describe import Machine
from tessera.machines.spatial import SpatialMachine, read
from tessera.util.errors import MachineError, OptionError


def machine(which: str | Path) -> Machine | SpatialMachine:
    """The machine of that name, or the one that a file describes: "toy", or "mine.toml".

    `print` it for every number and where it comes from.
    """
    if not isinstance(which, str | Path):
        raise OptionError(f"machine: expected a name or a TOML or JSON file, got {type(which).__name__}")
    path = Path(which)
    if path.suffix == ".toml":
        text = _text(path)
        return describe.machine(path) if describe.kind_of(text) in ("gpu", "cpu") else read(path.name, text)
    if (key := str(which).lower()) in spatial_machines():
        return _shipped(key)
    if path.suffix == ".json" or key in describe.known():
        return describe.machine(which)
    names = (*describe.known(), *spatial_machines())
    near = difflib.get_close_matches(key, names, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise OptionError(f"machine: unknown {str(which)!r}; there are {', '.join(names)}, or a TOML or JSON file{hint}")


def spatial_machine(which: str | Path) -> SpatialMachine:
    """As `machine`, where only a spatial one will do."""
    described = machine(which)
    if not isinstance(described, SpatialMachine):
        names = ", ".join(spatial_machines())
        raise OptionError(
            f"machine: expected a spatial one ({names}, or a TOML file); {described.key} is a {described.kind}"
        )
    return described


def _text(path: Path) -> str:
    if not path.is_file():
        raise OptionError(f"machine: there is no file {path}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MachineError(f"{path.name}: expected text in UTF-8: {error}") from None


def spatial_machines() -> tuple[str, ...]:
    return describe.known("spatial")


@functools.cache
def _shipped(key: str) -> SpatialMachine:
    return read(key, describe.shipped()[key][1])
