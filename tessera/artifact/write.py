"""`tessera.export`: compile models now, into one file that runs without the compiler.

In: a model and example arguments, or several by name, and the kinds of machines to compile for. Out: a file
(`container.py`). Entries share weights: a tensor that several hold is in the file once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from tessera.artifact import trust
from tessera.artifact.beside import share
from tessera.artifact.build import PORTABLE, Entry
from tessera.artifact.container import Writer
from tessera.artifact.keep import CpuKernels, TargetKernels
from tessera.artifact.keep_cuda import CudaKernels
from tessera.artifact.source import source_of
from tessera.artifact.text import MOST_VALUES, count_values, write_json
from tessera.artifact.weights import Shelf
from tessera.frontends.export_model import exported_program
from tessera.ir.serial_check import is_name
from tessera.machines import known, machine
from tessera.tile.targets import missing
from tessera.tile.targets.cpu.levels import LEVELS, levels_here
from tessera.util.errors import OptionError
from tessera.util.files import check_writable
from tessera.util.version import VERSION

MAIN = "main"
DEFAULTS = (None, (), None, None)  # of an entry: model, args, dynamic, kwargs
WEIGHTS = "weights.safetensors"
Model = Callable | ExportedProgram


def export(
    model: Model | Mapping[str, tuple | ExportedProgram],
    args: tuple = (),
    path: str | os.PathLike = "",
    *,
    kwargs: dict | None = None,
    dynamic: Mapping | None = None,
    targets: str | Sequence[str] | None = None,
    weights: str | None = None,
) -> None:
    """Compile a model for the given example arguments and write it to one file; `tessera.load` runs it.

    model    a module, a function or an exported program; or several by name, `{"prefill": (model, args), …}`, where a
             third and fourth item of a tuple are `dynamic` and `kwargs`
    dynamic  sizes that may change: `{"x": {0: "batch", 1: ("length", 1, 512)}}`; a name stands for one size
    targets  "cpu" is this machine's kind of processor, "cpu:x86-64-v3" another, "cuda:sm_90" a GPU, which need not be
             here; None is the kind of device that the model is on. Every file runs on any machine that PyTorch runs
             on, by PyTorch's operators where no target fits
    weights  the name of a .safetensors file beside the artifact, for parameters and buffers that several artifacts
             share; one that is there is used where it holds what the model does. None: inside the artifact
    """
    if not path:
        raise OptionError("expected a path to write to")
    write(_entries(model, args, kwargs, dynamic), path, targets, weights)


def write(
    given: Mapping[str, tuple], path: str | os.PathLike, targets: str | Sequence[str] | None = None,
    weights: str | None = None, facts: Mapping[str, object] | None = None, members: Mapping[str, bytes] | None = None,
    few: Collection[str] = (),
) -> None:  # fmt: skip
    """The same for entries of a model, its arguments, those by name, and its sizes. `facts` go into the manifest and
    `members` into the file, for whoever reads them there. The entries `few` have few rows, and need Triton."""
    check_writable(path)
    kernels = None if targets is None else _all_kernels(targets)  # or refused, before anything is captured
    shelf = Shelf()
    entries = {name: Entry(name, source_of(*call, name), shelf) for name, call in given.items()}
    if kernels is None:
        kernels = _all_kernels(dict.fromkeys(entry.device for entry in entries.values()))
    for entry in entries.values():
        entry.compile(PORTABLE, None)
        for target, of in kernels.items():
            entry.compile(target, of, _machine(of), entry.name in few)
    _write(Path(path), entries, kernels, shelf, weights, facts or {}, members or {})


def to_exported(
    model: Model, args: tuple = (), *, kwargs: dict | None = None, dynamic: Mapping | None = None
) -> ExportedProgram:
    """The model, for the given example arguments, as a `torch.export.ExportedProgram`; `dynamic` as for `export`."""
    return exported_program(model, args, kwargs or {}, dynamic)[0]


def _entries(model: object, args: tuple, kwargs: dict | None, dynamic: object) -> dict[str, tuple]:
    if not isinstance(model, Mapping):
        return {MAIN: (model, args, kwargs or {}, dynamic)}
    if args or kwargs or dynamic or not model:
        raise OptionError("several entries bring their arguments each: {'name': (model, args, dynamic, kwargs)}")
    calls = {}
    for name, call in model.items():
        if not is_name(name):
            raise OptionError(f"expected plain names of entries, got {name!r}")
        parts = call if isinstance(call, tuple) else (call,)
        if not 1 <= len(parts) <= len(DEFAULTS):
            raise OptionError(f"{name}: expected (model, args, dynamic, kwargs), got {len(parts)} items")
        one, example, sizes, named = (*parts, *DEFAULTS[len(parts) :])
        calls[name] = (one, example, named or {}, sizes)
    return calls


def _all_kernels(targets: str | Iterable[str]) -> dict[str, TargetKernels]:
    return dict(_kernels(t) for t in ([targets] if isinstance(targets, str) else targets))


def _kernels(target: str) -> tuple[str, TargetKernels]:
    """What holds the kernels of a target, and the target by its full name."""
    kind, _, arch = target.partition(":")
    if kind == "cuda":
        if not arch and torch.cuda.is_available():
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        if not re.fullmatch(r"sm_\d{2,3}", arch):
            raise OptionError(f"targets: expected cuda:sm_90 or the like, got {target!r}")
        if problem := missing("triton"):
            raise OptionError(problem)
        return f"cuda:{arch}", CudaKernels(int(arch.removeprefix("sm_")))
    level = _level(target)
    return f"cpu:{level}", CpuKernels(level)


def _machine(kernels: TargetKernels) -> str:
    """A machine of this architecture, by name, where the one at hand is none."""
    if not isinstance(kernels, CudaKernels):
        return ""
    arch = f"sm_{kernels.arch}"
    if torch.cuda.is_available() and "sm_{}{}".format(*torch.cuda.get_device_capability()) == arch:
        return ""
    names = [name for name in known() if machine(name).architecture == arch]
    if not names:
        raise OptionError(f"targets: no machine of {arch} is described; there are {', '.join(known())}")
    return names[-1]


def _level(target: str) -> str:
    kind, _, level = target.partition(":")
    if kind != "cpu" or (level and level not in LEVELS):
        raise OptionError(f"targets: expected cuda:sm_90, or cpu:LEVEL with one of {', '.join(LEVELS)}, got {target!r}")
    if not level and not levels_here():
        raise OptionError(f"targets: this machine is of no level that is known; choose one of {', '.join(LEVELS)}")
    return level or levels_here()[0]


def _write(
    path: Path, entries: dict[str, Entry], kernels: dict[str, TargetKernels], shelf: Shelf, weights: str | None,
    facts: Mapping[str, object], members: Mapping[str, bytes],
) -> None:  # fmt: skip
    manifest: dict = {
        **facts,
        "made_by": {"tessera": VERSION, "torch": torch.__version__},
        "device": next(iter(entries.values())).device,
        "weights": WEIGHTS,
        "views": shelf.views(),
        "targets": {},
        "entries": {},
    }
    inside = shelf
    if weights is not None:
        shared = set[str]().union(*(entry.shared for entry in entries.values()))
        manifest["beside"] = beside = share(path, weights, shelf.only(shared))
        inside = shelf.only(shelf.tensors.keys() - set(beside["tensors"]))  # type: ignore[call-overload]
    with Writer(path) as file:
        file.add(WEIGHTS, inside.chunks())
        for target, of in kernels.items():
            member = f"kernels/{target.replace(':', '-')}.bin"
            file.add(member, [of.code()])
            manifest["targets"][target] = {"kind": of.kind, "code": member, **of.listed()}
        values = dict.fromkeys((PORTABLE, *kernels), 0)
        for name, entry in entries.items():
            programs = {}
            for target, program in entry.built.programs.items():
                stem = f"{name}/{target.replace(':', '-')}"
                text = write_json(program)
                values[target] += count_values(text)
                file.add(f"programs/{stem}.json", [text])
                file.add(f"texts/{stem}.py", [entry.built.texts[target].encode()])
                programs[target] = [f"programs/{stem}.json", f"texts/{stem}.py"]
            manifest["entries"][name] = {**entry.built.about, "programs": programs}
        for name, data in members.items():
            file.add(name, [data])
        if (most := max(values.values()) + count_values(write_json(manifest))) > MOST_VALUES:
            raise OptionError(f"programs of {most} values; at most {MOST_VALUES} are read from one file")
        file.finish(manifest, trust.own_tag)
