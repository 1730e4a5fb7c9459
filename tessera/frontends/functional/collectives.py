"""Collectives that write their result into a tensor, while a function is traced.

`dist.all_reduce(x)` and its kin change memory, and no operator that a trace knows says so. While a function is traced
they are functional collectives and a copy into the tensor, as under TorchDynamo; what waits for them has nothing to do.
The process group's methods are replaced, so it does not matter by which name a program has the function. Those that
this file does not know are refused by their line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.frontends.functional.trace import WATCHED, tracing
from tessera.ir.record import user_line
from tessera.torch_internals import distributed as c10d
from tessera.torch_internals import pytree
from tessera.torch_internals.fake import FakeTensor
from tessera.util.errors import CaptureError


class Ended:
    """What waits for an exchange that has ended."""

    def wait(self, *args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _done(op: Any, x: Tensor, *args: object) -> Tensor:
    return c10d.wait_tensor(op(x.contiguous(), *args))


def _how(options: Any) -> str:
    words = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    return next(word.lower() for word in words if options.reduceOp == getattr(dist.ReduceOp, word))


def _all_reduce(group: Any, tensors: list[Tensor], options: Any) -> None:
    for x in tensors:
        x.copy_(_done(c10d.all_reduce, x, _how(options), group.group_name))


def _all_gather_base(group: Any, out: Tensor, x: Tensor, options: Any) -> None:
    out.copy_(_done(c10d.all_gather_into_tensor, x, group.size(), group.group_name).view(out.shape))


def _all_gather(group: Any, outs: list[list[Tensor]], xs: list[Tensor], options: Any) -> None:
    for parts, x in zip(outs, xs, strict=True):
        joined = _done(c10d.all_gather_into_tensor, x.unsqueeze(0), group.size(), group.group_name)
        for out, part in zip(parts, joined.unbind(0), strict=True):
            out.copy_(part)


def _reduce_scatter_base(group: Any, out: Tensor, x: Tensor, options: Any) -> None:
    out.copy_(_done(c10d.reduce_scatter_tensor, x, _how(options), group.size(), group.group_name).view(out.shape))


def _reduce_scatter(group: Any, outs: list[Tensor], xs: list[list[Tensor]], options: Any) -> None:
    for out, parts in zip(outs, xs, strict=True):
        _reduce_scatter_base(group, out, torch.stack(parts), options)


def _all_to_all_base(group: Any, out: Tensor, x: Tensor, came: list, sent: list, options: Any) -> None:
    counts = [given or [y.shape[0] // group.size()] * group.size() for y, given in ((out, came), (x, sent))]
    out.copy_(_done(c10d.all_to_all_single, x, *counts, group.group_name))


def _broadcast(group: Any, tensors: list[Tensor], options: Any) -> None:
    for x in tensors:
        x.copy_(_done(c10d.broadcast, x, options.rootRank, group.group_name))


def _refuse(name: str) -> Callable:
    def refuse(*args: object) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: {name} of a process group writes into a tensor where a trace cannot see it; expected "
            "all_reduce, broadcast, all_gather, reduce_scatter or all_to_all_single"
        )

    return refuse


WRITING: dict[str, Callable] = {
    "allreduce": _all_reduce,
    "broadcast": _broadcast,
    "allgather": _all_gather,
    "_allgather_base": _all_gather_base,
    "all_gather_single": _all_gather_base,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_single": _reduce_scatter_base,
    "alltoall_base": _all_to_all_base,
    "all_to_all_single": _all_to_all_base,
}
OTHERS = (
    "reduce", "gather", "scatter", "alltoall", "send", "recv", "recv_anysource", "allreduce_coalesced",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip


def _functional(write: Callable) -> Callable[[Any], object]:
    def watched(original: Callable) -> Callable:
        def method(self: Any, *args: Any) -> object:
            fakes = any(isinstance(x, FakeTensor) for x in pytree.tree_leaves(args))
            if not fakes or not tracing():
                return original(self, *args)
            write(self, *args)
            return Ended()

        return method

    return watched


if dist.is_available():
    for _name, _write in {**WRITING, **{name: _refuse(name) for name in OTHERS}}.items():
        if hasattr(dist.ProcessGroup, _name):
            WATCHED.append((dist.ProcessGroup, _name, _functional(_write)))
