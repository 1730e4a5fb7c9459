"""Fourier transforms."""

from __future__ import annotations

import torch

from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.registry import operator
from tessera.frontends.onnx.values import number

Tensor = torch.Tensor


def _transform(x: Tensor, length: object, axis: int, inverse: int, onesided: int, context: Context) -> Tensor:
    """The last dimension holds one real number or the two parts of a complex one."""
    real = x.shape[-1] == 1
    axis = axis % x.ndim if axis >= 0 else axis % x.ndim
    signal = x.squeeze(-1) if real else torch.view_as_complex(x.contiguous())
    count = int(number(length)) if length is not None else None
    if count is not None:
        allowed([*signal.shape[:axis], *signal.shape[axis:][1:], 2, count], x.element_size(), context)
    if inverse and onesided:
        full = count or 2 * (signal.shape[axis] - 1)
        return torch.fft.irfft(signal, full, axis).unsqueeze(-1)
    if inverse:
        out = torch.fft.ifft(signal, count, axis)
    elif onesided and real:
        out = torch.fft.rfft(signal, count, axis)
    else:
        out = torch.fft.fft(signal, count, axis)
        if onesided:
            out = out.narrow(axis, 0, out.shape[axis] // 2 + 1)
    return torch.view_as_real(out)


@operator("DFT", 20, sizes=(1, 2))
def dft(
    x: Tensor,
    length: Tensor | None = None,
    axis: Tensor | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
    context: Context,
) -> Tensor:
    return _transform(x, length, -2 if axis is None else int(number(axis)), inverse, onesided, context)


@operator("DFT", 17, 19, sizes=(1,))
def dft_by_attribute(
    x: Tensor, length: Tensor | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0, context: Context
) -> Tensor:
    return _transform(x, length, axis, inverse, onesided, context)


@operator("STFT", 17, sizes=(1, 3))
def stft(
    x: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None, *, onesided: int = 1
) -> Tensor:
    hop = int(number(step))
    size = int(number(length)) if length is not None else window.shape[0]  # type: ignore[union-attr]
    signal = x.squeeze(-1) if x.ndim == 3 and x.shape[-1] == 1 else torch.view_as_complex(x) if x.ndim == 3 else x
    frames = signal.unfold(1, size, hop)
    if window is not None:
        frames = frames * window
    out = torch.fft.rfft(frames, dim=-1) if onesided and not frames.is_complex() else torch.fft.fft(frames, dim=-1)
    return torch.view_as_real(out)
