"""Tensor messages become values: torch tensors, `Narrow` ones, or NumPy arrays of strings.

Every size is checked against the bytes that are there before anything is allocated.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from tessera.frontends.onnx import elements
from tessera.frontends.onnx.elements import BITS, CARRIERS, DTYPES, STRING, Narrow, float_values, is_small_float
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.external import Origin, read_external
from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.proto import onnx

EXTERNAL = 1  # TensorProto.EXTERNAL
# In a message, other fields than `raw_data` hold elements of these types, and as what.
_FIELDS = {
    elements.FLOAT: ("float_data", np.float32),
    elements.COMPLEX64: ("float_data", np.float32),
    elements.DOUBLE: ("double_data", np.float64),
    elements.COMPLEX128: ("double_data", np.float64),
    elements.INT64: ("int64_data", np.int64),
    elements.UINT32: ("uint64_data", np.uint64),
    elements.UINT64: ("uint64_data", np.uint64),
}
_TYPED_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def read_tensor(message: onnx.TensorProto, origin: Origin, limits: Limits, where: str) -> object:
    """The value of a tensor message."""
    what = f"{where}: tensor {message.name!r}" if message.name else where
    shape = checked_shape(message.dims, limits, what)
    code, count = message.data_type, math.prod(shape)
    if message.HasField("segment"):
        raise OnnxError(f"{what}: tensors in segments are not part of a model")
    if code == STRING:
        return _strings(message, shape, what)
    if code not in DTYPES and code not in CARRIERS:
        raise OnnxError(f"{what}: expected an element type between 1 and 28, got {code}")
    if message.data_location == EXTERNAL:
        entries = {e.key: e.value for e in message.external_data}
        check_texts(f"{what}: its external data", *entries, *entries.values())
        if len(entries) != len(message.external_data):
            raise OnnxError(f"{what}: external data says the same thing twice")
        return _from_bytes(read_external(origin, entries, _bytes(code, count), what), code, shape, what)
    filled = [name for name in _TYPED_FIELDS if len(getattr(message, name))]
    if message.HasField("raw_data"):
        if filled:
            raise OnnxError(f"{what}: both raw_data and {filled[0]} hold its elements")
        return _from_bytes(bytearray(message.raw_data), code, shape, what)
    return _from_field(message, code, shape, filled, what)


def checked_shape(dims: object, limits: Limits, what: str) -> tuple[int, ...]:
    shape = tuple(int(n) for n in dims)  # type: ignore[attr-defined]
    if len(shape) > limits.rank:
        raise OnnxError(f"{what}: expected at most {limits.rank} dimensions, got {len(shape)}")
    if any(n < 0 for n in shape):
        raise OnnxError(f"{what}: expected sizes of at least 0, got {list(shape)}")
    if math.prod(n for n in shape if n) > 2**40:
        raise OnnxError(f"{what}: {list(shape)} is more than any machine holds")
    return shape


def _bytes(code: int, count: int) -> int:
    if code in BITS:
        return -(-count * BITS[code] // 8)
    return count * DTYPES[code].itemsize


def _from_bytes(data: bytearray, code: int, shape: tuple[int, ...], what: str) -> object:
    count = math.prod(shape)
    expected = _bytes(code, count)
    if len(data) != expected:
        raise OnnxError(f"{what}: expected {expected} bytes for shape {list(shape)}, got {len(data)}")
    if code in BITS:
        return unpack(np.frombuffer(data, np.uint8), code, shape)
    dtype = DTYPES[code]
    if sys.byteorder == "big" and dtype.itemsize > 1:  # files are little-endian
        width = dtype.itemsize // (2 if dtype.is_complex else 1)
        data = bytearray(np.frombuffer(data, f"u{width}").byteswap().tobytes())
    if dtype == torch.bool:
        return torch.from_numpy((np.frombuffer(data, np.uint8) != 0).reshape(shape))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)


def unpack(data: np.ndarray, code: int, shape: tuple[int, ...]) -> Narrow:
    """Elements of a few bits, the first in the lowest ones. Bytes are looked up, so that nothing wider is made."""
    bits, count = BITS[code], math.prod(shape)
    if bits == 6:  # four in three bytes
        stream = np.unpackbits(data, bitorder="little")[: count * bits].reshape(count, bits)
        patterns = np.packbits(stream, axis=1, bitorder="little")
        return of_patterns(torch.from_numpy(patterns.astype(np.int16).reshape(shape)), code)
    parts = np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1
    elements_of = of_patterns(torch.from_numpy(parts.astype(np.int16)), code).data.numpy()
    return Narrow(torch.from_numpy(elements_of[data].reshape(-1)[:count].reshape(shape)), code)


def of_patterns(patterns: torch.Tensor, code: int) -> Narrow:
    """Bit patterns as elements."""
    if is_small_float(code):
        table = torch.tensor(float_values(code), dtype=torch.float32)
        return Narrow(table[patterns.long()], code)
    low, high = elements.RANGES[code]
    signed = torch.where(patterns > high, patterns - 2 ** BITS[code], patterns) if low else patterns
    return Narrow(signed.to(CARRIERS[code]), code)


def _from_field(message: onnx.TensorProto, code: int, shape: tuple[int, ...], filled: list[str], what: str) -> object:
    field, kind = _FIELDS.get(code, ("int32_data", np.int32))
    if filled not in ([], [field]):
        raise OnnxError(f"{what}: expected its elements in {field}, got {', '.join(filled)}")
    data = np.array(getattr(message, field), dtype=kind)
    count = math.prod(shape)
    packed = code in BITS and BITS[code] < 6  # those of 6 bits have a number each
    if packed:
        expected = -(-count * BITS[code] // 8)
    else:
        expected = count * (2 if code in (elements.COMPLEX64, elements.COMPLEX128) else 1)
    if len(data) != expected:
        raise OnnxError(f"{what}: expected {expected} elements in {field} for shape {list(shape)}, got {len(data)}")
    if packed:
        return unpack(data.astype(np.uint8), code, shape)
    if code in BITS:
        if ((data < 0) | (data >= 2 ** BITS[code])).any():
            raise OnnxError(f"{what}: expected patterns of {BITS[code]} bits in {field}")
        return of_patterns(torch.from_numpy(data).reshape(shape), code)
    dtype = DTYPES[code]
    if code in (elements.FLOAT16, elements.BFLOAT16):  # bits, in the low half
        return torch.from_numpy(data.astype(np.uint16).view(np.int16)).view(dtype).reshape(shape)
    if code in elements.FLOAT8:
        return torch.from_numpy(data.astype(np.uint8)).view(dtype).reshape(shape)
    if dtype.is_complex:
        return torch.from_numpy(data).view(dtype).reshape(shape)
    return torch.from_numpy(data).to(dtype).reshape(shape)


def _strings(message: onnx.TensorProto, shape: tuple[int, ...], what: str) -> np.ndarray:
    if message.HasField("raw_data") or message.data_location == EXTERNAL:
        raise OnnxError(f"{what}: strings are kept in string_data alone")
    if len(message.string_data) != math.prod(shape):
        raise OnnxError(
            f"{what}: expected {math.prod(shape)} strings for {list(shape)}, got {len(message.string_data)}"
        )
    texts = np.empty(len(message.string_data), dtype=object)
    texts[:] = [text(s, what) for s in message.string_data]
    return texts.reshape(shape)


def check_texts(what: str, *texts: str) -> None:
    """Protobuf gives bytes where a text is no UTF-8."""
    for text in texts:
        if type(text) is not str:
            raise OnnxError(f"{what}: expected text, got the bytes {text[:40]!r}")


def text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OnnxError(f"{what}: expected text in UTF-8: {error}") from error


def read_sparse(message: onnx.SparseTensorProto, origin: Origin, limits: Limits, where: str) -> object:
    """A sparse tensor, written out."""
    what = f"{where}: sparse tensor {message.values.name!r}"
    shape = checked_shape(message.dims, limits, what)
    values = read_tensor(message.values, origin, limits, what)
    indices = read_tensor(message.indices, origin, limits, what)
    if not isinstance(values, torch.Tensor) or not isinstance(indices, torch.Tensor) or indices.dtype != torch.int64:
        raise OnnxError(f"{what}: expected values that are numbers and indices of int64")
    count = math.prod(shape)
    if count * values.element_size() > limits.tensor_bytes:
        raise OnnxError(f"{what}: {list(shape)} takes more than the limit of {limits.tensor_bytes} bytes")
    if values.ndim != 1 or indices.shape not in ((len(values),), (len(values), len(shape))):
        raise OnnxError(f"{what}: expected an index for each of {values.numel()} values, got {list(indices.shape)}")
    if indices.ndim == 2:
        sizes = torch.tensor(shape)
        if bool(((indices < 0) | (indices >= sizes)).any()):
            raise OnnxError(f"{what}: an index lies outside of {list(shape)}")
        strides = torch.tensor([math.prod(shape[i + 1 :]) for i in range(len(shape))])
        indices = (indices * strides).sum(1)
    if bool(((indices < 0) | (indices >= count)).any()):
        raise OnnxError(f"{what}: an index lies outside of {list(shape)}")
    origin.describe(count * values.element_size(), what)
    dense = torch.zeros(count, dtype=values.dtype)
    dense[indices] = values
    return dense.reshape(shape)
