"""Weights: tensors that programs share, as a safetensors member that is mapped, not read.

In: tensors by name. Out: a member, or a file beside the artifact (`beside.py`), that any safetensors reader reads, in
which every tensor begins at a multiple of 64 bytes; what is between two is listed too, as bytes called `_padding.N`,
since the format knows no gaps. A tensor with strides of its own is stored as the memory it lies in, and `views` in the
manifest says how it is seen. Read again, the tensors lie in the file's pages: processes share them until one writes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch

from tessera.artifact.text import read_json
from tessera.ir.equation import Value
from tessera.ir.strides import resolved
from tessera.ir.types import TensorType
from tessera.util.errors import ArtifactError, OptionError
from tessera.util.safetensors import CODES, NOTES, Unfit, head, place, row, split

ALIGN, DATA_ALIGN = 64, 4096
MOST_HEADER, MOST_TENSORS, MOST_ELEMENTS = 16 << 20, 65_536, 1 << 48
PADDING = "_padding."


@dataclass
class Shelf:
    """Tensors on their way into a file, each once, by a name of its own."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[tuple, str] = field(default_factory=dict)
    _spans: dict[str, tuple[torch.device, int, int]] = field(default_factory=dict)  # where they lie in the model

    def put(self, name: str, x: torch.Tensor) -> str:
        """The name under which this tensor is kept; one that is there already keeps its first."""
        if type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or x.layout is not torch.strided:
            raise OptionError(f"{name}: an artifact holds plain tensors, got {type(x).__name__} ({x.layout})")
        x = x.detach()
        seen = x.dtype, x.shape, x.stride(), x.device, x.is_conj(), x.is_neg()
        key = (x.data_ptr(), *seen) if x.numel() else (name,)
        if key not in self._names:
            base, count = name, 1
            while name in self.tensors:
                name, count = f"{base}.{count}", count + 1
            self.tensors[name], self._names[key] = resolved(x), name
            self._spans[name] = x.device, x.data_ptr(), x.data_ptr() + _extent(x) * x.element_size()
        return self._names[key]

    def meets(self, name: str) -> str | None:
        """Another tensor with elements in the same memory. A file keeps them apart."""
        device, begin, end = self._spans[name]
        for other, (where, first, last) in self._spans.items():
            if other != name and where == device and first < end and begin < last:
                return other
        return None

    def only(self, names: Collection[str]) -> Shelf:
        return Shelf({name: x for name, x in self.tensors.items() if name in names})

    def views(self) -> dict[str, list]:
        """How tensors are seen that do not lie row by row, or whose dtype the format does not know."""
        strange = {name: x for name, x in self.tensors.items() if not x.is_contiguous() or x.dtype not in CODES}
        return {n: [_name(x.dtype), list(x.shape), list(x.stride())] for n, x in strange.items()}

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the member."""
        header, at, paddings = dict[str, dict](), 0, 0
        order = []
        for name, x in self.tensors.items():
            code, shape, size = stored_as(x)
            header[name] = row(code, shape, at, size)
            order.append((name, size))
            at += size
            if gap := -at % ALIGN:
                header[f"{PADDING}{paddings}"] = row("U8", [gap], at, gap)
                order.append(("", gap))
                at, paddings = at + gap, paddings + 1
        yield head(header, DATA_ALIGN)
        for name, size in order:
            yield bytes(size) if not name else memory_of(self.tensors[name])


def check_type(v: Value, x: torch.Tensor, where: str) -> None:
    """A tensor of the file is what the program takes it for. Kernels go by the program's word."""
    t = v.type
    if not isinstance(t, TensorType) or t.is_symbolic or (x.dtype, tuple(x.shape)) != (t.dtype, tuple(t.shape)):
        raise ArtifactError(f"{where}: expected {v.name[:40]} as {t}, got {x.dtype} {list(x.shape)}")


def stored_as(x: torch.Tensor) -> tuple[str, list[int], int]:
    """The dtype and shape that a header says of a tensor, and its bytes."""
    if x.is_contiguous() and x.dtype in CODES:
        return CODES[x.dtype], list(x.shape), x.numel() * x.element_size()
    size = _extent(x) * x.element_size()
    return "U8", [size], size


def _extent(x: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not x.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def memory_of(x: torch.Tensor) -> memoryview:
    """The bytes that a tensor lies in."""
    flat = x.as_strided((_extent(x),), (1,)).cpu()
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]


def tensors_in(
    data: memoryview, views: object, where: str, wanted: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, in its own pages; those that are `wanted`, where it says so. Every number of
    the header is checked."""
    try:
        text, body = split(data, MOST_HEADER)
    except Unfit as error:
        raise ArtifactError(f"{where}: {error}") from None
    header = read_json(text, f"{where}: header")
    if not isinstance(header, dict) or len(header) > MOST_TENSORS or not isinstance(views, dict):
        raise ArtifactError(f"{where}: expected a table of tensors")
    tensors, spans = {}, []
    for key, told in header.items():
        if key == NOTES:
            continue
        try:
            dtype, shape, begin, end = place(told, len(body))
        except Unfit as error:
            raise ArtifactError(f"{where}: {key[:80]}: {error}") from None
        spans.append((begin, end))
        if key in wanted if wanted is not None else not key.startswith(PADDING):
            tensors[key] = _seen(body[begin:end], dtype, shape, views.get(key), f"{where}: {key[:80]}")
    spans.sort()
    if any(b[0] < a[1] for a, b in zip(spans, spans[1:], strict=False)):
        raise ArtifactError(f"{where}: expected tensors that do not overlap")
    if wanted is not None and (missing := sorted(set(wanted) - set(tensors))):
        raise ArtifactError(f"{where}: expected the tensor {missing[0][:80]!r}, which is not in it")
    return tensors


def _seen(data: memoryview, dtype: torch.dtype, shape: list[int], view: object, where: str) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    if view is None:
        return flat.view(shape)
    match view:
        case [str(name), list(sizes), list(strides)] if len(sizes) == len(strides) <= 64:
            kind = getattr(torch, name, None)
            numbers = all(type(n) is int and 0 <= n < 1 << 40 for n in (*sizes, *strides))
            if isinstance(kind, torch.dtype) and numbers and dtype is torch.uint8 and len(data) % kind.itemsize == 0:
                empty = 0 in sizes
                extent = 0 if empty else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
                if extent * kind.itemsize == len(data) and math.prod(sizes) <= MOST_ELEMENTS:
                    memory = flat.view(kind) if len(data) else torch.empty(0, dtype=kind)
                    return memory.as_strided(sizes, strides)
    raise ArtifactError(f"{where}: expected a view that fits {len(data)} bytes, got {str(view)[:120]}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
