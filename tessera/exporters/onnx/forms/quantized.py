"""Linear layers whose weights are stored in fewer bits: DequantizeLinear, then a product.

A file holds the stored numbers and their scales, with one row for each input of the layer. Runtimes join the two
operators, and read the weights as they are stored.
"""

from __future__ import annotations

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form
from tessera.frontends.onnx.elements import INT4
from tessera.ops.quantized import BITS, GROUP, unpacked

NAME = "tessera.quantized_linear"


def layer(g: Graph, x: Ref, wide: Ref, bias: Ref | None) -> Ref:
    """The product with a weight `(k, n)` that was widened, in single precision first."""
    out = g.op("MatMul", x, g.cast(wide, x.dtype))
    return out if bias is None else g.op("Add", out, bias)


def stored_integers(g: Graph, weight: Ref, scale: Ref, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a weight that the file holds: whole numbers `(n, k)`, and scales `(n, k / GROUP)`."""
    packed, scales = held(g, weight), held(g, scale)
    return unpacked(packed, BITS[kind])[: len(scales)].to(torch.int8), scales.float()


def held(g: Graph, x: Ref) -> torch.Tensor:
    data = g.initializers.get(x.name)
    need(isinstance(data, torch.Tensor))
    assert isinstance(data, torch.Tensor)
    return data.detach().cpu()


@form(NAME, since=21)
def in_blocks(g: Graph, x: Ref, weight: Ref, scale: Ref, bias: Ref | None, kind: str) -> Ref:
    """Since opset 21 a scale may stand for a block, and there are integers of four bits."""
    need(kind in BITS)

    def numbers() -> Ref:
        whole = stored_integers(g, weight, scale, kind)[0].t()
        return g.narrow(whole, INT4, f"{weight.name}.T") if kind == "int4" else g.tensor(whole, f"{weight.name}.T")

    stored = g.once(("stored", weight.name), numbers)
    scales = g.once(("scales", scale.name), lambda: g.tensor(held(g, scale).float().t(), f"{scale.name}.T"))
    wide = g.op(
        "DequantizeLinear", stored, scales, axis=0, block_size=GROUP, dtype=torch.float32, shape=stored.shape
    )  # fmt: skip
    return layer(g, x, wide, bias)


@form(NAME)
def in_rows(g: Graph, x: Ref, weight: Ref, scale: Ref, bias: Ref | None, kind: str) -> Ref:
    """Before that a scale stands for a row: each group is one."""
    need(kind in BITS)

    def numbers() -> Ref:
        return g.tensor(stored_integers(g, weight, scale, kind)[0].reshape(-1, GROUP), f"{weight.name}.groups")

    stored = g.once(("stored", weight.name), numbers)
    scales = g.once(
        ("scales", scale.name), lambda: g.tensor(held(g, scale).float().reshape(-1), f"{scale.name}.groups")
    )
    rows = g.op("DequantizeLinear", stored, scales, axis=0, dtype=torch.float32, shape=stored.shape)
    n, groups = scale.sizes
    wide = g.permute(g.reshape(rows, [n, groups * GROUP]), [1, 0])
    return layer(g, x, wide, bias)


@form(NAME, since=19)
def in_floats(g: Graph, x: Ref, weight: Ref, scale: Ref, bias: Ref | None, kind: str) -> Ref:
    """Floats of eight bits, with a scale for each output of the layer."""
    need(kind == "fp8")
    stored = g.once(("stored", weight.name), lambda: g.tensor(held(g, weight).t(), f"{weight.name}.T"))
    scales = g.once(("scales", scale.name), lambda: g.tensor(held(g, scale).float(), scale.name))
    wide = g.op("DequantizeLinear", stored, scales, axis=1, dtype=torch.float32, shape=stored.shape)
    return layer(g, x, wide, bias)


@form(NAME)
def widened(g: Graph, x: Ref, weight: Ref, scale: Ref, bias: Ref | None, kind: str) -> Ref:
    """Before opset 19 there are no such floats: the file holds the weight in single precision."""
    need(kind == "fp8")

    def full() -> Ref:
        return g.tensor((held(g, weight).float() * held(g, scale).float()[:, None]).t(), f"{weight.name}.T")

    return layer(g, x, g.once(("stored", weight.name), full), bias)
