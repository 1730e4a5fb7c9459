"""Losses, kept whole.

Their derivatives are PyTorch's own formulas, which already are one or two kernels each (log_softmax and
nll_loss for cross entropy); nothing is gained by writing them again. What is declared is that capture keeps
them in one piece, and what they cost.
"""

from __future__ import annotations

from tessera.ops.families import per_input
from tessera.ops.op import declare

# operator: flops for every element read
_LOSSES = {
    "cross_entropy_loss": 6, "nll_loss": 1, "nll_loss2d": 1, "nll_loss_nd": 1, "mse_loss": 2, "l1_loss": 2,
    "smooth_l1_loss": 4, "huber_loss": 4, "binary_cross_entropy": 10, "binary_cross_entropy_with_logits": 12,
    "kl_div": 6,
}  # fmt: skip

for _name, _flops in _LOSSES.items():
    declare(f"aten.{_name}.default", "loss", cost=per_input(_flops))
