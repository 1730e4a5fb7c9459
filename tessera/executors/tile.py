"""Regions compiled by Tessera's own tile compiler.

In: a region of a trace. Out: a callable that launches one kernel made for it: lowered to the tile dialect, scheduled
and compiled by the target of the device. Regions that are alike, as the layers of a model are, share one kernel. A
region that has no kernel, or whose device has no target here, is left to the executors after this one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tessera.executors import products
from tessera.executors.base import FusionExecutor, Passes, Region, register
from tessera.executors.regions import body_of
from tessera.executors.tile_saved import compile_ahead, restore, save
from tessera.ir.equation import Equation, Value
from tessera.ir.layouts import can_view
from tessera.ir.schema import has_effect
from tessera.ir.signature import signature
from tessera.ir.trace import Trace
from tessera.ir.types import UNKNOWN, TensorType, size_hint, symbol_hints
from tessera.ops.average_pool import avg_pool_backward
from tessera.ops.families import per_dimension
from tessera.ops.fp8 import EIGHT_BITS, in_hardware
from tessera.ops.pool import max_pool, max_pool_backward
from tessera.ops.uniform import uniform
from tessera.passes.clean.dce import dce
from tessera.passes.decompose import pool_offsets
from tessera.passes.decompose.add_rows import add_rows
from tessera.passes.decompose.apply import decompose as take_apart
from tessera.passes.decompose.random import compute_random
from tessera.passes.decompose.split_bias import split_bias
from tessera.passes.decompose.unturn import unturn
from tessera.passes.fuse import regions as fuse
from tessera.passes.fuse.compiler import CONTRACT, POINTWISE, REDUCE, SCAN, Compiler, innermost, is_outer
from tessera.passes.fuse.duplicate import duplicate
from tessera.passes.fuse.horizontal import horizontal
from tessera.passes.fuse.recompute import recompute
from tessera.passes.patterns.align import written_in_odd_rows
from tessera.tile.dialect.overwrite import overwrites
from tessera.tile.from_trace.batch import batch, form
from tessera.tile.from_trace.kernel import TileKernel, examples
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.lower.rule import Call, rule_of
from tessera.tile.from_trace.region import Lowered, Unlowerable, check, kind_of, lower, why_not
from tessera.tile.schedules.schedule import Schedule
from tessera.tile.targets import Target, target_for
from tessera.tile.targets.autotune import choose
from tessera.torch_internals.operators import OpOverload
from tessera.util.config import config, override
from tessera.util.names import names

# Activations whose kernels take 0.2 to 0.9 of the library's time on a CPU, launch included; but a gelu of more elements
# than these takes 1.1 of it.
LONE_ON_CPU = names("gelu gelu_backward silu silu_backward")
LARGE_GELU = 1 << 16
DIVIDES = names("div reciprocal sqrt rsqrt")
MANY_ROWS = 128  # of a running sum: a kernel of ours takes as long as some thirty of PyTorch's steps
AVERAGES = {getattr(torch.ops.aten, f"avg_pool{n}d").default: n for n in (1, 2, 3)}  # and dimensions of a window
MANY_AVERAGED = (
    9  # elements of a window that a CPU's kernel averages: 5×5 take it 1.1 to 2 times as long as the library
)
# Pools, and where among their arguments the sizes of windows stand, before their strides.
POOLS = {max_pool: 1, max_pool_backward: 3, avg_pool_backward: 2, **dict.fromkeys(AVERAGES, 1)}
FEW_WINDOWS = 4  # that a GPU computes anew what is in front of them for
LONE = 4  # equations outside of regions that are worth a launch of their own together
_launchers: dict[tuple, TileKernel | None] = {}
_refused: dict[tuple, str] = {}  # why a region has no kernel
_checked: dict[tuple, tuple[float, str]] = {}
_kinds: dict[tuple[int, Target | None], str] = {}  # of equations, by signature; empty where no kernel holds them


# --- what the passes ask ------------------------------------------------------------------------------


def refusal(eqn: Equation) -> str:
    """Why an equation can be part of no kernel on its device; empty where it can."""
    if reason := why_not(eqn):
        return reason
    devices = {v.type.device for v in (*eqn.inputs(), *eqn.results()) if isinstance(v.type, TensorType)}
    if len(devices) != 1:
        return "its tensors are on several devices"
    device = devices.pop()
    if device.type == "cuda" and _has(eqn, *EIGHT_BITS) and not in_hardware(device):
        return f"{device} has no numbers of 8 bits"
    target = target_for(device)
    if target is None:
        return f"no target for {device} is installed"
    if device.type == "cpu" and _joins_channels(eqn):
        return "the library copies channels that lie side by side faster"
    if device.type == "cpu" and _averages_many(eqn):
        return "the library averages large windows faster"
    rule = rule_of(eqn.op)
    if rule is not None and rule.raises is not None and device.type == "cpu" and (why := rule.raises(Call.of(eqn))):
        return why
    return products.refusal(eqn, target) if rule is not None and rule.kind == CONTRACT else ""


def _joins_channels(eqn: Equation) -> bool:
    """A concatenation of images along channels that lie side by side: a kernel would ask of every element whose it
    is."""
    return eqn.opname == "cat" and eqn.out.ndim == 4 and innermost(eqn.out.tensor) == [1]


def _averages_many(eqn: Equation) -> bool:
    n = AVERAGES.get(eqn.op)  # type: ignore[arg-type]
    return n is not None and math.prod(per_dimension(eqn.bound()[0][1], n)) > MANY_AVERAGED


def _has(eqn: Equation, *dtypes: torch.dtype) -> bool:
    return any(v.tensor.dtype in dtypes for v in (*eqn.inputs(), *eqn.results()))


def _kind(eqn: Equation) -> str:
    result = eqn.outputs[0] if isinstance(eqn.op, OpOverload) and eqn.outputs else None
    if result is None or not isinstance(result.type, TensorType):
        return "" if refusal(eqn) else kind_of(eqn)
    key = (signature(eqn), target_for(result.type.device))
    if key not in _kinds:
        _kinds[key] = "" if refusal(eqn) else kind_of(eqn)
    return _kinds[key]


def _reduced(eqn: Equation) -> list[int]:
    rule = rule_of(eqn.op)
    return rule.dims(Call.of(eqn)) if rule is not None and rule.dims is not None else []


def _expensive(eqn: Equation) -> bool:
    rule = rule_of(eqn.op)
    return rule is None or rule.expensive


def _check(body: Trace) -> tuple[float, str]:
    key = structure(body)
    if key not in _checked:
        try:
            checked = check(body)
            why = _no_sums_over_rows(body, checked.row) if checked.sums_over_rows else products.beside(body)
            _checked[key] = (checked.cost, why)
        except Unlowerable as reason:
            _checked[key] = (0.0, str(reason))
    return _checked[key]


def _no_sums_over_rows(body: Trace, row: int | None) -> str:
    target = target_for(body.equations[0].results()[0].tensor.device)
    return "no target is installed" if target is None else target.no_sums_over_rows(row)


def _alone(eqn: Equation) -> bool:
    """Random numbers that are computed, and max pools; on a CPU linear layers over few rows, activations and sums over
    rows; on a GPU linear layers into rows that are not aligned, large transposing copies and reshapes that copy, sums
    along rows or over them, gelu of 16 bits, masks of whole rows, and arithmetic with a number that lies on the device,
    where PyTorch's leave bandwidth, and running sums down columns, whose rows PyTorch takes one after another (190 ns
    each on an H200).

    The library's gelu takes erf in f32 and is limited by it (71% of the bytes' time forward, 79% backward on an H200);
    with the cheaper formula of `lower_activation` memory is. Other activations alone are at the memory's speed already.
    """
    if eqn.op in (uniform, *POOLS):
        return True
    t = eqn.results()[0].tensor
    if t.device.type == "cpu":
        lone = _kind(eqn) == CONTRACT or _lone_activation(eqn, t.numel()) or _column_sum(eqn)
        return t.dtype == torch.float32 and lone
    if t.device.type == "cuda" and _kind(eqn) == CONTRACT:
        return written_in_odd_rows(eqn)
    if t.device.type == "cuda" and _kind(eqn) == SCAN:
        dims = _reduced(eqn)
        return is_outer(eqn, dims) and size_hint(t.shape[dims[0]]) >= MANY_ROWS
    if t.device.type != "cuda" or max(v.tensor.numel() for v in (*eqn.inputs(), *eqn.results())) < 2**18:
        return False
    if _kind(eqn) == REDUCE:
        return bool(_reduced(eqn)) and t.numel() >= 256
    if eqn.opname in ("gelu", "gelu_backward") and t.dtype in (torch.float16, torch.bfloat16):
        return True
    if eqn.opname in ("mul", "div", "add", "sub") and any(v.tensor.ndim == 0 for v in eqn.inputs()):
        return True
    if eqn.opname in ("masked_fill", "where") and any(v.ndim and v.tensor.numel() < t.numel() for v in eqn.inputs()):
        return True
    source = eqn.inputs()[0].tensor
    if eqn.opname in ("reshape", "flatten"):
        return not can_view(source, t)
    return eqn.opname in ("clone", "contiguous", "_to_copy", "copy") and source.stride != t.stride


def _lone_activation(eqn: Equation, points: int) -> bool:
    name = eqn.opname
    return name in LONE_ON_CPU and (name != "gelu" or points <= LARGE_GELU)


def _column_sum(eqn: Equation) -> bool:
    return eqn.opname == "sum" and _kind(eqn) == REDUCE and is_outer(eqn, _reduced(eqn))


def _writes(eqn: Equation) -> bool:
    """On a GPU the rows of a sum over outer dimensions are shared out, and many programs write."""
    rule = rule_of(eqn.op)
    return rule is not None and rule.over_rows and eqn.results()[0].tensor.device.type == "cuda"


def _once(eqn: Equation) -> bool:
    """A GPU computes a root in the time its memory takes; on a CPU it takes longer than a read."""
    return eqn.results()[0].tensor.device.type == "cpu" and (eqn.opname in DIVIDES or _expensive(eqn))


def _rereads(eqn: Equation) -> bool:
    """Pools whose windows overlap, on a GPU only where a point is in more than a few."""
    if eqn.op not in POOLS:
        return False
    position = POOLS[eqn.op]  # type: ignore[index]
    kernel, stride = (per_dimension(given, 3) for given in eqn.bound()[0][position : position + 2])
    if eqn.results()[0].tensor.device.type == "cpu":
        return eqn.op is not max_pool_backward and any(map(operator.gt, kernel, stride))
    return math.prod(map(operator.truediv, kernel, stride)) > FEW_WINDOWS  # without strides they stand side by side


COMPILER = Compiler(_kind, refusal, _reduced, _expensive, _check, _alone, products.loses, _writes, _once, _rereads)


def _holds(eqn: Equation) -> bool:
    return bool(_kind(eqn))


def _random(trace: Trace) -> Trace:
    return compute_random(trace, _computes_random, _holds)


def _pool_offsets(trace: Trace) -> Trace:
    return pool_offsets.pool_offsets(trace, refusal)


def _decompose(trace: Trace) -> Trace:
    return take_apart(trace, _holds)


def _split_bias(trace: Trace) -> Trace:
    return split_bias(trace, _adds_bias_apart, _kind)


def _adds_bias_apart(layer: Equation) -> bool:
    """Where the library knows no epilogues: on a CPU, in a dtype in which two roundings are those of eager; on a GPU,
    where it multiplies many matrices, rounds, and adds the bias in a kernel of its own."""
    out = layer.out.tensor
    if out.device.type != "cpu":
        x = layer.inputs()[0].tensor
        return x.ndim > 3 or x.ndim == 3 and not x.is_row_major
    return out.dtype == torch.float32 and not _kind(layer)


def _computes_random(device: torch.device) -> bool:
    """Whether random numbers for this device are computed where they are used."""
    return config.fused_random == "on" or config.fused_random == "auto" and device.type == "cuda"


def _duplicate(trace: Trace) -> Trace:
    """Sums over outer dimensions with arithmetic of their own."""
    return duplicate(trace, COMPILER)


def _recompute(trace: Trace) -> Trace:
    """A kernel recomputes a value from its inputs when those take fewer bytes than the value."""
    return dce(recompute(trace, COMPILER))


DECOMPOSE: Passes = (
    ("random", _random),
    ("pool_offsets", _pool_offsets),
    ("add_rows", add_rows),
    ("decompose", _decompose),
    ("unturn", unturn),
    ("split_bias", _split_bias),
)
PREPARE: Passes = (("duplicate", _duplicate), ("recompute", _recompute))


def decompose(trace: Trace) -> Trace:
    """A program as regions are chosen in it."""
    return apply((*DECOMPOSE, *PREPARE), trace)


def apply(passes: Passes, trace: Trace) -> Trace:
    for _, step in passes:
        trace = step(trace)
    return trace


def regions(trace: Trace) -> list[Region]:
    return fuse.fuse(trace, COMPILER)


def reasons(trace: Trace) -> dict[str, str]:
    """For every equation that no region takes, or whose region has no kernel: why."""
    refusals = fuse.reasons(trace, COMPILER) | pool_offsets.reasons(trace, refusal)
    for region in regions(trace):
        why = _refused.get(structure(body_of(trace, region, "region")), "")
        if why:
            refusals |= {trace.equations[i].results()[0].name: why for i in region}
    return refusals


# --- kernels ------------------------------------------------------------------------------------------


def compile_region(body: Trace) -> TileKernel | None:
    key = structure(body)
    if key not in _launchers:
        target = target_for(body.outputs[0].tensor.device) if body.outputs else None  # type: ignore[union-attr]
        try:
            _launchers[key] = None if target is None else build(body, target)
        except (Unlowerable, NotImplementedError) as reason:
            _launchers[key], _refused[key] = None, str(reason)
    return _launchers[key]


@contextmanager
def own_kernels() -> Iterator[dict[tuple, TileKernel | None]]:
    """While this is open every region is compiled anew, and no program comes from the disk; what was made stands in
    what it gives."""
    before = dict(_launchers)
    _launchers.clear()
    try:
        with override(program_cache=False):
            yield _launchers
    finally:
        compiled = dict(_launchers)
        _launchers.clear()
        _launchers.update(before | compiled)


def build(body: Trace, target: Target, schedule: Schedule | None = None) -> TileKernel:
    """The kernel of a region; `Unlowerable` or `NotImplementedError` says why no kernel can be made of it."""
    lowered = lower(body, body.name)
    if schedule is None:
        tensors = examples(lowered) if config.autotune else []
        schedule = choose(target, lowered.kernel, _hints(body, lowered), tensors)
    compiled = target.compile(lowered.kernel, schedule)

    def tile_kernel(over: dict[int, int], **offers: Any) -> TileKernel:
        launch = launcher(body, lowered, compiled, over)
        return TileKernel(
            run=launch.run, source=launch.source, reading=launch.reading, body=body, lowered=lowered,
            schedule=schedule, compiled=compiled, **offers,
        )  # fmt: skip

    kernel = (
        tile_kernel({}) if lowered.tail else tile_kernel({}, overwrites=_overwrites(body, lowered), writing=tile_kernel)
    )
    compile_ahead(compiled, lowered.buffers[0].tensor.device)
    return kernel


def _overwrites(body: Trace, lowered: Lowered) -> dict[int, tuple[int, ...]]:
    """Results that the kernel may as well write over an argument."""
    inputs, results = len(lowered.inputs), {v: k for k, v in enumerate(body.outputs)}
    return {
        results[lowered.stored[k - inputs]]: tuple(body.inputs.index(lowered.inputs[j]) for j in reads if j < inputs)
        for k, reads in overwrites(lowered.kernel).items()
    }


def _hints(body: Trace, lowered: Lowered) -> dict[str, int]:
    """Sizes as they were when the program was captured; of one that is only given as a number that is not known."""
    hints = dict.fromkeys(lowered.symbols, UNKNOWN)
    for v in (*body.inputs, *lowered.stored):
        for size in (*v.type.shape, *v.type.stride) if isinstance(v.type, TensorType) else ():
            hints |= {s: n for s, n in symbol_hints(size).items() if s in hints}
    return hints


def structure(body: Trace) -> tuple:
    """What decides a region's kernel: operators, how they are joined, types, and the machine that is named. Names of
    values do not count."""
    number = {v: i for i, v in enumerate(body.inputs)}
    parts: list[object] = [v.type.key() for v in body.inputs]
    for eqn in body.equations:
        parts.append(signature(eqn))
        parts.extend([number[v] for v in eqn.inputs()])
        for v in eqn.outputs:
            if v is not None:
                number[v] = len(number)
    return (*parts, tuple(number[v] for v in body.outputs if isinstance(v, Value)), config.machine)


# --- many regions in one launch -----------------------------------------------------------------------


def together(trace: Trace, regions: list[Region]) -> list[list[Region]]:
    """Regions of one form, such as the updates of a model's parameters; lone equations only where there are many."""
    inside = {i for region in regions for i in region}
    forms: dict[int, object] = {region[0]: form(body_of(trace, region, "region")) for region in regions}
    lone = [i for i, eqn in enumerate(trace.equations) if i not in inside and _may_be_lone(eqn)]
    forms |= {i: (LONE, lone_form) for i in lone if (lone_form := form(_lone(trace.equations[i]))) is not None}
    candidates = sorted([*regions, *([i] for i in lone if i in forms)])
    chosen = horizontal(trace, candidates, [forms[region[0]] for region in candidates])
    sets = [[candidates[i] for i in numbers] for numbers in chosen]
    return [s for s in sets if s[0][0] in inside or len(s) >= LONE]


def _may_be_lone(eqn: Equation) -> bool:
    """A counter alone is worth no more on a CPU than the library's addition."""
    if not isinstance(eqn.op, OpOverload) or has_effect(eqn) or _kind(eqn) != POINTWISE:
        return False
    return bool(eqn.out.ndim) or eqn.out.tensor.device.type != "cpu"


def _lone(eqn: Equation) -> Trace:
    return Trace("region", tuple(dict.fromkeys(eqn.inputs())), (eqn,), tuple(eqn.results()))


def compile_together(whole: Trace, bodies: list[Trace]) -> TileKernel | None:
    target = target_for(whole.outputs[0].tensor.device)  # type: ignore[union-attr]
    try:
        return None if target is None else batch(whole, bodies, target)
    except (Unlowerable, NotImplementedError):
        return None


register(
    FusionExecutor(
        "tile", regions, compile_region, decompose=DECOMPOSE, prepare=PREPARE, reasons=reasons, together=together,
        compile_together=compile_together, save=save, restore=restore,
    )
)  # fmt: skip
