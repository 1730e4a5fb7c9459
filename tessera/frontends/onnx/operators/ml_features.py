"""ai.onnx.ml: preparing features, encoding labels, maps."""

from __future__ import annotations

import math

import numpy as np
import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.registry import ML, operator
from tessera.frontends.onnx.values import literal

Tensor = torch.Tensor
_LOOKED_UP = "labels are looked up in Python"


@operator("Binarizer", domain=ML)
def binarizer(x: Tensor, *, threshold: float = 0.0) -> Tensor:
    return (x > threshold).to(x.dtype)


@operator("Scaler", domain=ML)
def scaler(x: Tensor, *, offset: list[float] | None = None, scale: list[float] | None = None) -> Tensor:
    moved = x.float() - literal(offset or [0.0], torch.float32).to(x.device)
    return moved * literal(scale or [1.0], torch.float32).to(x.device)


@operator("Normalizer", domain=ML)
def normalizer(x: Tensor, *, norm: str = "MAX") -> Tensor:
    wide = x.float()
    if norm == "MAX":
        size = wide.amax(-1, keepdim=True)
    elif norm == "L1":
        size = wide.abs().sum(-1, keepdim=True)
    else:
        size = (wide * wide).sum(-1, keepdim=True).sqrt()
    return torch.where(size == 0, wide, wide / size)


