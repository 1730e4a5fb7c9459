"""CUDA kernels for the operators of `ops/rows`, in Triton: reading weights and caches once, at full bandwidth.

In: the operators' tensors on a GPU. Out: their results, in memory of their own, on the current stream. A row block of
weights belongs to one program, which reads it along its rows in 16-byte pieces; one row of x is multiplied without
matrix units, up to sixteen with them; packed weights always with them. Attention writes the new row of its cache; a
long cache is split, and a second kernel combines the parts. `register` makes these the operators' CUDA implementation;
without Triton they stay with PyTorch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os

import torch
from torch import Tensor

from tessera.ops.rows import BITS as _BITS
from tessera.ops.rows import GROUP, TALL, library, quantized_linear

MOST_ROWS = 16
UNITS = 132  # multiprocessors to keep busy; a count that is off costs little
_GATE = {"": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}


@functools.cache
def available() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs(device: torch.device) -> bool:
    """There are kernels for this device."""
    return device.type == "cuda" and available()


@functools.cache
def _kernels():  # noqa: ANN202
    from tessera.runtime import decode_kernels  # Triton is wanted only where a kernel is launched

    return decode_kernels


@functools.cache
def _attending():  # noqa: ANN202
    from tessera.runtime import decode_attend

    return decode_attend


def rows_linear(
    x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    biases: list[Tensor],
    norm: Tensor | None,
    eps: float,
    shift: float,
    residual: Tensor | None,
    gate: str,
    kind: str,
) -> list[Tensor]:
    k = x.shape[-1]
    rows = x.numel() // k
    x = x.contiguous()
    sizes = [t.shape[0] for t in scales or weights]
    own = sizes[:1] if gate else sizes
    made = [x.new_empty((*x.shape[:-1], n)) for n in own]

    def nth(tensors: list[Tensor], i: int) -> Tensor:
        return tensors[i] if i < len(tensors) else tensors[0] if tensors else x

    given = (
        x,
        x if norm is None else norm,
        x if residual is None else residual.contiguous(),
        *(nth(group, i) for group in (weights, scales, biases, made) for i in range(3)),
        *(sizes[i] if i < len(sizes) else 0 for i in range(3)),
    )
    common = {"NORM": norm is not None, "RESIDUAL": residual is not None, "BIAS": bool(biases), "GATE": _GATE[gate]}
    bits = _BITS.get(kind, 0)
    common |= early()
    if bits:
        _packed(given, own, rows, k, (eps, shift), bits, common)
        return made
    common |= {"SCALED": kind == "fp8"}
    if rows > 1:
        _several_rows(given, own, rows, k, (eps, shift), common)
        return made
    block, depth = plan(k, sum(sizes), bool(gate))
    *ends, programs = _ends([math.ceil(n / block) for n in own])
    shape = {"BLOCK": block, "DEPTH": depth, "num_warps": 4, "num_stages": 1}
    _kernels().one_row[(programs,)](*given, *ends, k, eps, shift, **shape, **common)
    return made


def _packed(
    given: tuple, sizes: list[int], rows: int, k: int, norm: tuple, bits: int, common: dict[str, object]
) -> None:
    from tessera.runtime.decode_packed import packed_rows  # Triton is wanted only where a kernel is launched

    columns = 1 << (rows - 1).bit_length()
    step, warps, tiles, registers = packed_plan(columns, k, sum(sizes), bool(common["GATE"]), bits)
    tall = tiles * TALL // (2 if common["GATE"] else 1)
    *ends, programs = _ends([math.ceil(n / tall) for n in sizes])
    even = k % (step * GROUP) == 0 and all(n % tall == 0 for n in sizes)
    shape = {"BITS": bits, "GROUP": GROUP, "STEP": step, "TILES": tiles, "MORE": k > step * GROUP, "EVEN": even}
    shape |= {"ROWS": columns, "ASM": assembly()}
    how = {"num_warps": warps, "num_stages": 1, "maxnreg": registers}
    packed_rows[(programs,)](*given, *ends, rows, k, *norm, **shape, **common, **how)


def _several_rows(given: tuple, sizes: list[int], rows: int, k: int, norm: tuple, common: dict[str, object]) -> None:
    from tessera.runtime.decode_rows import few_rows  # Triton is wanted only where a kernel is launched

    block, depth, split, registers = rows_plan(k, sum(sizes), bool(common["GATE"]))
    *ends, programs = _ends([math.ceil(n / block) for n in sizes])
    shape = {"ROWS": 8 if rows <= 8 else 16, "BLOCK": block, "DEPTH": depth, "SPLIT": split}
    shape["EVEN"] = k % (depth * split) == 0
    few_rows[(programs,)](
        *given, *ends, rows, k, *norm, **shape, **common, num_warps=split, num_stages=1, maxnreg=registers
    )


def rows_plan(k: int, outputs: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows of weights a program, columns a warp and step, warps, registers a thread: what was fastest on an H200.

    Few outputs make few programs: each asks for much at once. Many make several a multiprocessor, and small ones are
    more. With a limit on registers ptxas puts loads together; left alone it makes each wait for the one before it.
    """
    if gated or outputs >= 8192:
        return 16 if gated else 32, 64, 4, 128
    split = 4 if k <= 2048 else 8
    return 16, next((depth for depth in (512, 256, 128) if k % (depth * split) == 0), 64), split, 255


