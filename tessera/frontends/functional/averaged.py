"""Batch norms whose running statistics are means over all batches so far (`momentum=None`).

Eager PyTorch reads the number of batches as a Python number, which only a run would give. In a traced program it stays
a tensor: the norm leaves the statistics of this batch, which are then averaged in by plain operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tessera.frontends.functional.trace import WATCHED, tracing


def _averaging(kind: type[nn.Module]) -> Callable:
    original = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        averages = self.training and self.momentum is None
        if not averages or mean is None or var is None or count is None or not tracing():
            return original(self, x)
        self._check_input_dim(x)
        count.add_(1)
        new_mean, new_var = mean.clone(), var.clone()
        out = F.batch_norm(x, new_mean, new_var, self.weight, self.bias, True, 1.0, self.eps)
        share = (1.0 / count.double()).to(mean.dtype)
        for running, new in ((mean, new_mean), (var, new_var)):
            running.copy_(running * (1 - share) + new * share)
        return out

    return lambda _: forward


WATCHED += [(kind, "forward", _averaging(kind)) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)]
