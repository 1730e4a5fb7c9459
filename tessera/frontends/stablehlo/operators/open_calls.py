"""Operations over open sizes that StableHLO has no operation for: JAX writes them as `custom_call`s.

What is an attribute otherwise comes as an operand, a vector of sizes; the body is a function of the module. Each
becomes the operation of its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tessera.frontends.stablehlo.module import Block, Tensor
from tessera.frontends.stablehlo.operators.chlo import largest
from tessera.frontends.stablehlo.operators.compare import total_order
from tessera.frontends.stablehlo.operators.random import rng_bit_generator
from tessera.frontends.stablehlo.operators.windows import reduce_window
from tessera.frontends.stablehlo.registry import NoMeaningError, Site, custom_call
from tessera.frontends.stablehlo.values import Value, integers, tensor_of
from tessera.util.errors import InputError


def _like(site: Site, attributes: Mapping[str, object], regions: Sequence[Block] = ()) -> Site:
    merged = {**site.operation.attributes, **attributes}
    return replace(site, operation=replace(site.operation, attributes=merged, regions=tuple(regions)))


def _body(site: Site) -> Block:
    names = site["called_computations"]
    if not isinstance(names, (list, tuple)) or len(names) != 1 or not isinstance(names[0], str):
        raise NoMeaningError(f"custom_call at {site.operation.line}: expected one called computation, got {names!r}")
    return site.machine.function(names[0])


@custom_call("stablehlo.dynamic_reduce_window")
def dynamic_reduce_window(site: Site, *operands: Value) -> list[Value]:
    if len(operands) < 7 or len(operands) % 2 == 0:
        line = site.operation.line
        raise InputError(f"dynamic_reduce_window at {line}: expected images, initial values and 5 vectors of sizes")
    sizes = [integers(x, "a window") for x in operands[-5:]]
    names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
    pairs = list(zip(sizes[4][::2], sizes[4][1::2], strict=True))
    written = {**dict(zip(names, sizes[:4], strict=True)), "padding": pairs}
    return reduce_window(_like(site, written, [_body(site)]), *operands[:-5])


@custom_call("stablehlo.dynamic_top_k")
def dynamic_top_k(site: Site, x: Value, k: Value) -> list[Value]:
    (count,) = integers(k, "how many are the largest")
    return list(largest(tensor_of(x, site.device), count, site.operand(0).element.floating))


@custom_call("stablehlo.dynamic_rng_bit_generator")
def dynamic_rng_bit_generator(site: Site, state: Value, shape: Value) -> list[Value]:
    sizes = tuple(integers(shape, "the shape of random numbers"))
    results = [site.result_at(0), Tensor(sizes, site.result_at(1).element)]
    return list(rng_bit_generator(site.with_types([site.operand(0)], results), tensor_of(state, site.device)))


@custom_call("ApproxTopK", "stablehlo.dynamic_approx_top_k")
def approximate_top_k(site: Site, x: Value, _: Value, *rest: Value) -> list[Value]:
    """The exact ones are among the answers that it allows."""
    how = site["mhlo.backend_config"]
    if not isinstance(how, dict) or "reduction_dim" not in how or not ("top_k" in how or len(rest) > 2):
        line = site.operation.line
        raise InputError(f"ApproxTopK at {line}: expected reduction_dim and how many are the largest, got {how!r:.80}")
    if not how.get("aggregate_to_topk", True):
        raise NoMeaningError(
            f"ApproxTopK at {site.operation.line}: candidates that are not aggregated have no meaning here"
        )
    k = how["top_k"] if "top_k" in how else integers(rest[2], "how many are the largest")[0]
    tensor, dim, floating = tensor_of(x, site.device), how["reduction_dim"], site.operand(0).element.floating
    compared = [o.attributes.get("comparison_direction") for o in _body(site).operations if "compare" in o.name]
    keys = total_order(tensor) if floating else tensor
    order = torch.argsort(keys, dim=dim, descending="GT" in compared, stable=True)
    order = order.narrow(dim, 0, k)
    return [torch.gather(tensor, dim, order), order.to(torch.int32)]
