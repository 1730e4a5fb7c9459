"""Linear layers over few rows as `rows_linear`.

Those that read the same value stand together, with the rms norm before them, the gate or the residual after them, as
far as nothing else wants what is between. What stands together needs weights that are there from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.executors.rows.patterns.match import Pattern, pairs
from tessera.ir.equation import Equation, Value
from tessera.ir.schema import bind
from tessera.ops.rows import limits

tessera = torch.ops.tessera


@dataclass(frozen=True)
class Layer:
    """A linear layer of the program, its weight plain or in fewer bits."""

    eqn: Equation
    x: Value
    weight: Value
    scale: Value | None
    bias: Value | None
    kind: str

    @staticmethod
    def of(eqn: Equation) -> Layer | None:
        if eqn.opname not in ("linear", "quantized_linear"):
            return None
        args, _ = bind(eqn.op, eqn.args, eqn.kwargs)  # type: ignore[arg-type]
        x, weight, *scale, bias, kind = args if eqn.opname == "quantized_linear" else (*args, "")
        return Layer(eqn, x, weight, scale[0] if scale else None, bias, kind)

    @property
    def taken(self) -> bool:
        bias = None if self.bias is None else self.bias.tensor
        return limits.linear(self.x.tensor, self.weight.tensor, bias, bool(self.kind))

    @property
    def held(self) -> list[Value]:
        return [v for v in (self.weight, self.scale, self.bias) if v is not None]


class Linears(Pattern):
    def find(self) -> None:
        together: dict[object, list[Layer]] = {}
        for eqn in self.trace.equations:
            layer = Layer.of(eqn)
            if layer is not None and layer.taken:
                computed = any(v in self.makers for v in layer.held)
                key = eqn if computed else (layer.x, layer.kind, layer.bias is None)
                together.setdefault(key, []).append(layer)
        for layers in together.values():
            if not self.gated(layers):
                for start in range(0, len(layers), limits.WEIGHTS):
                    self.side_by_side(layers[start : start + limits.WEIGHTS])

    def replace(
        self, at: Equation, layers: list[Layer], outs: list[Value], residual: Value | None = None, gate: str = ""
    ) -> None:
        """Layers that read the same, at the place of one equation."""
        x = layers[0].x
        norm = self.norm(x) if self.only(x, *(layer.eqn for layer in layers)) else None
        source, weight, eps, shift = norm or (x, None, 0.0, 0.0)
        weights = [layer.weight for layer in layers]
        scales = [layer.scale for layer in layers if layer.scale is not None]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        args = (source, weights, scales, biases, weight, eps, shift, residual, gate, layers[0].kind)
        self.replaced[at] = lambda: self.emit(tessera.rows_linear.default, args, outs)

    def gated(self, layers: list[Layer]) -> bool:
        """`silu(gate(x)) * up(x)` as one."""
        if len(layers) != 2:
            return False
        for gate, up in (layers, layers[::-1]):
            activation = self.reader(gate.eqn.out)
            name = gate_of(activation)
            product = self.reader(activation.out) if activation is not None and name else None
            if product is None or product.opname != "mul" or self.reader(up.eqn.out) is not product:
                continue
            inside = {activation.out, up.eqn.out} == set(product.inputs())  # type: ignore[union-attr]
            if inside and gate.eqn.out.shape == up.eqn.out.shape and product.out.dtype == gate.x.dtype:
                self.replace(product, [gate, up], [product.out], gate=name)
                return True
        return False

    def side_by_side(self, layers: list[Layer]) -> None:
        after = self.added(layers[0].eqn) if len(layers) == 1 else None
        if after is not None:
            total, residual = after
            self.replace(total, layers, [total.out], residual)
            return
        self.replace(layers[0].eqn, layers, [layer.eqn.out for layer in layers])
        for layer in layers[1:]:
            self.replaced[layer.eqn] = lambda: None

    def added(self, linear: Equation) -> tuple[Equation, Value] | None:
        """The residual that is added to a layer's result, and where."""
        total = self.reader(linear.out)
        if total is None or total.opname != "add":
            return None
        for result, residual in pairs(total):
            if result is linear.out and isinstance(residual, Value) and residual is not result:
                same = residual.type == linear.out.type == total.out.type
                return (total, residual) if same else None
        return None


def gate_of(eqn: Equation | None) -> str:
    """What `rows_linear` calls an activation, if it knows it."""
    if eqn is None or eqn.opname not in ("silu", "gelu"):
        return ""
    return {"none": eqn.opname, "tanh": f"{eqn.opname}_tanh"}.get(eqn.kwargs.get("approximate", "none"), "")  # type: ignore[call-overload]
