"""Runs emitted kernels: loads the module, picks the variant that fits the sizes, and launches it cheaply.

A kernel with symbols has variants: offsets of 32 or 64 bits, and a loop along the reduced axis where it does not fit
into the schedule's one block. Which one a call needs follows from the symbols alone, so the decision is kept per
symbols. Triton compiles a variant when it first runs, or ahead of that where the sizes are known. After that, a call
with the same symbols on the same device with the same alignment of addresses takes the short way (`direct`); every
other call goes the ordinary way.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from types import ModuleType

import torch

from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.dialect.types import element_of
from tessera.tile.schedules.schedule import Schedule, read_schedule, reduced_axis
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.pair import Pair, read_scratch
from tessera.tile.targets.triton import ahead, direct, shim
from tessera.tile.targets.triton.bulk import Bulk
from tessera.tile.targets.triton.descriptors import Kept, prepared
from tessera.tile.targets.triton.direct import Alignment, Direct, alignment, through_tensors
from tessera.tile.targets.triton.emit import Options
from tessera.tile.targets.triton.halves import halves, in_two, schedules
from tessera.tile.targets.triton.layout import layout, needs_wide
from tessera.tile.targets.triton.tiles import bulks, walks_tiles, write
from tessera.util import disk as cache
from tessera.util.errors import InputError

REMEMBERED = 4096  # symbols and alignments whose decisions are kept
LOOP_BLOCK = 2048
PIECE = 256  # bytes that scratch buffers start at a multiple of


@functools.cache
def load_module(source: str, stem: str) -> ModuleType:
    """The emitted module, imported from a file that holds it (Triton reads a kernel's text from its file)."""
    path = cache.write_source("source", stem, source)
    name = f"tessera_kernels.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if shim.interpreting():
        shim.install(module)
    return module


@dataclass(frozen=True)
class Variant:
    """One emitted text of a kernel."""

    name: str
    source: str
    warps: int
    stages: int
    key: tuple[bool, bool, bool] = (False, False, False)  # loop, wide, bulk

    @property
    def bulk(self) -> bool:
        """Takes descriptors after its buffers."""
        return self.key[2]

    @functools.cached_property
    def function(self) -> Callable:
        return getattr(load_module(self.source, self.name), self.name)

    @functools.cached_property
    def descriptors(self) -> Callable[..., tuple]:
        return load_module(self.source, self.name).descriptors

    def arguments(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> tuple:
        """What the kernel is called with."""
        return (*tensors, *(self.descriptors(*tensors, *sizes) if self.bulk else ()), *sizes)


@dataclass(frozen=True)
class Needs:
    """What a call with certain sizes needs, on any device."""

    loop: bool  # the reduced axis does not fit into one block
    wide: bool  # offsets of 64 bits
    bulk: bool  # strides are those that bulk copies take
    programs: int


class Launcher:
    """A kernel without split reductions under one schedule."""

    def __init__(self, kernel: KernelOp, schedule: Schedule) -> None:
        if schedule.persistent and not walks_tiles(kernel, schedule):
            schedule = replace(schedule, persistent=False)  # only products are written so
        dtypes = [torch_dtype(element_of(b)) for b in kernel.buffers]
        self._begin(kernel.sym_name.data, [s.data for s in kernel.symbol_names], dtypes, schedule, lambda: kernel)
        self.main = self.variant(False, False, bool(self._bulks))

    def _begin(
        self,
        name: str,
        symbols: list[str],
        dtypes: list[torch.dtype],
        schedule: Schedule,
        kernel: Callable[[], KernelOp],
    ) -> None:
        self.name, self.symbols, self.dtypes, self.schedule, self._lower = name, symbols, dtypes, schedule, kernel
        self.buffers = len(dtypes)
        self._variants: dict[tuple[bool, bool, bool], Variant] = {}
        self._needs: dict[tuple[int, ...], Needs] = {}
        self._plans: dict[tuple[int, ...], tuple[Variant, int]] = {}
        self._ready: dict[tuple[int, tuple[int, ...], Alignment], Callable[..., None]] = {}
        self._direct: dict[tuple[int, tuple[int, ...], Alignment], Direct] = {}
        self._descriptors = Kept()
        self._compiling: Future | None = None

    @functools.cached_property
    def kernel(self) -> KernelOp:
        return self._lower()

    @functools.cached_property
    def _bulks(self) -> list[Bulk]:
        return [] if self.schedule.split > 1 else list(bulks(self.kernel, self.schedule).values())

    # --- as data ---

    def saved(self) -> dict | None:
        """What a call without symbols needs, so that nothing is lowered or emitted for it again."""
        if self.symbols:
            return None
        self._variant_for(self.needed(()))
        return {
            "name": self.name,
            "dtypes": [str(d).removeprefix("torch.") for d in self.dtypes],
            "schedule": asdict(self.schedule),
            "needs": asdict(self.needed(())),
            "main": list(self.main.key),
            "variants": [asdict(v) for v in self._variants.values()],
        }

    @staticmethod
    def restored(data: dict, kernel: Callable[[], KernelOp]) -> Launcher:
        instance = Launcher.__new__(Launcher)
        dtypes = [getattr(torch, d) for d in data["dtypes"]]
        instance._begin(data["name"], [], dtypes, read_schedule(data["schedule"]), kernel)
        variants = [Variant(**{**v, "key": tuple(v["key"])}) for v in data["variants"]]
        instance._variants = {v.key: v for v in variants}
        instance._needs[()] = Needs(**data["needs"])
        instance.main = instance._variants[tuple(data["main"])]
        return instance

    @property
    def source(self) -> str:
        return self.main.source

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int]) -> None:
        sizes = tuple(symbols)
        if not self.at(tensors[0].get_device(), [t.data_ptr() for t in tensors], sizes):
            self._ordinary(tensors, sizes)

    def at(self, device: int, addresses: Sequence[int], sizes: tuple[int, ...] = ()) -> bool:
        known = self.direct(device, sizes, alignment(addresses))
        return known is not None and known(addresses)

    def direct(self, device: int, sizes: tuple[int, ...], aligned: Alignment) -> Direct | None:
        """What launches by addresses, once that is known."""
        return self._direct.get((device, sizes, aligned))

    def _ordinary(self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> None:
        plan = self._plans.get(sizes)
        if plan is None:
            plan = self._plan(sizes, tensors[0].device, len(tensors))
        variant, programs = plan
        if programs == 0:
            return
        aligned = alignment([t.data_ptr() for t in tensors])
        if aligned and variant.bulk:  # bulk copies need all of them to be aligned
            variant = self._variant_for(replace(self.needed(sizes), bulk=False))
        if not tensors[0].is_cuda:
            options = {"num_warps": variant.warps, "num_stages": variant.stages}
            variant.function[(programs,)](*variant.arguments(tensors, sizes), **options)
            return
        device = tensors[0].device.index
        ready = self._ready.get((device, sizes, aligned))
        if ready is None:
            ready = self._prepare(device, variant, programs, tensors, sizes)
        ready(tensors, sizes)

    def ahead(self, device: torch.device) -> None:
        """Let Triton compile what a call with aligned tensors will need, in the background."""
        if self.symbols or device.type != "cuda":
            return
        variant, programs = self._plan((), device, self.buffers)
        if programs > 0 and not variant.bulk:  # descriptors are made from tensors
            function, dtypes = variant.function, self.dtypes
            options = {"num_warps": variant.warps, "num_stages": variant.stages}
            self._compiling = ahead.begin(device, lambda: function.warmup(*dtypes, grid=(programs,), **options))

    # --- decisions ---

    def _plan(self, sizes: tuple[int, ...], device: torch.device, tensors: int) -> tuple[Variant, int]:
        if tensors != self.buffers or len(sizes) != len(self.symbols):
            raise InputError(
                f"{self.name}: expected {self.buffers} tensors and sizes for {self.symbols}, "
                f"got {tensors} tensors and {sizes}"
            )
        needs = self.needed(sizes)
        variant = self._variant_for(replace(needs, bulk=needs.bulk and _copies_in_bulk(device)))
        programs = min(needs.programs, _units(device)) if self.schedule.persistent else needs.programs
        if len(self._plans) >= REMEMBERED:
            self._plans.clear()
        self._plans[sizes] = variant, programs
        return variant, programs

    def needed(self, sizes: tuple[int, ...]) -> Needs:
        if sizes not in self._needs:
            if len(self._needs) >= REMEMBERED:
                self._needs.clear()
            values = dict(zip(self.symbols, sizes, strict=True))
            self._needs[sizes] = Needs(
                self.needs_loop(values),
                needs_wide(self.kernel, values),
                bool(self._bulks) and all(b.fits(values) for b in self._bulks),
                layout(self.kernel, self.schedule).programs.evaluate(values.__getitem__, int),
            )
        return self._needs[sizes]

    def needs_loop(self, values: dict[str, int]) -> bool:
        axis = reduced_axis(self.kernel)
        if axis is None or self.schedule.loop:
            return False
        size = self.kernel.axis(axis).size.expr.evaluate(values.__getitem__, int)
        reduced = layout(self.kernel, self.schedule).reduced
        assert reduced is not None
        return size > reduced.block

    def _variant_for(self, needs: Needs) -> Variant:
        return self.variant(needs.loop, needs.wide, needs.bulk)

    def variant(self, loop: bool, wide: bool, bulk: bool = False) -> Variant:
        variant = self._variants.get((loop, wide, bulk))
        if variant is None:
            schedule = looped(self.kernel, self.schedule) if loop else self.schedule
            if not bulk:
                schedule = replace(schedule, extra=tuple((k, v) for k, v in schedule.extra if k != "bulk"))
            options = Options(wide=wide, tf32=torch.backends.cuda.matmul.allow_tf32)
            source = write(self.kernel, schedule, options)
            variant = Variant(function_name(source), source, schedule.warps, schedule.stages, (loop, wide, bulk))
            self._variants[loop, wide, bulk] = variant
        return variant

    # --- the short way to the device ---

    def _prepare(self, device: int, variant: Variant, programs: int, tensors, sizes) -> Callable[..., None]:
        """Compile, and keep what launches: the kernel of Triton that the ordinary way would find."""
        from triton.runtime.errors import OutOfResources

        if self._compiling is not None:
            self._compiling.exception()  # waits; what went wrong there goes wrong again here
            self._compiling = None
        with torch.cuda.device(device):
            options = {"num_warps": variant.warps, "num_stages": variant.stages}
            compiled = variant.function.warmup(*variant.arguments(tensors, sizes), grid=(programs,), **options)
            if hasattr(compiled, "result"):  # compiled in the background
                compiled = compiled.result()
            try:
                launch = through_tensors(compiled, device, programs, variant.arguments)
                known = None if launch is None else self._short(compiled, device, variant, programs, tensors, sizes)
            except OutOfResources:  # fewer copies ahead need less shared memory
                if variant.stages <= 1:
                    raise
                return self._prepare(device, replace(variant, stages=variant.stages - 1), programs, tensors, sizes)
        if launch is None:

            def launch(tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> None:
                with torch.cuda.device(device):
                    variant.function[(programs,)](*variant.arguments(tensors, sizes), **options)

        if len(self._ready) >= REMEMBERED:
            self._ready.clear()
            self._direct.clear()
            self._descriptors = Kept()
        key = (device, sizes, alignment([t.data_ptr() for t in tensors]))
        self._ready[key] = launch
        if known is not None:
            self._direct[key] = known
        return launch

    def _short(self, compiled, device: int, variant: Variant, programs: int, tensors, sizes) -> Direct | None:
        if not variant.bulk:
            return Direct(compiled, device, programs, sizes)
        addresses = [t.data_ptr() for t in tensors]
        short = prepared(compiled, device, variant.descriptors, addresses, self.dtypes, sizes, self._descriptors)
        return None if short is None else Direct(compiled, device, programs, sizes, short)


def _copies_in_bulk(device: torch.device) -> bool:
    """GPUs since Hopper do; Triton's interpreter does as if."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def _units(device: torch.device) -> int:
    """Programs that run side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def function_name(source: str) -> str:
    """The kernel's name: the jit function that does not start with an underscore."""
    marked = source.split("@triton.jit\ndef ")[1:]
    return next(part.split("(")[0] for part in marked if not part.startswith("_"))


def looped(kernel: KernelOp, schedule: Schedule) -> Schedule:
    """The same schedule with a loop over blocks of the reduced axis, for a size that one block does not hold."""
    axis = reduced_axis(kernel)
    blocks = tuple((k, min(n, LOOP_BLOCK) if k == axis else n) for k, n in schedule.blocks)
    return replace(schedule, blocks=blocks, loop=True)


class Halves(Pair[Launcher]):
    """Both kernels the short way, where both are known; their scratch memory is one piece then."""

    def _begin(self, first: Launcher, second: Launcher, symbols: list[str]) -> None:
        super()._begin(first, second, symbols)
        self._pieces: dict[tuple[int, ...], tuple[int, list[int]]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        sizes = tuple(symbols)
        if not self.at(tensors[0].get_device(), [t.data_ptr() for t in tensors], sizes):
            super().__call__(tensors, sizes)

    def at(self, device: int, addresses: Sequence[int], sizes: tuple[int, ...] = ()) -> bool:
        known = self._pieces.get(sizes)
        total, offsets = self._places(sizes) if known is None else known
        aligned = alignment(addresses)
        if aligned:
            aligned += (True,) * len(offsets)
        first, second = self.first.direct(device, sizes, aligned), self.second.direct(device, sizes, aligned)
        if first is None or second is None or direct.current_device() != device:
            return False
        scratch = direct.empty_cuda((total,), (1,), torch.uint8)
        base = scratch.data_ptr()
        every = [*addresses, *[base + offset for offset in offsets]]
        if not first(every):
            return False
        if not second(every):
            raise RuntimeError(f"{self.second.name}: expected to be launched as {self.first.name} was")
        return True

    def _places(self, sizes: tuple[int, ...]) -> tuple[int, list[int]]:
        """Bytes of scratch memory, and where each buffer starts."""
        total, offsets = 0, []
        for count, dtype in self.sizes(sizes):
            offsets.append(total)
            total += -(-count * dtype.itemsize // PIECE) * PIECE
        if len(self._pieces) >= REMEMBERED:
            self._pieces.clear()
        self._pieces[sizes] = total, offsets
        return total, offsets


def launcher(kernel: KernelOp, schedule: Schedule) -> Launcher | Pair:
    return (in_parts if in_two(kernel, schedule) else Launcher)(kernel, schedule)


def in_parts(kernel: KernelOp, schedule: Schedule) -> Pair:
    """A kernel that runs as two; the second may be such a kernel itself."""
    kernels = halves(kernel, schedule)
    how = schedules(kernel, schedule, kernels)
    first, second = launcher(kernels.first, how[0]), launcher(kernels.second, how[1])
    pair = _pair_of(first, second)(kernel, kernels, first, second)
    pair.schedule = schedule
    return pair


def _pair_of(first: CompiledKernel, second: CompiledKernel) -> type[Pair]:
    return Halves if isinstance(first, Launcher) and isinstance(second, Launcher) else Pair


# --- kept on disk ---


def save(compiled: CompiledKernel) -> dict | None:
    if isinstance(compiled, Launcher):
        return compiled.saved()
    if not isinstance(compiled, Pair) or compiled.symbols:
        return None
    first, second = save(compiled.first), save(compiled.second)
    if first is None or second is None:
        return None
    assert compiled.schedule is not None
    return {
        "halves": [first, second],
        "scratch": compiled.saved_scratch(),
        "schedule": asdict(compiled.schedule),
    }


def load(data: dict, kernel: Callable[[], KernelOp]) -> Launcher | Pair:
    if "halves" not in data:
        return Launcher.restored(data, kernel)
    schedule = read_schedule(data["schedule"])
    split = functools.cache(lambda: halves(kernel(), schedule))
    first = load(data["halves"][0], lambda: split().first)
    second = load(data["halves"][1], lambda: split().second)
    return _pair_of(first, second).restored(first, second, read_scratch(data["scratch"]))
