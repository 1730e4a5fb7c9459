"""`tessera.load`: an artifact as something that is called.

In: a file that `tessera.export` wrote. Out: a `Loaded`, which is called as the model was; `entries` are its functions
by name. No capture, no passes, no unpickling; nothing is compiled unless no kernels fit and the compiler is there.
Kernels run if the file is trusted (`trust.py`). `explain` says what runs how, and why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from tessera.artifact import cpu, cuda, trust
from tessera.artifact.beside import weights_of
from tessera.artifact.check import Arguments, arguments_of
from tessera.artifact.container import Container
from tessera.artifact.read import Program, around, read_program
from tessera.artifact.regions import Kernels
from tessera.artifact.structure import check_structure, unflatten
from tessera.artifact.upload import uploaded
from tessera.artifact.weights import check_type
from tessera.ir.serial_check import is_name
from tessera.ir.types import TensorType
from tessera.runtime.buckets import Buckets, bucketed
from tessera.runtime.capturable import why_not_captured
from tessera.runtime.cudagraph import Graphed
from tessera.util.errors import ArtifactError, InputError, OptionError
from tessera.util.garbage import collection_paused
from tessera.util.log import log
from tessera.util.phases import phase

PORTABLE = "portable"
COMPILER = ("sympy", "xdsl")  # and what compiles for the device
COMPILERS = {"cpu": "llvmlite", "cuda": "triton"}


@dataclass(frozen=True)
class Way:
    """How an entry runs."""

    target: str
    what: str  # in words


class Entry:
    """One function of an artifact."""

    def __init__(
        self, name: str, arguments: Arguments, out: list, held: list[torch.Tensor], program: Program, way: Way
    ) -> None:
        self.__name__ = self.name = name
        self.arguments, self.program, self.way = arguments, program, way
        self.held, self.out = tuple(held), out
        self.call: Callable[..., tuple] = program.call
        self.padded: Callable[..., object] | None = None  # the same over arguments that are padded first

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return self.direct(*args, **kwargs) if self.padded is None else self.padded(*args, **kwargs)

    def direct(self, /, *args: object, **kwargs: object) -> object:
        out = self.call(*self.held, *self.arguments.flat(args, kwargs))
        return out[0] if self.out == ["leaf"] else unflatten(iter(out), self.out)

    def left_to_pytorch(self, why: str) -> None:
        self.way = Way(PORTABLE, f"every operator by PyTorch, not compiled: {why}")

    def explain(self) -> str:
        lines = [f"{self.name}({', '.join(self.arguments.lines())})", f"  {self.way.what}"]
        return "\n".join(lines)


class Loaded:
    """What `tessera.load` gives: called as the model was, where there is one entry."""

    def __init__(self, path: str, entries: Mapping[str, Entry], about: tuple[str, ...], device: torch.device) -> None:
        self.path, self.entries, self._about = path, MappingProxyType(dict(entries)), about
        self.device = device

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        if len(self.entries) > 1:
            raise InputError(f"expected one of the entries {', '.join(self.entries)}: m.entries['…'](…)")
        return next(iter(self.entries.values()))(*args, **kwargs)

    def __getattr__(self, name: str) -> Entry:
        entries = self.__dict__.get("entries", {})
        if name not in entries:
            raise AttributeError(f"no entry called {name!r}; there are {', '.join(entries)}")
        return entries[name]

    def module(self) -> torch.nn.Module:
        """The model by PyTorch's operators, for whoever takes modules; its buffers are the file's weights."""
        return importlib.import_module("tessera.artifact.module").PortableModule(self.path)

    def explain(self) -> str:
        """What runs how, and why."""
        return "\n".join((*self._about, *(entry.explain() for entry in self.entries.values())))

    def __repr__(self) -> str:
        return f"<tessera artifact {self.path}: {', '.join(self.entries)}>"


def load(
    path: str | os.PathLike,
    *,
    device: str | torch.device | None = None,
    trust: bool | None = None,
    compile: bool | None = None,  # noqa: A002
    verify: bool | None = None,
    buckets: Buckets | None = None,
    cuda_graph: bool = False,
) -> Loaded:
    """Read an artifact; what it gives is called as the model was.

    device   where it runs: "cpu", "cuda:1"; the kind it was exported on where nobody says, if that is here
    trust    True: run the file's kernels whoever built it; False: never; None: if this user built it, or if somebody
             signed whom they trust
    compile  whether to compile where no kernels of the file can run; None: if the compiler is installed
    verify   compare the SHA-256 of all weights; None: of those up to 64 MiB
    buckets  sizes that changing inputs are padded to
    cuda_graph  on a GPU, replay programs as CUDA graphs; `explain` says where that cannot be
    """
    with phase("programs"), Container.open(path) as container, collection_paused():
        return _Loading(container, device, trust, compile, verify, buckets, cuda_graph).loaded()


class _Loading:
    def __init__(
        self,
        container: Container,
        device: str | torch.device | None,
        trusted: bool | None,
        compile_: bool | None,
        verify: bool | None,
        buckets: Buckets | None,
        cuda_graph: bool,
    ) -> None:
        self.container, self.manifest, self.buckets = container, container.manifest, buckets
        self.cuda_graph = cuda_graph
        self.home = _device(self.manifest.get("device"), f"{container.path}: device")
        with phase("device"):
            self.device = _chosen(device, self.home)
        self.trusted, self.verdict = trusted, _verdict(container, trusted)
        self.may_compile = compile_
        with phase("weights"):
            self.tensors, self.mapped = weights_of(container, verify)
            if self.device.type != "cpu":
                self.tensors = uploaded(self.tensors, self.device)
        self.notes: list[str] = []

    def loaded(self) -> Loaded:
        entries = self.manifest.get("entries")
        if not isinstance(entries, dict) or not entries or not all(isinstance(e, dict) for e in entries.values()):
            raise self.container.wrong("manifest", "expected entries")
        if not all(map(is_name, entries)):
            raise self.container.wrong("manifest", "expected plain names of entries")
        target, kernels = self._kernels()
        compiled = {name: self._entry(name, entry, target, kernels) for name, entry in entries.items()}
        about = (
            f"{self.container.path} on {self.device}: {self.verdict.why}",
            f"{self.mapped} bytes of weights, {'mapped' if self.device.type == 'cpu' else 'copied to the device'}",
            *self.notes,
        )
        for note in self.notes:
            log(1, f"{self.container.path}: {note}")
        return Loaded(str(self.container.path), compiled, about, self.device)

    def place(self, name: str) -> torch.device:
        """The device for one that the file names."""
        named = torch.device(name)
        return self.device if named.type in (self.home.type, self.device.type) else named

    # --- kernels ---

    def _kernels(self) -> tuple[str, Kernels | None]:
        """The best target of the file whose kernels run here, and these kernels."""
        targets = self.manifest.get("targets")
        if not isinstance(targets, dict) or not all(isinstance(t, dict) for t in targets.values()):
            raise self.container.wrong("manifest", "expected targets")
        fitting = []
        for name, target in targets.items():
            if target.get("kind") != self.device.type:
                self.notes.append(f"kernels for {name[:40]} are left out: this is {self.device}")
            elif why := cuda.misfit(target, self.device) if self.device.type == "cuda" else cpu.misfit(target):
                self.notes.append(f"kernels for {name[:40]} are left out: {why}")
            else:
                fitting.append(name)
        if fitting and not self.verdict.trusted:
            if self.trusted is None:
                told = f"{self.container.path}: its kernels are left out: {self.verdict.why}"
                warnings.warn(f"{told}; trust=True runs them all the same", stacklevel=5)
            return PORTABLE, None
        of = cuda if self.device.type == "cuda" else cpu
        for name in sorted(fitting, key=lambda name: of.rank(targets[name])):
            try:
                if self.device.type == "cuda":
                    return name, cuda.ready(self.container, name, targets[name], self.device)
                return name, cpu.ready(self.container, name, targets[name])
            except OSError as error:
                self.notes.append(f"kernels for {name} are left out: {error}")
        return PORTABLE, None

    # --- entries ---

    def _entry(self, name: str, about: dict, target: str, kernels: Kernels | None) -> Entry:
        where = f"{self.container.path}: entries[{name[:40]}]"
        arguments = arguments_of(about, self.place, where)
        count = check_structure(about.get("out"), f"{where}.out")
        held, programs = about.get("held"), about.get("programs")
        if not isinstance(held, list) or not all(isinstance(n, str) and n in self.tensors for n in held):
            raise ArtifactError(f"{where}.held: expected names of weights")
        if not isinstance(programs, dict) or not all(isinstance(p, list) and p for p in programs.values()):
            raise ArtifactError(f"{where}.programs: expected a program for every target")
        chosen = target if target in programs else PORTABLE
        if chosen not in programs:
            raise ArtifactError(f"{where}.programs: expected one called {PORTABLE!r}")
        program = read_program(self.container, programs[chosen][0], self.tensors, kernels, self.place)
        if len(program.layout.outputs) != count or len(program.trace.inputs) != len(held) + arguments.count:
            raise ArtifactError(f"{where}: expected a program of {len(held)} weights, these arguments and results")
        weights, way = [self.tensors[n] for n in held], self._way(chosen, program)
        for v, x in zip(program.trace.inputs, weights, strict=False):
            check_type(v, x, f"{where}.held")
        entry = Entry(name, arguments, about["out"], weights, program, way)
        if chosen == PORTABLE and self._compiles():
            compiled = importlib.import_module("tessera.artifact.compile")
            entry.call = compiled.compiled(program, entry.left_to_pytorch)
            entry.way = Way(PORTABLE, "compiled on this machine when it is first called")
        elif self.cuda_graph:
            self._replay(entry)
        if self.buckets is not None:
            entry.padded = bucketed(entry.direct, self.buckets, arguments.parameters)
        return entry

    def _replay(self, entry: Entry) -> None:
        """The program as one that is replayed as a CUDA graph, where it can be."""
        program = entry.program
        if reason := why_not_captured(program.trace):
            entry.way = replace(entry.way, what=f"{entry.way.what}; no CUDA graph: {reason}")
            return
        fixed = [isinstance(v.type, TensorType) and not v.type.is_symbolic for v in program.trace.inputs]
        varying = [i for i, known in enumerate(fixed) if not known]
        graphed = Graphed(program.run, program.written, self.device, varying=varying)
        entry.call = around(graphed, program.layout)
        entry.way = replace(entry.way, what=f"{entry.way.what}; replayed as a CUDA graph")

    def _way(self, target: str, program: Program) -> Way:
        if target == PORTABLE:
            return Way(target, "every operator by PyTorch")
        kernels, plain = program.counts["kernel"], program.counts["aten"]
        told = f"kernels for {target}: {kernels} regions by kernels of the file"
        return Way(target, told + (f", {plain} by PyTorch's operators" if plain else ""))

    def _compiles(self) -> bool:
        missing = [p for p in (*COMPILER, COMPILERS.get(self.device.type, "")) if not _installed(p)]
        if self.may_compile and missing:
            raise OptionError(f"compile=True needs {', '.join(missing)}, which cannot be imported")
        return self.may_compile is not False and not missing


def _verdict(container: Container, asked: bool | None) -> trust.Verdict:
    if asked is None:
        return trust.verdict(container)
    return trust.Verdict(asked, "trusted, because the caller says so" if asked else "the caller does not trust it")


def _device(name: object, where: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ArtifactError(f"{where}: expected cpu or cuda, got {str(name)[:40]!r}")
    return torch.device(str(name))


def _chosen(asked: str | torch.device | None, home: torch.device) -> torch.device:
    try:
        device = torch.device(asked if asked is not None else home if _cuda() else "cpu")
    except RuntimeError:
        raise OptionError(f"device: expected cpu, cuda or cuda:1, got {asked!r}") from None
    if device.type == "cuda" and (not _cuda() or (device.index or 0) >= torch.cuda.device_count()):
        raise OptionError(f"device: expected one that is here, got {device}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@functools.cache
def _cuda() -> bool:
    return torch.cuda.is_available()


def _installed(package: str) -> bool:
    try:
        return bool(package) and importlib.util.find_spec(package) is not None
    except ImportError:
        return False
