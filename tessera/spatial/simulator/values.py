"""Arithmetic of the machine, in its precision and its order.

In: tensors as memory holds them. Out: tensors as memory will hold them. Products sum a fold's part of k exactly
(float64 passes for it) and add the parts in order; the vector unit computes in one type and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F

from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.schema import FUNCTIONS as NAMES
from tessera.spatial.listing.types import Call, Ref, Tree

# A function means what PyTorch's of that name means, but for these.
_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "softplus": F.softplus,
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "max": lambda x: x.amax(-1, keepdim=True), "min": lambda x: x.amin(-1, keepdim=True),
    "argmax": lambda x: x.argmax(-1, keepdim=True), "argmin": lambda x: x.argmin(-1, keepdim=True),
}  # fmt: skip
FUNCTIONS = {name: _OWN.get(name) or getattr(torch, name, None) or getattr(torch.special, name) for name in NAMES}


TOGETHER = 1 << 22  # numbers


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def product(
    machine: SpatialMachine, x: torch.Tensor, w: torch.Tensor, old: torch.Tensor | None, sums: str
) -> torch.Tensor:
    """[m, k] · [k, n], in parts of k as the array folds them, the old value first."""
    part = x.shape[1] if machine.matrix.stationary == "output" else machine.matrix.rows
    total = old
    for exact in _folds(x.double(), w.double(), part):
        # Integers wrap as 32 bits do: 2^53 holds every sum of products of 8 bits exactly.
        rounded = (exact.to(torch.int64) if sums == "int32" else exact).to(dtype_of(sums))
        for each in rounded:
            total = each if total is None else total + each
    assert total is not None
    return total


def _folds(x: torch.Tensor, w: torch.Tensor, part: int) -> Iterator[torch.Tensor]:
    """The products of each part of k, [parts, m, n], as many at once as take little memory."""
    (m, k), n = x.shape, w.shape[1]
    whole = k // part * part
    for begin in range(0, whole, step := max(1, TOGETHER // (m * n)) * part):
        at = slice(begin, min(begin + step, whole))
        yield torch.bmm(x[:, at].reshape(m, -1, part).transpose(0, 1), w[at].reshape(-1, part, n))
    if whole < k:
        yield (x[:, whole:] @ w[whole:])[None]


def expression(tree: Tree, tiles: Mapping[Ref, torch.Tensor], computed: str, lanes: int) -> torch.Tensor:
    kind = dtype_of(computed)

    def value(of: Tree) -> torch.Tensor:
        match of:
            case Ref():
                return tiles[of].to(kind)
            case Call("sum", (operand,)):
                return lane_sum(value(operand), lanes)
            case Call(name, operands):
                return FUNCTIONS[name](*map(value, operands)).to(kind)
        return torch.tensor(of, dtype=kind)

    return value(tree)


def lane_sum(x: torch.Tensor, lanes: int) -> torch.Tensor:
    """Along the last dimension: element i is added by lane i mod lanes, then the lanes are added in order."""
    partial = x[..., :lanes].clone()
    for begin in range(lanes, x.shape[-1], lanes):
        chunk = x[..., begin : begin + lanes]
        partial[..., : chunk.shape[-1]] += chunk
    total, *others = partial.unbind(-1)
    for lane in others:
        total = total + lane
    return total.unsqueeze(-1)


def written(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rounded once, to the type that is written."""
    kind = dtype_of(dtype)
    if not x.is_floating_point() or kind.is_floating_point or kind == torch.bool:
        return x.to(kind)
    limits = torch.iinfo(kind)
    whole = torch.nan_to_num(x.double().round(), nan=0.0, posinf=float(limits.max), neginf=float(limits.min))
    inside = whole.clamp(float(limits.min), float(limits.max))
    above = inside >= 2.0**63  # the largest int64 is no float
    return torch.where(above, limits.max, torch.where(above, 0.0, inside).to(torch.int64)).to(kind)


def raw(x: torch.Tensor) -> torch.Tensor:
    """As bytes, where PyTorch cannot move the type about."""
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else x
