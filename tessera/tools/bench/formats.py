"""`tessera bench formats`: a GPT as one file: what building it costs, loading it to the first result, and calls of it.

Each contestant is measured in fresh processes through `tools/format_probe.py` and `format_tasks.py`. TorchInductor's
packages take minutes to build and are measured where `--inductor` asks for them.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tessera.tools import format_probe
from tessera.tools.bench import format_tasks
from tessera.tools.bench.core import Options, Say, options_of
from tessera.tools.bench.measure import Samples, in_fresh_process
from tessera.tools.bench.report import Outcome, Row, Target, listed, rows, table

TITLE = "one thread, CPU seconds; a GPT of 12 layers, 128 wide, any batch and length"
OURS, PEER = "tessera artifact", "AOTInductor"
BLOCKS = 10  # of calls, for each round asked for


def _files(folder: Path) -> dict[str, str]:
    return {OURS: str(folder / "gpt.tess"), PEER: str(folder / "gpt.pt2")}


def build(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    """Once: it takes long, and what is measured is CPU time."""
    samples: Samples = {}
    for who in (OURS, *options.extra):
        say(f"{title}: {who}")
        samples[who] = [_probe(format_tasks.build, who=who, path=_files(folder)[who])]
    return rows(title, "ms", samples, PEER, {OURS: Target(0.2, PEER)})


def first(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    """From nothing but `import torch` to the first result."""
    names = ["eager", OURS, "tessera.jit", *options.extra]
    samples: Samples = {who: [] for who in names}
    for number in range(options.rounds):
        for who in names:
            say(f"{title}: {who}, round {number + 1} of {options.rounds}")
            samples[who].append(_probe(format_probe.first, who=who, path=_files(folder).get(who, "")))
    return rows(title, "ms", samples, "eager", {OURS: Target(600.0)})


def steady(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    say(title)
    files = {who: _files(folder).get(who, "") for who in ("eager", OURS, "tessera.jit", *options.extra)}
    samples = _probe(format_tasks.steady, files=files, rounds=BLOCKS * options.rounds)
    return rows(title, "ms", samples, "eager", {OURS: Target(1.03, "tessera.jit")})


SECTIONS: dict[str, Callable[[Path, Options, Say], list[Row]]] = {
    name: partial(section, name) for name, section in (("build", build), ("load", first), ("steady", steady))
}


def outcome(args: Namespace, say: Say) -> Outcome:
    options = Options(options_of(args).rounds, extra=(PEER,) if args.inductor else ())
    with tempfile.TemporaryDirectory() as folder:
        measured = run(args.only, Path(folder), options, say)
    missed = any(row.passed is False for row in measured)
    return Outcome(TITLE, table(measured, "tessera bench formats"), listed(measured), missed)


def run(only: Sequence[str], folder: Path, options: Options, say: Say) -> list[Row]:
    """The files are built in any case."""
    built = build("build", folder, options, say)
    chosen = [name for name in only or SECTIONS if name != "build"]
    others = [row for name in chosen for row in SECTIONS[name](folder, options, say)]
    return [*(built if not only or "build" in only else []), *others]


def _probe(task: Callable[..., object], **options: Any) -> Any:
    return in_fresh_process(task.__module__, task.__name__, **options)
