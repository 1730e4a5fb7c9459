"""All flags of Tessera, in one place.

Each flag is one field of `Config`; its environment variable is `TESSERA_` and the name in capitals.
`config` is the process-wide instance; `with override(strict=True):` changes it for a while.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.util.errors import OptionError

CHOICES = {
    "recompute": ("none", "views", "cheap", "auto"),
    "offload": ("none", "host"),
    "fused_random": ("auto", "on", "off"),
    "fp8_matmul": ("auto", "on", "off"),
    "frontend": ("dynamo", "functional"),
}  # flags with few values
BYTES = ("memory_budget", "cache_size")  # flags that are a number of bytes, or empty


@dataclasses.dataclass
class Config:
    """The flags: read and set them here, or set them for a while with `override`."""

    strict: bool = False  # raise on an internal failure instead of running that graph eagerly
    dump: str = ""  # folder that receives every stage of every compilation, numbered
    verify: bool = False  # run the trace verifier after every stage, and hold every kernel to the types of its results
    log: int = 0  # 0 silent · 1 one line a compilation · 2 one line a stage · 3 traces
    executors: str = "auto"  # who may run what, in priority order, such as "sdpa,aten"; auto: see executors/default.py
    recompute: str = "auto"  # what backward may recompute: none · views · cheap · auto
    memory_budget: str = ""  # bytes that may be saved for backward, such as "8GB"
    offload: str = "none"  # where large tensors wait for backward: none (on their device) · host
    reinplace: bool = True  # write into mutated inputs and dead values where legal
    autotune: bool = False  # off: the first proposed schedule · on: measure a few, keep the fastest on disk
    machine: str = "auto"  # whose figures cost models read, such as "a100" or a TOML file · auto: the device's own
    fused_random: str = "auto"  # random numbers computed inside kernels: on · off (PyTorch draws) · auto: on GPUs
    fp8_matmul: str = "auto"  # layers quantized to fp8 multiply many rows in 8 bits: on · off · auto: on GPUs that can
    program_cache: bool = True  # compiled programs are kept on disk, and a later process begins with them
    cache_size: str = "4GB"  # of everything kept on disk; what was used longest ago goes first · empty: no bound
    frontend: str = "dynamo"  # how `jit` captures: dynamo · functional

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            text = os.environ.get(f"TESSERA_{field.name.upper()}")
            if text is not None:
                setattr(self, field.name, _parse(field.name, text, getattr(self, field.name)))

    def __setattr__(self, name: str, value: object) -> None:
        check_flags({name: value})
        object.__setattr__(self, name, value)


def _parse(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "true", "false", "on", "off"):
            raise OptionError(f"TESSERA_{name.upper()}: expected 0, 1, true, false, on or off, got {text!r}")
        return text.lower() in ("1", "true", "on")
    if isinstance(default, int):
        if not text.lstrip("-").isdigit():
            raise OptionError(f"TESSERA_{name.upper()}: expected a whole number, got {text!r}")
        return int(text)
    _check_choice(name, text)
    return text


def _check_choice(name: str, value: object) -> None:
    if name in CHOICES and value not in CHOICES[name]:
        raise OptionError(f"{name}: expected one of {', '.join(CHOICES[name])}, got {value!r}")


def parse_bytes(text: str | int, option: str) -> int:
    """'8GB' -> 8_000_000_000, '512MiB' -> 536_870_912; a number stays as it is."""
    units = {"k": 1, "m": 2, "g": 3, "t": 4, "": 0}
    match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kmgt]?)(i?)b?\s*", str(text), re.IGNORECASE)
    if isinstance(text, bool) or match is None:
        raise OptionError(f"{option}: expected a size such as '8GB' or '512MiB', got {text!r}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** units[unit.lower()])


def check_flags(flags: dict[str, object]) -> None:
    known = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    for name, value in flags.items():
        if name not in known:
            raise OptionError(f"unknown option {name!r}; the options are {', '.join(known)}")
        if known[name] in (bool, int) and not isinstance(value, known[name]):
            raise OptionError(f"{name}: expected {known[name].__name__}, got {value!r}")
        _check_choice(name, value)
        if name in BYTES and value:
            parse_bytes(value, name)  # type: ignore[arg-type]


config = Config()


@contextmanager
def override(**flags: object) -> Iterator[Config]:
    """Set some flags for the time of a `with` block."""
    check_flags(flags)
    before = {name: getattr(config, name) for name in flags}
    try:
        for name, value in flags.items():
            setattr(config, name, value)
        yield config
    finally:
        for name, value in before.items():
            setattr(config, name, value)
