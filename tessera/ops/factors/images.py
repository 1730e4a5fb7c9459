"""Sharding rules of operators over images, sequences and volumes: what lies in space is whole, rows and channels may be
cut. Pools, resampling and padding treat every channel by itself."""

from __future__ import annotations

import re

from tessera.ir.builder import aten
from tessera.ir.equation import Equation, Value
from tessera.ops.factors.rule import Cut, Dims, Factors, arguments, in_words, rule, tensors
from tessera.ops.families import wrap

SPACE = re.compile(r"([123])d")


@rule(
    """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """
)
def each_channel(eqn: Equation) -> Factors | None:
    found = SPACE.search(eqn.opname)
    assert found is not None
    lead = tensors(eqn)[0].ndim - int(found[1])
    if lead < 0 or any(v.ndim != tensors(eqn)[0].ndim for v in (*tensors(eqn), *eqn.results())):
        return None
    whole: set[str] = set()

    def dims(v: Value, side: str) -> Dims:
        space = [f"{side}{i}" for i in range(v.ndim - lead)]
        whole.update(space)
        return tuple((name,) for name in (*(f"d{i}" for i in range(lead)), *space))

    chooses = "max_pool" in eqn.opname and not eqn.opname.endswith("_backward")
    return Factors(
        tuple(dims(v, f"s{i}_") for i, v in enumerate(tensors(eqn))),
        tuple(None if v is None else dims(v, f"o{i}_") for i, v in enumerate(eqn.outputs)),
        whole=frozenset(whole),
        linear=() if chooses else (frozenset([0]),),
    )


@rule(
    """
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    """
)
def resampled_backward(eqn: Equation) -> Factors | None:
    space = tensors(eqn)[0].ndim - 2
    left, right = (" ".join(f"{side}{i}!" for i in range(space)) for side in "os")
    return in_words(eqn, f"b c {left} -> b c {right}", linear=((0,),), local=_sizes_of_part)


def _sizes_of_part(eqn: Equation, cut: Cut) -> object:
    """An argument names all sizes of what was resampled."""
    args = list(eqn.bound()[0])
    args[2] = [*args[0].shape[:2], *args[2][2:]]
    return getattr(aten, eqn.opname)(*args)


@rule("pixel_shuffle pixel_unshuffle")
def shuffled(eqn: Equation) -> Factors | None:
    return in_words(eqn, "... c! h! w! -> ... f! y! x!", linear=((0,),))


@rule("im2col")
def patches(eqn: Equation) -> Factors | None:
    return in_words(eqn, "b c! h! w! -> b f! n!", linear=((0,),)) if tensors(eqn)[0].ndim == 4 else None


@rule("col2im")
def from_patches(eqn: Equation) -> Factors | None:
    return in_words(eqn, "b f! n! -> b c! h! w!", linear=((0,),)) if tensors(eqn)[0].ndim == 3 else None


@rule("glu glu_backward")
def gated(eqn: Equation) -> Factors | None:
    """Two halves of a dimension meet; gradients are linear in the first operand."""
    operands = tensors(eqn)
    dim = wrap(arguments(eqn)["dim"], operands[0].ndim)

    def dims(v: Value, side: str) -> Dims:
        return tuple((side if i == dim else f"d{i}",) for i in range(v.ndim))

    backward = len(operands) == 2
    return Factors(
        tuple(dims(v, f"h{i}") for i, v in enumerate(operands)),
        (dims(eqn.out, "o"),),
        whole=frozenset(["h0", "h1", "o"]),
        linear=(frozenset([0]),) if backward else (),
    )
