"""Every kernel of PyTorch that its samples reach, beside the rule that tells the type of what it gives.

A case is an operator of the OpInfo database; while it runs forward and backward, over several layouts, each kernel that
PyTorch calls is compared with `ir/fake.py`'s answer for the same arguments: dtype, shape, device, and strides unless
nobody promises them (`ir/layouts.py`). Nothing is compiled, so this reaches thousands of kernels in a minute.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tessera.ir import fake
from tessera.ir.layouts import is_unpromised, may_be_random_state
from tessera.ir.schema import schema_of
from tessera.ir.types import type_of
from tessera.tools.battery.case import Case, Part, Wrong
from tessera.tools.battery.compare import leaves, tensors
from tessera.tools.battery.operators import COTANGENTS, database, strided
from tessera.torch_internals import pytree
from tessera.torch_internals.dispatch import TorchDispatchMode
from tessera.torch_internals.fake import FakeTensorMode
from tessera.torch_internals.operators import OpOverload

MANY = 5  # samples of an operator


class Watch(TorchDispatchMode):
    """Compares whatever is called inside with its rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.seen: set[object] = set()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        key = (func, *map(_key, pytree.tree_leaves((args, kwargs))))
        if key in self.seen or schema_of(func).mutated or func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        self.seen.add(key)
        told = promised(func, args, kwargs, self.mode)
        out = func(*args, **kwargs)
        if told is not None and (difference := differs(func, told, out)):
            self.found.setdefault(str(func), difference)
        return out


def _key(x: object) -> object:
    if isinstance(x, Tensor):
        return (x.dtype, tuple(x.shape), x.stride() if x.layout is torch.strided else None)
    return x if x is None or isinstance(x, (bool, int, float, str, torch.dtype)) else type(x)


def promised(func: OpOverload, args: tuple, kwargs: dict, mode: FakeTensorMode) -> list[object] | None:
    """What the rule says; None where there is no rule, or the answer lies in the data."""
    try:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: fake.fake_of(type_of(t), mode), (args, kwargs))
        with mode, fake.below_autograd():
            return leaves(fake.rule_of(func)(*args, **kwargs))
    except Exception:  # whatever the reason is: a trace of this operator is refused in the same way
        return None


def differs(func: OpOverload, told: list[object], out: object) -> str:
    given = leaves(out)
    if len(told) != len(given):
        return f"{len(told)} results, really {len(given)}"
    for a, b in zip(told, given, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        if not may_be_random_state(b) and a.device.type != b.device.type:
            return f"on {a.device}, really on {b.device}"
        if (a.dtype, a.layout) != (b.dtype, b.layout):
            return f"{a.dtype} {a.layout}, really {b.dtype} {b.layout}"
        if any(isinstance(n, torch.SymInt) for n in a.shape) or b.layout is not torch.strided:
            continue
        if a.shape != b.shape:
            return f"{list(a.shape)}, really {list(b.shape)}"
        if not is_unpromised(func) and strides_differ(a, b):
            return f"strides {a.stride()}, really {b.stride()} of {tuple(b.shape)}"
    return ""


def strides_differ(a: Tensor, b: Tensor) -> bool:
    """Where they tell one element from another."""
    return b.numel() > 0 and any(p != q for p, q, n in zip(a.stride(), b.stride(), b.shape, strict=True) if n > 1)


# --- cases ---


def _channels_last(t: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=formats[t.ndim]) if t.ndim in formats else t


def _turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.ndim > 1 else t


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "strided": strided,
    "turned": _turned,
    "channels last": _channels_last,
}


def cases(device: str) -> list[Case]:
    return [Case("kernels", name, 4.0) for name in database()]


def parts(case: str, device: str) -> Iterator[Part]:
    op = database()[case]
    have = op.supported_dtypes(device)
    for name in ("float32", "bfloat16", "int64"):
        dtype = getattr(torch, name)
        if dtype in have and not (name == "int64" and torch.float32 in have):
            yield name, lambda dtype=dtype: sweep(op, device, dtype)


def sweep(op: object, device: str, dtype: torch.dtype) -> None:
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(device)  # type: ignore[attr-defined]
    torch.manual_seed(0)
    drawn = list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=differentiable), 5 * MANY))  # type: ignore[attr-defined]
    watch = Watch()
    for sample in drawn[:: max(1, len(drawn) // MANY)]:
        for lay in LAYOUTS.values():
            try:
                one(op, sample.transform(lambda x, lay=lay: _laid(x, lay)), watch, differentiable)
            except Exception:  # eager refuses this layout, or has no derivative there
                continue
    if watch.found:
        raise Wrong("; ".join(f"{name}: {what}" for name, what in sorted(watch.found.items())))


def _laid(x: object, lay: Callable[[Tensor], Tensor]) -> object:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.numel() < 2:
        return x
    copy = lay(x.detach())
    return copy.requires_grad_() if x.requires_grad else copy


def one(op: object, sample: object, watch: Watch, differentiable: bool) -> None:
    with watch:
        out = op.op(sample.input, *sample.args, **sample.kwargs)  # type: ignore[attr-defined]
        roots = [t for t in tensors(sample.output_process_fn_grad(out)) if t.requires_grad] if differentiable else []  # type: ignore[attr-defined]
        wanted = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]  # type: ignore[attr-defined]
        for lay in COTANGENTS.values():
            if roots and wanted:
                given = [lay(torch.randn_like(t)) for t in roots]
                torch.autograd.grad(roots, wanted, given, allow_unused=True, retain_graph=True)
