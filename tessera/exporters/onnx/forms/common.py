"""What several families of forms need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.exporters.onnx.errors import NoForm
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.ir.types import SYMBOLIC


def promoted(*operands: object) -> torch.dtype:
    """The dtype in which PyTorch compares or adds these tensors and numbers."""
    dtype: object = None
    for x in operands:
        probe: object
        if isinstance(x, Ref):
            probe = torch.empty([1] * (len(x.shape) if x.shape is not None else 1), dtype=x.dtype, device="meta")
        elif isinstance(x, SYMBOLIC):
            probe = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(x)]
        else:
            probe = x
        if dtype is None:
            dtype = probe
        else:
            both = torch.result_type(dtype, probe)  # type: ignore[arg-type]
            rank = max(getattr(dtype, "ndim", 0), getattr(probe, "ndim", 0))
            plain = not isinstance(dtype, torch.Tensor) and not isinstance(probe, torch.Tensor)
            dtype = torch.zeros((), dtype=both) if plain else torch.empty([1] * rank, dtype=both, device="meta")
    if isinstance(dtype, torch.Tensor):
        return dtype.dtype
    return torch.result_type(dtype, dtype)  # type: ignore[arg-type]


def as_ref(g: Graph, x: object, dtype: torch.dtype) -> Ref:
    """A tensor or number of the program in a dtype."""
    return g.cast(x, dtype) if isinstance(x, Ref) else g.scalar(x, dtype)


def need(holds: bool) -> None:
    """Decline a form that does not hold for these arguments."""
    if not holds:
        raise NoForm


def summing(dtype: torch.dtype) -> torch.dtype:
    """In which runtimes add what is scattered."""
    return {torch.bool: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)


def number(x: object) -> bool:
    return isinstance(x, (bool, int, float))


def axis(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def axes(dims: object, rank: int) -> list[int] | None:
    """Dimensions as a list; None where all are meant."""
    if dims is None:
        return None
    listed: Sequence[int] = [dims] if isinstance(dims, int) else dims  # type: ignore[assignment]
    return [axis(d, rank) for d in listed] if len(listed) else None
