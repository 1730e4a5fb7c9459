"""`custom_call`: targets that jaxlib and XLA know, and those that users register (`tessera.stablehlo.register`)."""

from __future__ import annotations

import torch

from tessera.frontends.stablehlo.elements import Quantized
from tessera.frontends.stablehlo.module import Tensor
from tessera.frontends.stablehlo.operators import chlo
from tessera.frontends.stablehlo.registry import (
    CUSTOM_CALLS,
    TABLE,
    NoMeaningError,
    Row,
    Site,
    composite,
    custom_call,
    meaning,
)
from tessera.frontends.stablehlo.values import Sizes, Splat, Value, contents, tensor_of
from tessera.ir.types import SYMBOLIC
from tessera.torch_internals.shapes import torch_check
from tessera.util.errors import InputError


@meaning("custom_call", raw=True, storage=True, folds=False)
def run_custom_call(site: Site, *operands: Value) -> list[Value]:
    target = site["call_target_name"]
    if target not in CUSTOM_CALLS:
        raise NoMeaningError(
            f"custom_call @{target} at {site.operation.line} has no meaning here; "
            "tessera.stablehlo.register gives it one"
        )
    out = CUSTOM_CALLS[target](site, *operands)
    types = site.operation.result_types
    results = list(out) if isinstance(out, list) or (isinstance(out, tuple) and len(types) != 1) else [out]
    for x, type_ in zip(results, types, strict=False):  # how many there are is asked of every operation
        if isinstance(type_, Tensor) and not _fits(x, type_):
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise InputError(f"custom_call @{target} at {site.operation.line}: expected {type_}, got {got}")
    return results


def _fits(x: object, type_: Tensor) -> bool:
    """Whether what a user's function gave is what the program goes on with."""
    if not isinstance(x, torch.Tensor):
        return isinstance(x, (Splat, Sizes))
    sizes = zip(x.shape, type_.shape, strict=False)
    shaped = x.ndim == type_.rank and all(w is None or not isinstance(n, int) or n == w for n, w in sizes)
    return shaped and (isinstance(type_.element, Quantized) or x.dtype == type_.element.held)


@custom_call(
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement",
    "xla.sdy.FuncResultSharding", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape", "LayoutConstraint",
)  # fmt: skip
def same(site: Site, *operands: Value) -> list[Value]:
    """What they say is about places, not about numbers; the program runs in one place."""
    return list(operands)


@custom_call("shape_assertion")
def shape_assertion(site: Site, holds: Value, *sizes: Value) -> list[Value]:
    """A condition on sizes: of symbols, it becomes one of the program's own."""
    message = str(site.get("error_message", "a condition on the arguments' shapes does not hold"))
    for place, size in enumerate(sizes):
        known = contents(size)
        if known is not None and not any(isinstance(n, SYMBOLIC) for n in known.flat):
            message = message.replace(f"{{{place}}}", str(known.reshape(-1)[0]))
    known = contents(holds)
    if known is None:
        line = site.operation.line
        raise InputError(f"shape_assertion at {line}: expected a condition on sizes, got one on a tensor")
    condition = known.reshape(-1)[0]
    if isinstance(condition, SYMBOLIC):
        torch_check(condition, lambda: message)  # type: ignore[arg-type]
    elif not condition:
        raise InputError(message)
    return []


# --- functions of CHLO that come under other names: composites, and calls that older programs have ---


def _as_function(name: str, row: Row) -> None:
    def run(site: Site, *operands: Value) -> object:
        return row.run(site, *(tensor_of(x, site.device) for x in operands))

    composite(f"chlo.{name}")(run)
    custom_call(f"mhlo.{name}")(run)


for _name, _row in list(TABLE.items()):
    if _name.startswith("chlo.") and _row.elementwise:
        _as_function(_name.removeprefix("chlo."), _row)


@composite("chlo.top_k")
def top_k(site: Site, x: Value) -> list[Value]:
    tensor, k = tensor_of(x, site.device), site["composite_attributes"]["k"]
    return list(chlo.largest(tensor, k, site.operand(0).element.floating))


@custom_call("mhlo.topk")
def older_top_k(site: Site, x: Value) -> object:
    how = site["mhlo.attributes"]
    if not how.get("largest", True):
        raise NoMeaningError(f"custom_call @mhlo.topk at {site.operation.line}: the smallest have no meaning here")
    return list(chlo.largest(tensor_of(x, site.device), how["k"], site.operand(0).element.floating))