def _ends(counts: list[int]) -> list[int]:
    """Where the programs of the first and the second weight end, and where all do."""
    total = sum(counts)
    return [counts[0] if len(counts) > 1 else total, sum(counts[:2]) if len(counts) > 2 else total, total]


def assembly() -> bool:
    """Kernels may have assembly in them: Triton's interpreter knows none."""
    return os.environ.get("TRITON_INTERPRET") != "1"


def packed_plan(rows: int, k: int, outputs: int, gated: bool, bits: int) -> tuple[int, int, int, int | None]:
    """Groups of packed weights a program reads at once, its warps, tiles of sixteen rows, registers: what was fastest
    on an H200 for one row and int4. The more outputs, the more of them share what a program does to x."""
    step = min(1 << (k // GROUP - 1).bit_length(), 16 if rows > 1 else 32 if gated or k > 64 * GROUP else 64)
    if rows > 1 or (outputs < 3072 and not gated):
        return step, min(step, 16), 2 if gated else 1, None
    warps = min(max(step // 2, 1), 16)
    room = 64 // (step // warps * bits * 2)  # tiles whose weights are in 64 registers
    tiles = max(min(4 if gated or outputs >= 16384 else 2, room), 2 if gated else 1)
    return step, warps, tiles, 128 if tiles == 4 else None


def plan(k: int, outputs: int, gated: bool) -> tuple[int, int]:
    """Rows of weights a program and columns a step, for one row of x: what was fastest on an H200."""
    block = 8 if gated else 4 if outputs >= 3072 or k > 4096 else 2
    return block, min(1024 if k <= 4096 else 2048, 1 << (k - 1).bit_length())


@functools.cache
def early() -> dict[str, bool]:
    """A kernel may begin while the one before it ends, where the chip can: it waits before it reads anything new."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


def angles(cosine: Tensor | None, sine: Tensor | None, head: int, other: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Both as rows, and how far apart those of two sequences stand; something else where there are none."""
    if cosine is None or sine is None:
        return other, other, 0, 0
    cosine, sine = cosine.reshape(-1, head), sine.reshape(-1, head)
    return cosine, sine, _apart(cosine), _apart(sine)


def _apart(rows: Tensor) -> int:
    return rows.stride(0) if rows.shape[0] > 1 else 0


def cache_write(
    cache: Tensor,
    new: Tensor,
    positions: Tensor,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
) -> None:
    batch, heads, _, head = cache.shape
    new = new.reshape(batch, heads, head)
    cosine, sine, cosines, sines = angles(cosine, sine, head, new)
    _attending().write[(batch * heads,)](
        cache,
        new,
        positions,
        new if norm is None else norm,
        cosine,
        sine,
        heads,
        *cache.stride()[:3],
        *new.stride()[:2],
        cosines,
        sines,
        eps,
        shift,
        HEAD=head,
        HALF=head // 2,
        NORM=norm is not None,
        TURN=cosine is not new,
        num_warps=1,
        **early(),
    )


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
    scale: float,
) -> Tensor:
    return _attention(q, k, v, None, positions, positions is not None, mask, (norm, eps, shift, cosine, sine), scale)


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    positions: Tensor,
    limited: bool,
    mask: Tensor | None,
    norm: Tensor | None,
    eps: float,
    shift: float,
    cosine: Tensor | None,
    sine: Tensor | None,
    key_norm: Tensor | None,
    key_eps: float,
    key_shift: float,
    key_cosine: Tensor | None,
    key_sine: Tensor | None,
    scale: float,
) -> Tensor:
    new = (new_k, new_v, key_norm, key_eps, key_shift, key_cosine, key_sine)
    return _attention(q, k, v, new, positions, limited, mask, (norm, eps, shift, cosine, sine), scale)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    new: tuple | None,
    positions: Tensor | None,
    limited: bool,
    mask: Tensor | None,
    how: tuple,
    scale: float,
) -> Tensor:
    """Over a cache, into which `new` goes first: keys, values, and how the keys are normalised and turned."""
    batch, groups, length, head = k.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q = q.reshape(batch, -1, head)
    heads = q.shape[1]
    norm, eps, shift, *turn = how
    cosine, sine, cosines, sines = angles(*turn, head, q)
    new_k, new_v, key_norm, key_eps, key_shift, *key_turn = (q, q, None, 0.0, 0.0, None, None) if new is None else new
    new_k, new_v = (x.reshape(batch, -1, head) for x in (new_k, new_v))
    key_cosine, key_sine, key_cosines, key_sines = angles(*key_turn, head, q)
    split, step, registers, parts = attention_plan(batch * groups, length, head)
    span = math.ceil(math.ceil(length / parts) / (split * step)) * split * step
    parts = math.ceil(length / span)
    sums = torch.empty((batch * heads, parts, head) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    tops = torch.empty((2, batch * heads, parts) if parts > 1 else (1,), dtype=torch.float32, device=q.device)
    shown = None if mask is None else mask.expand(batch, heads, 1, length)
    kernels = _attending()
    kernels.attend[(batch * groups, parts)](
        q,
        k,
        v,
        new_k,
        new_v,
        q if positions is None else positions,
        q if shown is None else shown,
        q if norm is None else norm,
        cosine,
        sine,
        q if key_norm is None else key_norm,
        key_cosine,
        key_sine,
        sums,
        tops,
        out,
        heads,
        groups,
        length,
        span,
        scale,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *new_k.stride()[:2],
        *new_v.stride()[:2],
        *((0, 0, 0) if shown is None else (shown.stride(0), shown.stride(1), shown.stride(3))),
        cosines,
        sines,
        key_cosines,
        key_sines,
        eps,
        shift,
        key_eps,
        key_shift,
        parts,
        HEAD=head,
        SHARE=max(1 << (heads // groups - 1).bit_length(), 8),
        STEP=step,
        SPLIT=split,
        LIMIT=limited,
        MASK=0 if shown is None else 1 if shown.dtype == torch.bool else 2,
        WRITE=new is not None,
        NORM=norm is not None,
        TURN=cosine is not q,
        KEY_NORM=key_norm is not None,
        KEY_TURN=key_cosine is not q,
        ONE=parts == 1,
        num_warps=split,
        num_stages=1,
        maxnreg=registers,
        **early(),
    )
    if parts > 1:
        shape = {"HEAD": head, "PARTS": 1 << (parts - 1).bit_length()}
        kernels.combine[(batch * heads,)](sums, tops, out, batch * heads, parts, **shape, num_warps=2, **early())
    return out


def attention_plan(groups: int, length: int, head: int) -> tuple[int, int, int, int]:
    """Warps, keys a warp and step, registers, parts of the cache: what was fastest on an H200."""
    split, step = 4, max(min(2048 // head, 32), 16)
    each = (3 if groups > UNITS // 4 else 2) * UNITS // max(groups, 1)  # three programs have room on a multiprocessor
    return split, step, 168, max(min(math.ceil(length / (split * step)), each, 64), 1)


def quantized(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if x.numel() // x.shape[-1] <= MOST_ROWS and x.dtype in (torch.bfloat16, torch.float16):
        return rows_linear(x, [weight], [scale], [] if bias is None else [bias], None, 0.0, 0.0, None, "", kind)[0]
    return quantized_linear(x, weight, scale, bias, kind)


def register() -> None:
    """Make the kernels the CUDA implementation of their operators."""
    if available():
        for name, fn in (
            ("rows_linear", rows_linear),
            ("cache_write", cache_write),
            ("decode_attention", decode_attention),
            ("cached_attention", cached_attention),
            ("quantized_linear", quantized),
        ):
            library.impl(name, fn, "CUDA")


register()
