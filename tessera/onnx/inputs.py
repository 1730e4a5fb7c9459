"""What a caller gives, checked against what the file says of its inputs."""

from __future__ import annotations

import numpy as np
import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import CARRIERS, DTYPES, STRING, Narrow
from tessera.frontends.onnx.structure import ValueInfo
from tessera.util.errors import InputError


def checked_input(info: ValueInfo, value: object) -> object:
    """The value as operators take it. Tensors of a few bits come as their carriers, strings as arrays of objects."""
    if info.kind == "tensor":
        return _tensor(info, value)
    if info.kind == "sequence":
        if not isinstance(value, (list, tuple)):
            raise InputError(f"the input {info.name!r}: expected a list of tensors, got {type(value).__name__}")
        return [_element(info, x) for x in value]
    if info.kind == "optional":
        return [_element(info, x) for x in value] if isinstance(value, (list, tuple)) else _element(info, value)
    return value


def _element(info: ValueInfo, value: object) -> object:
    if value is None or isinstance(value, (Narrow, dict)):
        return value
    return _tensor(ValueInfo(info.name, "tensor", info.element, None), value)


def _tensor(info: ValueInfo, value: object) -> object:
    if info.element == STRING:
        return np.asarray(value, dtype=object)
    if isinstance(value, Narrow):
        return value
    if not isinstance(value, torch.Tensor):
        raise InputError(f"the input {info.name!r}: expected a tensor, got {type(value).__name__}")
    expected = DTYPES.get(info.element) or CARRIERS.get(info.element)
    if expected is not None and value.dtype != expected:
        raise InputError(f"the input {info.name!r}: expected {expected}, got {value.dtype}")
    if info.shape is not None:
        right = len(info.shape) == value.ndim
        right = right and all(not isinstance(a, int) or a == b for a, b in zip(info.shape, value.shape, strict=True))
        if not right:
            sizes = ", ".join("?" if n is None else str(n) for n in info.shape)
            raise InputError(f"the input {info.name!r}: expected the shape [{sizes}], got {list(value.shape)}")
    return Narrow(value, info.element) if info.element in elements.CARRIERS else value
