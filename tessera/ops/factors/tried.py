"""Operators without a sharding rule are tried: which dimensions may be cut is found out by running them.

In: an equation. Out: its `Factors`, or None. The operator runs on small tensors, whole and in chunks along a dimension
of its operands; where the results in chunks, joined along a dimension of the results, are those of the whole, the
dimensions are one factor. Every hypothesis is tried with 2 and 3 chunks, uneven ones too, on random numbers and then on
such as differ from chunk to chunk (`trial_data`): what counts or ranks along the cut shows itself there. What was found
is remembered by operator, arguments and types. Operators that draw, write, or whose results have sizes that data
decides are not tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.schema import draws, has_effect
from tessera.ir.types import TensorType
from tessera.ops.factors.rule import Dims, Factors, tensors
from tessera.ops.factors.trial_data import PLAIN, UNLIKE, Kind, drawn
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.torch_internals.operators import OpOverload

SMALL = 1 << 14  # elements of an operand, above which it is not tried
FEWEST = 4  # of a dimension that is tried: uneven chunks need some
Cuts = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # the dimension that is cut, of operands and of results

_known: dict[tuple, Factors | None] = {}


def tried(eqn: Equation) -> Factors | None:
    """The rule that holds for this equation, as far as it was tried; None where nothing may be cut."""
    if not _may_be_tried(eqn):
        return None
    key = _key(eqn)
    if key not in _known:
        with disable_current_modes(), torch.no_grad():
            _known[key] = _find(eqn)
    return _known[key]


def _may_be_tried(eqn: Equation) -> bool:
    if not isinstance(eqn.op, OpOverload) or has_effect(eqn) or draws(eqn.op, eqn.args, eqn.kwargs):
        return False
    types = [v.type for v in (*eqn.inputs(), *eqn.results())]
    if not all(isinstance(t, TensorType) and not t.is_symbolic for t in types):
        return False
    return all(v.tensor.numel() <= SMALL for v in tensors(eqn))


def _key(eqn: Equation) -> tuple:
    def shown(v: Value) -> str:
        return f"<{v.tensor.dtype}{list(v.shape)}>"

    return eqn.op, repr(map_values((eqn.args, eqn.kwargs), shown)), tuple(v is None for v in eqn.outputs)


def _find(eqn: Equation) -> Factors | None:
    nowhere: Cuts = ((None,) * len(tensors(eqn)), (None,) * len(eqn.outputs))
    trials = [_Trial(eqn, nowhere, kind, seed) for seed, kind in enumerate(PLAIN)]
    if not all(trial.runs for trial in trials):
        return None
    operands = [_sizes(v) for v in tensors(eqn)]
    results = [trials[0].shape(i) for i in range(len(eqn.outputs))]
    names: dict[tuple[str, int, int], str] = {}
    for cuts in _hypotheses(operands, results):
        places = [*(("in", i, d) for i, d in enumerate(cuts[0])), *(("out", i, d) for i, d in enumerate(cuts[1]))]
        taken = [(kind, i, d) for kind, i, d in places if d is not None]
        if any(place in names for place in taken):
            continue
        if not all(trial.agrees(cuts) for trial in trials) or not _withstands(eqn, cuts):
            continue
        names.update(dict.fromkeys(taken, f"t{len(names)}"))
    if not names:
        return None
    whole = (f"w{n}" for n in itertools.count())
    rest: set[str] = set()

    def dims(kind: str, i: int, shape: Sequence[int]) -> Dims:
        named = []
        for d in range(len(shape)):
            name = names.get((kind, i, d)) or next(whole)
            rest.update([name] if name.startswith("w") else [])
            named.append((name,))
        return tuple(named)

    return Factors(
        tuple(dims("in", i, shape) for i, shape in enumerate(operands)),
        tuple(None if v is None else dims("out", i, _sizes(v)) for i, v in enumerate(eqn.outputs)),
        whole=frozenset(rest),
    )


def _withstands(eqn: Equation, cuts: Cuts) -> bool:
    """Whether chunks that are unlike each other agree with the whole, wherever the operator takes such numbers."""
    trials = (_Trial(eqn, cuts, kind, seed) for seed, kind in enumerate(UNLIKE))
    return all(trial.agrees(cuts) for trial in trials if trial.runs)


def _hypotheses(operands: list[list[int]], results: list[list[int] | None]) -> Iterator[Cuts]:
    """For each dimension of an operand: the dimensions of the same size that may be cut with it. All results are."""
    for i, shape in enumerate(operands):
        for d, size in enumerate(shape):
            if size < FEWEST:
                continue
            others = [[None, *_of_size(other, size)] if j > i else [None] for j, other in enumerate(operands)]
            others[i] = [d]
            outs = [[None] if r is None else _of_size(r, size) for r in results]
            for chosen in itertools.product(*others):
                for joined in itertools.product(*outs):
                    yield chosen, joined


def _sizes(v: Value) -> list[int]:
    return [int(n) for n in v.shape]


def _of_size(shape: Sequence[int], size: int) -> list:
    return [d for d, n in enumerate(shape) if n == size]


class _Trial:
    """An equation on one draw of numbers, which know where they will be cut."""

    def __init__(self, eqn: Equation, cuts: Cuts, kind: Kind, seed: int) -> None:
        self.eqn = eqn
        draw = torch.Generator().manual_seed(seed)
        self.given = [drawn(v.tensor, d, kind, draw) for v, d in zip(tensors(eqn), cuts[0], strict=True)]
        self.whole = self.run(self.given)
        self.runs = self.whole is not None and all(
            x is None or v is None or list(x.shape) == list(v.shape)
            for x, v in zip(self.whole, eqn.outputs, strict=True)
        )

    def shape(self, i: int) -> list[int] | None:
        assert self.whole is not None
        x = self.whole[i]
        return None if x is None or self.eqn.outputs[i] is None else list(x.shape)

    def run(self, given: Sequence[Tensor]) -> list[Tensor | None] | None:
        """The results; None where the operator does not take such tensors."""
        try:
            return self.call(given)
        except Exception:  # operators written in Python raise what they like
            return None

    def call(self, given: Sequence[Tensor]) -> list[Tensor | None] | None:
        supply = iter(given)
        args, kwargs = map_values((self.eqn.args, self.eqn.kwargs), lambda v: next(supply))  # type: ignore[misc]
        out = self.eqn.op(*args, **kwargs)  # type: ignore[operator]
        listed = list(out) if isinstance(out, (tuple, list)) else [out]
        return listed if len(listed) == len(self.eqn.outputs) else None

    def fits(self, given: Sequence[Sequence[Tensor]], cuts: Cuts) -> bool:
        """Whether results would have the sizes of chunks. Asked of types before kernels run: some kernels do not look
        at the sizes of what they are given, and would read what lies behind it."""
        try:
            ran = [self.call([x.to("meta") for x in chunk]) for chunk in given]
        except NotImplementedError:  # no rule for types, or one that looks at data
            return True
        except Exception:  # operators written in Python raise what they like
            return False
        assert self.whole is not None
        return all(
            d is None or _sizes_join([out[i] for out in ran if out is not None], want, d)
            for i, (want, d) in enumerate(zip(self.whole, cuts[1], strict=True))
        )

    def agrees(self, cuts: Cuts) -> bool:
        return all(self.agrees_in(chunks, cuts) for chunks in (2, 3))

    def agrees_in(self, chunks: int, cuts: Cuts) -> bool:
        parts = [
            [x] * chunks if d is None else list(x.tensor_split(chunks, d))
            for x, d in zip(self.given, cuts[0], strict=True)
        ]
        given = [[part[c] for part in parts] for c in range(chunks)]
        if not self.fits(given, cuts):
            return False
        ran = [self.run(chunk) for chunk in given]
        if any(out is None for out in ran):
            return False
        assert self.whole is not None
        for i, (want, d) in enumerate(zip(self.whole, cuts[1], strict=True)):
            pieces = [out[i] for out in ran if out is not None]
            if d is not None and not _same(pieces, want, d):
                return False
        return True


def _sizes_join(pieces: list, want: Tensor | None, dim: int) -> bool:
    """Whether pieces, one behind the other along a dimension, have the sizes of the whole."""
    if want is None or not pieces or any(p.ndim != want.ndim for p in pieces):
        return False
    other = [n for d, n in enumerate(want.shape) if d != dim]
    if any([n for d, n in enumerate(p.shape) if d != dim] != other for p in pieces):
        return False
    return sum(p.shape[dim] for p in pieces) == want.shape[dim]


def _same(pieces: list, want: Tensor | None, dim: int) -> bool:
    if want is None or not _sizes_join(pieces, want, dim):
        return False
    got = torch.cat(pieces, dim)
    if got.dtype != want.dtype:
        return False
    return torch.allclose(got, want, rtol=1e-9, atol=1e-11, equal_nan=True)
