"""Arithmetic of experts on rows that lie expert by expert.

In: rows, how many of them each expert has, one matrix an expert, stacked. Out: products, expert by expert. A grouped
product of PyTorch's does all at once where it takes such operands; elsewhere there is one product an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.util.errors import InputError

_GROUPED = getattr(F, "grouped_mm", None)
_LEAST_HARDWARE = (9, 0)  # what grouped products of PyTorch's are written for
_ALIGNED = 8  # elements of 16 bits, 16 bytes: rows begin there


def _takes(*operands: Tensor) -> bool:
    first = operands[0]
    if _GROUPED is None or first.device.type != "cuda" or first.dtype != torch.bfloat16 or torch.version.hip:
        return False
    aligned = all(n % _ALIGNED == 0 for x in operands for n in x.shape[-2:])
    return aligned and torch.cuda.get_device_capability(first.device) >= _LEAST_HARDWARE


def products(rows: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """Every row times its expert's matrix, transposed: `rows @ stack[e].T`."""
    if _takes(stack) and rows.shape[0]:
        assert _GROUPED is not None
        return _GROUPED(rows, stack.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    each = zip(rows.split(counts.tolist()), stack, strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in each])


def outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """The gradient of a stack: of each expert's rows, `a.T @ b`."""
    if _takes(a[:0], b[:0]) and a.shape[0]:
        assert _GROUPED is not None
        return _GROUPED(a.t(), b, offs=counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    return torch.stack([x.t() @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])


@dataclass(frozen=True)
class Activation:
    run: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor, Tensor], Tensor]  # of a cotangent and what it was given


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda ct, x: torch.ops.aten.gelu_backward(ct, x, approximate="tanh"),
    ),
    "relu": Activation(F.relu, lambda ct, x: torch.ops.aten.threshold_backward(ct, x, 0)),
}


def activation_of(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise InputError(f"experts: expected for activation one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]


def hidden(rows: Tensor, counts: Tensor, up: Tensor, gate: Tensor | None, activation: Activation) -> Tensor:
    """What experts compute between their two layers."""
    above = products(rows, up, counts)
    return activation.run(above) if gate is None else activation.run(products(rows, gate, counts)) * above


def pull_hidden(
    ct: Tensor, rows: Tensor, counts: Tensor, up: Tensor, gate: Tensor | None, activation: Activation
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the rows, of `up` and of `gate`."""
    above = products(rows, up, counts)
    if gate is None:
        d_above, d_gated = activation.pull(ct, above), None
    else:
        gated = products(rows, gate, counts)
        d_above, d_gated = ct * activation.run(gated), activation.pull(ct * above, gated)
    d_rows = products(d_above, up.transpose(1, 2), counts)
    if d_gated is None or gate is None:
        return d_rows, outer(d_above, rows, counts), None
    d_rows = d_rows + products(d_gated, gate.transpose(1, 2), counts)
    return d_rows, outer(d_above, rows, counts), outer(d_gated, rows, counts)
