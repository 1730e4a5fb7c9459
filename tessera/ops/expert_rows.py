"""Arithmetic of experts on rows that lie expert by expert.

In: rows, how many of them each expert has, one matrix an expert, stacked. Out: products, expert by expert. A grouped
product of PyTorch's does all at once where it takes such operands; elsewhere there is one product an expert.
`dense_pull` is the gradient of it all in plain operators, of every token with every expert: derivatives of it are
PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi

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
    slope: Callable[[Tensor], Tensor]  # its derivative, in operators that have derivatives


def _silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


def _gelu_slope(x: Tensor) -> Tensor:
    return (1 + (x * 0.5**0.5).erf()) / 2 + x * (x * x / -2).exp() * (2 * pi) ** -0.5


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    scale, cube = (2 / pi) ** 0.5, 0.044715
    t = (scale * (x + cube * x**3)).tanh()
    return (1 + t) / 2 + x / 2 * (1 - t * t) * scale * (1 + 3 * cube * x * x)


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward, _silu_slope),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward, _gelu_slope),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda ct, x: torch.ops.aten.gelu_backward(ct, x, approximate="tanh"),
        _gelu_tanh_slope,
    ),
    "relu": Activation(
        F.relu, lambda ct, x: torch.ops.aten.threshold_backward(ct, x, 0), lambda x: (x > 0).to(x.dtype)
    ),
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


def dense_pull(
    ct: Tensor, tokens: Tensor, choice: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None,
    activation: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of tokens, weights, up, down and, if there is one, gate. An expert that a token did not choose counts
    nothing."""
    known, numbers = activation_of(activation), torch.arange(up.shape[0], device=choice.device)
    chosen = choice == numbers[:, None, None]  # [E, T, k]
    scale = (weights * chosen).sum(2).unsqueeze(2)
    above = tokens @ up.transpose(1, 2)  # [E, T, f]
    pulled = ct @ down
    wanted = pulled * scale
    if gate is None:
        between, d_above, d_gated = known.run(above), wanted * known.slope(above), None
    else:
        gated = tokens @ gate.transpose(1, 2)
        between = known.run(gated) * above
        d_above, d_gated = wanted * known.run(gated), wanted * above * known.slope(gated)
    d_weights = ((between * pulled).sum(2).unsqueeze(2) * chosen).sum(0)
    d_tokens, d_down = (d_above @ up).sum(0), (ct * scale).transpose(1, 2) @ between
    if gate is None or d_gated is None:
        return [d_tokens, d_weights, d_above.transpose(1, 2) @ tokens, d_down]
    d_tokens = d_tokens + (d_gated @ gate).sum(0)
    return [d_tokens, d_weights, d_above.transpose(1, 2) @ tokens, d_down, d_gated.transpose(1, 2) @ tokens]
