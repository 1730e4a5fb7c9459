"""Strings: arrays of Python texts, which no program holds."""

from __future__ import annotations

import re

import numpy as np
import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.operators.patterns import MOST_STEPS, steps
from tessera.frontends.onnx.registry import operator

Texts = np.ndarray
_WHY = "strings are Python values, which no program holds"
LONGEST = 10_000  # characters that a pattern of a file may be tried on


def _each(fn, *arrays: Texts, kind: object = object) -> Texts:  # noqa: ANN001
    wide = np.broadcast_arrays(*arrays)
    out = np.empty(wide[0].shape, dtype=kind)  # type: ignore[arg-type]
    for place in np.ndindex(out.shape):
        out[place] = fn(*(a[place] for a in wide))
    return out


@operator("StringConcat", 20, interpreted=_WHY)
def string_concat(a: Texts, b: Texts, *, context: Context) -> Texts:
    wide = np.broadcast_arrays(a, b)
    count = sum(len(text) for array in wide for text in array.flat)
    if 4 * count > context.limits.tensor_bytes:
        raise OnnxError(f"StringConcat: {count} characters are more than the limit")
    return _each(lambda x, y: x + y, a, b)


@operator("RegexFullMatch", 20, interpreted=_WHY)
def regex_full_match(x: Texts, *, pattern: str | None = None) -> torch.Tensor:
    if pattern is None:
        return torch.zeros(x.shape, dtype=torch.bool)
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise OnnxError(f"RegexFullMatch: expected a regular expression, got {pattern[:80]!r}: {error}") from error
    if any(len(s) > LONGEST for s in x.ravel()):
        raise OnnxError(f"RegexFullMatch: a text of more than {LONGEST} characters")
    longest = max(map(len, x.ravel()), default=0)
    if steps(pattern, longest) * x.size > MOST_STEPS:
        raise OnnxError(f"RegexFullMatch: {pattern[:80]!r} may take too long on a text of {longest} characters")
    return torch.from_numpy(_each(lambda s: compiled.fullmatch(s) is not None, x, kind=bool))


@operator("StringSplit", 20, interpreted=_WHY)
def string_split(x: Texts, *, delimiter: str | None = None, maxsplit: int | None = None) -> tuple[Texts, torch.Tensor]:
    limit = -1 if maxsplit is None else maxsplit
    parts = _each(lambda s: s.split(delimiter or None, limit), x)
    counts = _each(len, parts, kind=np.int64)
    width = int(counts.max()) if counts.size else 0
    out = np.full((*x.shape, width), "", dtype=object)
    for place in np.ndindex(x.shape):
        out[(*place, slice(None, counts[place]))] = parts[place]
    return out, torch.from_numpy(counts)


@operator("StringNormalizer", 10, interpreted=_WHY)
def string_normalizer(
    x: Texts,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "en_US",
    stopwords: list[str] | None = None,
) -> Texts:
    stops = set(stopwords or ())
    if not is_case_sensitive:
        stops = {s.lower() for s in stops}
    kept = [s for s in x.ravel() if (s if is_case_sensitive else s.lower()) not in stops]
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(case_change_action, str)
    texts = np.array([change(s) for s in kept] or [""], dtype=object)
    return texts.reshape(1, -1) if x.ndim == 2 else texts


@operator("TfIdfVectorizer", 9, interpreted="n-grams are looked up one by one")
def tf_idf_vectorizer(
    x: object,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: list[int],
    ngram_indexes: list[int],
    pool_int64s: list[int] | None = None,
    pool_strings: list[str] | None = None,
    weights: list[float] | None = None,
    context: Context,
) -> torch.Tensor:
    """How often each listed n-gram stands in each row, counted with gaps of up to `max_skip_count`."""
    pool: list = pool_strings if pool_strings is not None else pool_int64s or []
    grams: dict[tuple, int] = {}
    for i, start in enumerate(ngram_counts):
        end = ngram_counts[i + 1] if i + 1 < len(ngram_counts) else len(pool)
        for place in range(start, end, i + 1):
            grams[tuple(pool[place : place + i + 1])] = len(grams)
    array = np.asarray(x)
    rows = array.reshape(1, -1) if array.ndim < 2 else array
    counts = np.zeros(allowed((len(rows), max(ngram_indexes, default=-1) + 1), 4, context), dtype=np.float32)
    for r, row in enumerate(rows.tolist()):
        for length in range(min_gram_length, min(max_gram_length, len(row)) + 1):
            for skip in range(1, (min(max_skip_count, len(row)) if length > 1 else 0) + 2):
                for start in range(len(row) - (length - 1) * skip):
                    gram = tuple(row[start + j * skip] for j in range(length))
                    if gram in grams:
                        counts[r, ngram_indexes[grams[gram]]] += 1
    factor = np.ones(counts.shape[1], dtype=np.float32)
    for place, weight in zip(ngram_indexes, weights or [], strict=False):
        factor[place] = weight
    if mode == "IDF":
        counts = (counts > 0) * factor
    elif mode == "TFIDF":
        counts = counts * factor
    return torch.from_numpy((counts[0] if array.ndim < 2 else counts).astype(np.float32))
