"""Chains: programs in parts, each of which runs several times, on other chips and with other tensors.

A part is a listing. A run of it begins at a cycle, on chips that stand for those that the part names; its tensors have
the run's name before their own. docs/machine.md says what a chain does. In text, inputs and runs come first and parts
behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from tessera.spatial.listing.expression import NAME
from tessera.spatial.listing.parse import parse
from tessera.spatial.listing.text import every_text, print_listing
from tessera.spatial.listing.types import Listing
from tessera.util.errors import ListingError

HEAD = "tessera spatial chain 1"
COMMON = "common"  # tensors whose names begin so are the same in all runs of a part
_INPUTS = re.compile(rf"inputs((?: {NAME})*) *")
_RUN = re.compile(rf"run +@([0-9]{{1,15}}) +({NAME}) +({NAME}) +chips((?: [0-9]{{1,6}}>[0-9]{{1,6}})+) *")
_END = re.compile(r"end ([0-9]{1,15})(?: every ([0-9]{1,15}))? *")
_PART = re.compile(rf"^part ({NAME})\n", re.M)


@dataclass(frozen=True)
class Run:
    start: int
    part: str
    name: str
    chips: tuple[tuple[int, int], ...]  # a chip that the part names, and the one that stands for it


@dataclass(frozen=True)
class Chain:
    inputs: tuple[str, ...]  # in the order in which they are given
    parts: Mapping[str, Listing]
    runs: tuple[Run, ...]
    end: int
    every: int | None = None  # cycles after which the first run may begin again; None: only when the last has ended


def print_chain(chain: Chain) -> str:
    lines = [HEAD, " ".join(["inputs", *chain.inputs])]
    for run in chain.runs:
        chips = " ".join(f"{a}>{b}" for a, b in run.chips)
        lines.append(f"run  @{run.start}  {run.part}  {run.name}  chips {chips}")
    lines.append(f"end {chain.end}{every_text(chain.every)}")
    for name, listing in chain.parts.items():
        lines += ["", f"part {name}", print_listing(listing).rstrip("\n")]
    return "\n".join([*lines, ""])


def parse_chain(text: str) -> Chain:
    head, *parts = _PART.split(text)
    lines = head.rstrip("\n").split("\n")
    if lines[0] != HEAD:
        _refuse(1, HEAD, lines[0])
    if len(lines) < 2 or (inputs := _INPUTS.fullmatch(lines[1])) is None:
        _refuse(2, "inputs and their names", lines[1] if len(lines) > 1 else "its end")
    runs: list[Run] = []
    for number, line in enumerate(lines[2:-1], 3):
        if (match := _RUN.fullmatch(line)) is None:
            _refuse(number, "run  @cycle  part  name  chips a>b …", line)
        start, part, name, chips = match.groups()
        pairs = tuple((int(a), int(b)) for a, b in re.findall(r"([0-9]+)>([0-9]+)", chips))
        runs.append(Run(int(start), part, name, pairs))
    if (end := _END.fullmatch(lines[-1])) is None:
        _refuse(len(lines), "end and a cycle behind the runs", lines[-1])
    listings: dict[str, Listing] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in listings:
            raise ListingError(f"expected parts with names of their own; {name} is there twice")
        try:
            listings[name] = parse(body)
        except ListingError as error:
            raise ListingError(f"part {name}: {error}") from None
    every = None if end[2] is None else int(end[2])
    return Chain(tuple(inputs[1].split()), listings, tuple(runs), int(end[1]), every)


def _refuse(line: int, expected: str, got: str) -> NoReturn:
    raise ListingError(f"line {line}: expected {expected!r}, got {got[:100]!r}")