@operator("Imputer", domain=ML)
def imputer(
    x: Tensor,
    *,
    imputed_value_floats: list[float] | None = None,
    imputed_value_int64s: list[int] | None = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Tensor:
    if x.is_floating_point():
        new = literal(imputed_value_floats or [0.0], x.dtype).to(x.device)
        old = torch.isnan(x) if math.isnan(replaced_value_float) else x == replaced_value_float
    else:
        new, old = literal(imputed_value_int64s or [0], x.dtype).to(x.device), x == replaced_value_int64
    return torch.where(old, new, x)


@operator("FeatureVectorizer", domain=ML)
def feature_vectorizer(*xs: Tensor, inputdimensions: list[int] | None = None) -> Tensor:
    sizes = inputdimensions or [x.shape[-1] for x in xs]
    rows = [x.reshape(1, -1) if x.ndim == 1 else x.flatten(1) for x in xs]
    return torch.cat([r[:, :n].float() for r, n in zip(rows, sizes, strict=True)], 1)


@operator("OneHotEncoder", domain=ML)
def one_hot_encoder(
    x: object, *, cats_int64s: list[int] | None = None, cats_strings: list[str] | None = None, zeros: int = 1
) -> Tensor:
    if isinstance(x, np.ndarray):
        one_hot = torch.from_numpy(x[..., None] == np.array(cats_strings or [], dtype=object)).float()
    else:
        assert isinstance(x, Tensor)
        one_hot = (x.unsqueeze(-1) == literal(cats_int64s or [], torch.int64).to(x.device)).float()
    if not zeros and not bool((one_hot.sum(-1) > 0).all()):
        raise OnnxError("OneHotEncoder: a value that is none of the categories")
    return one_hot


def _mapped(x: object, table: dict, default: object) -> np.ndarray:
    array = np.asarray(x)
    flat = [table.get(_key(v), default) for v in array.ravel().tolist()]
    out = np.empty(len(flat), dtype=object)
    out[:] = flat
    return out.reshape(array.shape)


def _key(v: object) -> object:
    return "nan" if isinstance(v, float) and math.isnan(v) else v


def _as_value(array: np.ndarray, dtype: torch.dtype | None) -> object:
    if dtype is None:
        return array
    return torch.tensor(array.tolist(), dtype=dtype).reshape(array.shape)


@operator("LabelEncoder", 2, domain=ML, interpreted=_LOOKED_UP)
def label_encoder(
    x: object,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: object = None,
    keys_floats: list[float] | None = None,
    keys_int64s: list[int] | None = None,
    keys_strings: list[str] | None = None,
    keys_tensor: object = None,
    values_floats: list[float] | None = None,
    values_int64s: list[int] | None = None,
    values_strings: list[str] | None = None,
    values_tensor: object = None,
) -> object:
    keys = next((k for k in (keys_floats, keys_int64s, keys_strings) if k is not None), None)
    if keys is None:
        keys = np.asarray(keys_tensor).ravel().tolist()
    if values_tensor is not None:
        values = np.asarray(values_tensor).ravel().tolist()
        strings = isinstance(values_tensor, np.ndarray)
        dtype = None if strings else values_tensor.dtype  # type: ignore[attr-defined]
        fallback: object = (
            default_string if strings else (default_int64 if not dtype.is_floating_point else default_float)
        )  # type: ignore[union-attr]
        if default_tensor is not None:
            fallback = np.asarray(default_tensor).ravel().tolist()[0]
    elif values_strings is not None:
        values, dtype, fallback = values_strings, None, default_string
    elif values_int64s is not None:
        values, dtype, fallback = values_int64s, torch.int64, default_int64
    else:
        values, dtype, fallback = values_floats or [], torch.float32, default_float
    if len(keys) != len(values):
        raise OnnxError(f"LabelEncoder: {len(keys)} keys and {len(values)} values")
    table = dict(zip(map(_key, keys), values, strict=True))
    return _as_value(_mapped(x, table, fallback), dtype)


@operator("LabelEncoder", 1, 1, domain=ML, interpreted=_LOOKED_UP)
def label_encoder_of_classes(
    x: object, *, classes_strings: list[str], default_int64: int = -1, default_string: str = "_Unused"
) -> object:
    return category_mapper(
        x,
        cats_int64s=list(range(len(classes_strings))),
        cats_strings=classes_strings,
        default_int64=default_int64,
        default_string=default_string,
    )


@operator("CategoryMapper", domain=ML, interpreted=_LOOKED_UP)
def category_mapper(
    x: object,
    *,
    cats_int64s: list[int],
    cats_strings: list[str],
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> object:
    if isinstance(x, np.ndarray):
        table = dict(zip(cats_strings, cats_int64s, strict=True))
        return _as_value(_mapped(x, table, default_int64), torch.int64)
    return _mapped(x, dict(zip(cats_int64s, cats_strings, strict=True)), default_string)


@operator("DictVectorizer", domain=ML, interpreted="maps are Python values")
def dict_vectorizer(
    x: dict, *, int64_vocabulary: list[int] | None = None, string_vocabulary: list[str] | None = None
) -> object:
    words: list = string_vocabulary if string_vocabulary is not None else int64_vocabulary or []
    values = [x.get(word) for word in words]
    sample = next(iter(x.values()), 0.0)
    if isinstance(sample, str):
        return np.array([["" if v is None else v for v in values]], dtype=object)
    dtype = torch.float32 if isinstance(sample, float) else torch.int64
    return torch.tensor([[0 if v is None else v for v in values]], dtype=dtype)


@operator("ZipMap", domain=ML, interpreted="maps are Python values")
def zip_map(
    x: Tensor, *, classlabels_int64s: list[int] | None = None, classlabels_strings: list[str] | None = None
) -> list[dict]:
    labels: list = classlabels_strings if classlabels_strings is not None else classlabels_int64s or []
    rows = x.tolist() if x.ndim == 2 else [x.tolist()]
    return [dict(zip(labels, row, strict=True)) for row in rows]


@operator("CastMap", domain=ML, interpreted="maps are Python values")
def cast_map(x: dict, *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1) -> object:
    convert = {"TO_FLOAT": float, "TO_INT64": lambda v: int(float(v)), "TO_STRING": str}[cast_to]
    ordered = sorted(x.items())
    if map_form == "SPARSE":
        values = [0] * max_map
        for place, v in ordered:
            if not 0 <= place < max_map:
                raise OnnxError(f"CastMap: key {place} of a map of {max_map}")
            values[place] = v
    else:
        values = [v for _, v in ordered]
    if cast_to == "TO_STRING":
        return np.array([[convert(v) for v in values]], dtype=object)
    dtype = torch.float32 if cast_to == "TO_FLOAT" else torch.int64
    return torch.tensor([[convert(v) for v in values]], dtype=dtype)
