"""`tessera bench formats`: what programs cost that come from a file, or leave as one.

    build, load, steady  a GPT as an artifact: making the file, from the file to the first result, calls after that
    import, networks     ONNX files: to the first result; calls of the zoo's networks, a BERT and a GPT
    export               the GPT as an ONNX file: time and nodes
    jax                  kernels of a GPT's block that JAX wrote
    llama                an artifact of 1.2 GB on a GPU, from the file to the first result; elsewhere with `--tiny`

Each contestant is measured in fresh processes, through `tools/format_probe.py` and the other files `format_*`.
TorchInductor's packages take minutes to build and are measured where `--inductor` asks for them. Sections, and peers,
whose packages are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tessera.tools import format_probe
from tessera.tools.bench import core, format_llama, format_tasks
from tessera.tools.bench.core import Say, options_of
from tessera.tools.bench.format_names import EXPORTED, JAX, JIT, ONNX, ORT, TORCH, TORCH_ONNX, ZOO
from tessera.tools.bench.measure import Samples, in_fresh_process, ratio
from tessera.tools.bench.report import Outcome, Row, Target, listed, rows, table

TITLE = "one thread, CPU seconds; a GPT of 12 layers, 128 wide, any batch and length"
OURS, PEER = "tessera artifact", "AOTInductor"
BLOCKS = 10  # of calls, for each round asked for


@dataclass(frozen=True)
class Options(core.Options):
    """`device` and `tiny` are those of the section `llama`."""

    device: str = "cpu"
    tiny: bool = False


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


def imported(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    """Reading the file may cost a tenth of what compiling the same network costs."""
    measured: list[Row] = []
    for name in EXPORTED if _installed("onnx", "onnxscript", "transformers") else ():
        path = str(folder / f"{name}.onnx")
        _door("write", name=name, path=path)
        samples: Samples = {ONNX: [], JIT: []}
        for number in range(options.rounds):
            for who, seconds in samples.items():
                say(f"{title}: {name}, {who}, round {number + 1} of {options.rounds}")
                seconds.append(_door("first", name=name, who=who, path=path))
        measured += rows(f"{title}: {name}", "ms", samples, JIT, {ONNX: Target(1.1, JIT)})
    return measured


def networks(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    """Every network, and the geometric mean of the ratios to ONNX Runtime."""
    if not _installed("onnx"):
        return []
    measured, ratios = [], []
    for name in (*ZOO, *(EXPORTED if _installed("onnxscript", "transformers") else ())):
        say(f"{title}: {name}")
        path = str(folder / f"{name}.onnx")
        _door("write", name=name, path=path)
        samples: Samples = _door("steady", name=name, path=path, rounds=options.rounds + 2)
        Path(path).unlink()
        measured += rows(f"{title}: {name}", "ms", samples, "eager", {ONNX: Target(1.0, "eager")})
        if ORT in samples:
            ratios.append(ratio(samples, ONNX, ORT))
            measured.append(Row(f"{title}: {name}", ONNX, f"x {ORT}", (ratios[-1],)))
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        measured.append(Row(f"{title}: geometric mean", ONNX, f"x {ORT}", (mean,), at_most=1.2))
    return measured


def exported(title: str, _: Path, options: Options, say: Say) -> list[Row]:
    """In a new process, and once everything is imported; nodes are counted in functions too."""
    if not _installed("onnx"):
        return []
    seconds: dict[str, list[float]] = {}
    nodes: Samples = {}
    for who in (ONNX, *((TORCH_ONNX,) if _installed("onnxscript") else ())):
        say(f"{title}: {who}")
        seconds[who], count = _door("export", who=who, times=2)
        nodes[who] = [count]
    cold, warm = ({who: [times[i]] for who, times in seconds.items()} for i in (0, 1))
    limit = {ONNX: Target(0.25, TORCH_ONNX)}
    return [
        *rows(f"{title}, first", "ms", cold, TORCH_ONNX, limit),
        *rows(f"{title}, again", "ms", warm, TORCH_ONNX, limit),
        *rows(f"{title}, nodes", "nodes", nodes, TORCH_ONNX, {ONNX: Target(0.7, TORCH_ONNX)}),
    ]


def from_jax(title: str, _: Path, options: Options, say: Say) -> list[Row]:
    if not _installed("jax"):
        return []
    say(title)
    samples = {who: [count] for who, count in _door("kernels").items()}
    return rows(title, "kernels", samples, TORCH, {JAX: Target(1.2, TORCH)})


def llama(title: str, folder: Path, options: Options, say: Say) -> list[Row]:
    """By the clock: reading, copying and the start of the device count."""
    if options.device == "cpu" and not options.tiny:
        return []
    say(f"{title}: build")
    files = {"path": str(folder / "llama.tess"), "asked": str(folder / "llama.pt"), "device": options.device}
    samples: Samples = {"build": [_probe(format_llama.build, tiny=options.tiny, **files)]}
    for number in range(options.rounds):
        say(f"{title}: load, round {number + 1} of {options.rounds}")
        for part, seconds in _probe(format_probe.answer, **files).items():
            samples.setdefault(part, []).append(seconds)
    return rows(f"{title}, by the clock", "ms", samples, "", {"first result": Target(2000.0)})


SECTIONS: dict[str, Callable[[Path, Options, Say], list[Row]]] = {
    name: partial(section, name)
    for name, section in (
        ("build", build), ("load", first), ("steady", steady), ("import", imported), ("networks", networks),
        ("export", exported), ("jax", from_jax), ("llama", llama),
    )
}  # fmt: skip
ARTIFACT = ("build", "load", "steady")  # they need the files that `build` makes


def outcome(args: Namespace, say: Say) -> Outcome:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(options_of(args).rounds, None, (PEER,) if args.inductor else (), device, args.tiny)
    with tempfile.TemporaryDirectory() as folder:
        measured = run(args.only, Path(folder), options, say)
    missed = any(row.passed is False for row in measured)
    return Outcome(TITLE, table(measured, "tessera bench formats"), listed(measured), missed)


def run(only: Sequence[str], folder: Path, options: Options, say: Say) -> list[Row]:
    """Artifacts are built if any section needs them."""
    chosen = [name for name in only or SECTIONS if name != "build"]
    needed = not only or any(name in ARTIFACT for name in only)
    built = build("build", folder, options, say) if needed else []
    others = [row for name in chosen for row in SECTIONS[name](folder, options, say)]
    return [*(built if not only or "build" in only else []), *others]


def _probe(task: Callable[..., object], **options: Any) -> Any:
    return in_fresh_process(task.__module__, task.__name__, **options)


def _door(task: str, **options: Any) -> Any:
    return in_fresh_process("tessera.tools.bench.format_doors", task, **options)


def _installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)
