"""Values as NumPy's arrays and back. Types that NumPy lacks are those of ml_dtypes, which the package onnx brings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import Narrow

_OF_TYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
}
_NARROW = {
    "uint4": elements.UINT4,
    "int4": elements.INT4,
    "uint2": elements.UINT2,
    "int2": elements.INT2,
    "float4_e2m1fn": elements.FLOAT4E2M1,
    "float6_e2m3fn": elements.FLOAT6E2M3,
    "float6_e3m2fn": elements.FLOAT6E3M2,
}
_NAMES = {code: name for name, code in _NARROW.items()}
_BITS = {1: np.uint8, 2: np.int16}


def to_torch(x: object) -> object:
    if isinstance(x, (list, tuple)):
        return [to_torch(i) for i in x]
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not isinstance(x, np.ndarray):
        return x
    name = x.dtype.name
    if x.dtype == object or x.dtype.kind in "US":
        return x.astype(object)
    if name in _NARROW:
        code = _NARROW[name]
        return Narrow(torch.from_numpy(np.array(x, dtype=_numpy_carrier(code))), code)
    if name in _OF_TYPES:
        return torch.from_numpy(np.array(x).view(_BITS[x.dtype.itemsize])).view(_OF_TYPES[name])
    return torch.from_numpy(np.array(x))


def _numpy_carrier(code: int) -> type:
    return {torch.uint8: np.uint8, torch.int8: np.int8, torch.float32: np.float32}[elements.CARRIERS[code]]


def to_numpy(x: object) -> object:
    if isinstance(x, (list, tuple)):
        return [to_numpy(i) for i in x]
    if isinstance(x, Narrow):
        return x.data.detach().cpu().numpy().astype(getattr(ml_dtypes, _NAMES[x.code]))
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().cpu().contiguous()
    for name, dtype in _OF_TYPES.items():
        if x.dtype == dtype:
            bits = x.reshape(-1).view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy()
            return bits.view(getattr(ml_dtypes, name)).reshape(x.shape)
    return x.numpy()
