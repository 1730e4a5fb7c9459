"""Linear layers in 8 bits as plain PyTorch writes them: what `precision="fp8"` has to agree with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def rounded(x: Tensor, dtype: torch.dtype, scaling: str, dim: int, scale: Tensor | None = None) -> Tensor:
    """x as its numbers of 8 bits stand for it, in single precision; `dim` is what a product sums over."""
    x = x.float()
    if scale is None:
        top = x.abs().amax() if scaling == "tensor" else x.abs().amax(dim, keepdim=True)
        scale = top.clamp(min=1e-12) / LARGEST[dtype]
    q = (x * scale.reciprocal()).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return q.float() * scale


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, scaling, scales):
        ctx.save_for_backward(x, w)
        ctx.scaling, ctx.scales, ctx.bias = scaling, scales, bias is not None
        rows = x.flatten(0, -2)
        mine, yours, _ = scales
        y = rounded(rows, E4M3, scaling, 1, mine) @ rounded(w, E4M3, scaling, 1, yours).t()
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, g):
        (x, w), scaling, (mine, yours, its) = ctx.saved_tensors, ctx.scaling, ctx.scales
        kind = E5M2 if scaling == "tensor" else E4M3
        g2, rows = g.flatten(0, -2), x.flatten(0, -2)
        dx = rounded(g2, kind, scaling, 1, its) @ rounded(w, E4M3, scaling, 0, yours)
        dw = rounded(g2, kind, scaling, 0, its).t() @ rounded(rows, E4M3, scaling, 0, mine)
        db = g2.sum(0) if ctx.bias else None
        return dx.to(x.dtype).view(x.shape), dw.to(w.dtype), db, None, None


class Layer8(nn.Module):
    """A linear layer with these products; `scales` are those of earlier steps."""

    def __init__(self, layer: nn.Linear, scaling: str = "tensor") -> None:
        super().__init__()
        self.weight, self.bias, self.scaling = layer.weight, layer.bias, scaling
        self.scales = (None, None, None)

    def forward(self, x: Tensor) -> Tensor:
        return Linear8.apply(x, self.weight, self.bias, self.scaling, self.scales)
