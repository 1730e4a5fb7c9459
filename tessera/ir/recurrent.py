"""What recurrent layers give, without a walk over their steps.

PyTorch's own rules run every step, and so fix the length of the sequence. These give the types alone, for any length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.torch_internals.operators import OpOverload


def _lstm(x: torch.Tensor, states: list[torch.Tensor], *rest: object) -> tuple[torch.Tensor, ...]:
    hidden, cell = states
    return (*_recurrent(x, hidden, *rest), torch.empty_like(cell))


def _recurrent(x: torch.Tensor, hidden: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    *_, both_ways, batch_first = rest
    batch, length = x.shape[:2] if batch_first else x.shape[1::-1]
    steps = x.new_empty((length, batch, hidden.shape[-1] * (2 if both_ways else 1)))
    return steps.transpose(0, 1) if batch_first else steps, torch.empty_like(hidden)


_aten = torch.ops.aten
RECURRENT: dict[OpOverload, Callable] = {
    _aten.lstm.input: _lstm,
    _aten.gru.input: _recurrent,
    _aten.rnn_tanh.input: _recurrent,
    _aten.rnn_relu.input: _recurrent,
}
