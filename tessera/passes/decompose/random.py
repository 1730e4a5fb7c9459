"""Random operators as arithmetic over computed random numbers, so that kernels can hold them.

In: a trace, and for which devices this is wanted. Out: the same program where dropout, bernoulli, rand, uniform, randn
and normal are written over `tessera::uniform`. All seeds of a device are drawn by one `aten.randint` at the start, from
the generator that PyTorch draws from: `torch.manual_seed` repeats a run, two runs differ, and a CUDA graph draws anew
at every replay. The numbers have the same distribution as PyTorch's, not the same bits. A seed is a row of two
integers, of which the first counts: rows start on 16 bytes, where kernels like their arguments.

    y = aten.dropout(x, 0.1, True)   -->   seeds = aten.randint(…, [1, 2]); seed, = aten.unbind(seeds)
                                           keep = aten.lt(tessera.uniform(seed, shape), 0.9)
                                           y = aten.mul(aten.mul(x, keep), 1 / 0.9)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, size_hint
from tessera.ops.families import cast
from tessera.ops.uniform import BITS, uniform
from tessera.torch_internals.operators import OpOverload, op_name, overload_name

Draw = Callable[[torch.dtype], Value]  # numbers in [0, 1), as many as there are results, from a seed of their own
Rule = Callable[..., list[Value | None] | None]


def compute_random(trace: Trace, wanted: Callable[[torch.device], bool], holds: Callable[[Equation], bool]) -> Trace:
    """Write random equations on wanted devices as arithmetic, where kernels can hold all of it."""
    if not any(_rule(eqn) for eqn in trace.equations):
        return trace
    return _Draws(Rewrite(trace), wanted, holds).run()


@dataclass
class _Draws:
    rewrite: Rewrite
    wanted: Callable[[torch.device], bool]
    holds: Callable[[Equation], bool]
    drawn: dict[torch.device, list[Value]] = field(default_factory=dict)  # the seeds of a device

    def run(self) -> Trace:
        for eqn in self.rewrite:
            if parts := self.parts(eqn):
                self.rewrite.keep(*parts)
        self.rewrite.equations[:0] = self.seeds()
        return self.rewrite.finish()

    def parts(self, eqn: Equation) -> list[Equation] | None:
        """The equation as arithmetic over numbers drawn from seeds."""
        rule, out = _rule(eqn), next(iter(eqn.results()), None)
        if rule is None or out is None or not out.tensor.is_float or not self.wanted(out.tensor.device):
            return None
        positional, keyword = eqn.bound()
        if keyword.pop("generator", None) is not None or out.tensor.numel() == 0:
            return None
        seeds: list[Value] = []

        def draw(dtype: torch.dtype) -> Value:
            seed = TensorType(torch.int64, (2,), (1,), out.tensor.device)
            seeds.append(self.rewrite.builder.value("seed", seed))
            return _laid_out(seeds[-1], out.tensor, dtype)

        parts = self.rewrite.parts(eqn, lambda eqn: rule(draw, eqn, *positional))
        if parts is None or not all(map(self.holds, parts)):
            return None
        self.drawn.setdefault(out.tensor.device, []).extend(seeds)
        return parts

    def seeds(self) -> list[Equation]:
        """The draws of all seeds, one of every device."""
        low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        equations: list[Equation] = []
        for device, rows in self.drawn.items():
            size = [len(rows), 2]
            seeds = self.rewrite.builder.value("seeds", TensorType(torch.int64, tuple(size), (2, 1), device))
            options = {"dtype": torch.int64, "device": device}
            equations.append(Equation(torch.ops.aten.randint.low, (low, high, size), options, (seeds,)))
            equations.append(Equation(torch.ops.aten.unbind.int, (seeds,), {}, tuple(rows), many=True))
        return equations


def _rule(eqn: Equation) -> Rule | None:
    op = eqn.op
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return None
    return RULES.get(f"{op_name(op)}.{overload_name(op)}")


def _laid_out(seed: Value, like: TensorType, dtype: torch.dtype) -> Value:
    """Numbers drawn in the order in which the results lie in memory: then neighbours share a block of random words."""
    order = sorted(range(like.ndim), key=lambda d: -size_hint(like.stride[d]))
    drawn = emit(uniform, seed, [like.shape[d] for d in order], dtype=dtype)
    if order == list(range(like.ndim)):
        return drawn
    return aten.permute(drawn, sorted(range(like.ndim), key=order.__getitem__))


# --- the operators --------------------------------------------------------------------------------------

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    def add(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), fn))
        return fn

    return add


def _happens(draw: Draw, p: float | Value) -> Value:
    """True with probability p."""
    return aten.lt(draw(torch.float32), p)


@rule("dropout.default native_dropout.default")
def dropout(draw: Draw, eqn: Equation, x: Value, p: float, train: bool | None = True) -> list[Value | None] | None:
    if train is False or not isinstance(p, (int, float)) or not 0 < p < 1:
        return None
    keep = _happens(draw, 1 - p)
    y = aten.mul(aten.mul(x, keep), 1 / (1 - p))
    return [y, keep] if eqn.many else [y]


@rule("bernoulli.p")
def bernoulli(draw: Draw, eqn: Equation, x: Value, p: float) -> list[Value | None] | None:
    return [cast(_happens(draw, p), x.dtype)]


@rule("bernoulli.default")
def bernoulli_of(draw: Draw, eqn: Equation, p: Value) -> list[Value | None] | None:
    return [cast(_happens(draw, p), p.dtype)]


@rule("rand.default rand_like.default uniform.default")
def rand(draw: Draw, eqn: Equation, _: object, low: float = 0.0, high: float = 1.0) -> list[Value | None] | None:
    if eqn.out.dtype not in BITS:
        return None
    u = draw(eqn.out.dtype)
    return [u if (low, high) == (0.0, 1.0) else aten.add(aten.mul(u, high - low), low)]


@rule("randn.default randn_like.default")
def randn(draw: Draw, eqn: Equation, *_: object) -> list[Value | None] | None:
    return normal(draw, eqn, 0.0, 1.0)


@rule("normal.float_float")
def normal(draw: Draw, eqn: Equation, mean: float, std: float, *_: object) -> list[Value | None] | None:
    """A point of the plane by its distance and angle: Box and Muller."""
    if eqn.out.dtype not in BITS:
        return None
    left, angle = draw(torch.float32), draw(torch.float32)
    distance = aten.sqrt(aten.mul(aten.log(aten.rsub(left, 1)), -2.0))  # 1 - u is never 0
    x = aten.mul(distance, aten.cos(aten.mul(angle, 2 * math.pi)))
    x = x if std == 1 else aten.mul(x, std)
    return [cast(x if mean == 0 else aten.add(x, mean), eqn.out.dtype)]
