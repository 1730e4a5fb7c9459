"""Weights in fewer bits, for inference: the linear layers of a model store int8, int4 or fp8 and their scales.

In: a model and a kind. Out: the same model, its linear layers replaced in place, and what that cost in accuracy, layer
by layer. Activations stay as they are. In a program such a layer is `tessera.quantized_linear`, one equation; over few
rows the weights are read in their stored form and widened inside the kernel (see `executors/rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.ops.quantized import GROUP, KINDS, dequantized, quantized
from tessera.util.errors import InputError, OptionError
from tessera.util.units import counted


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is stored as `kind` says."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, kind: str):
        super().__init__()
        self.kind, self.in_features, self.out_features = kind, layer.in_features, layer.out_features
        weight, scale = quantized(layer.weight, kind)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype.itemsize < 2:
            raise InputError(
                f"a layer stored as {self.kind}: expected activations of 16 bits or more, got {x.dtype}; a model that "
                "casts them to the dtype of a weight needs that layer among quantize's skip"
            )
        return torch.ops.tessera.quantized_linear(x, self.weight, self.scale, self.bias, self.kind)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """`to`, `half`, `cuda`, …: what is stored moves, and stays what it is; only the bias takes another dtype."""
        stored = self.weight, self.scale
        super()._apply(fn, recurse)
        self.weight, self.scale = (
            now if now.dtype == was.dtype else was.to(now.device)
            for was, now in zip(stored, (self.weight, self.scale), strict=True)
        )
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


@dataclass(frozen=True)
class Quantized:
    """What was stored in fewer bits: for every layer the relative error of its weight (root mean square)."""

    kind: str
    errors: dict[str, float]
    bytes_before: int
    bytes_after: int
    left: dict[str, str]  # layers that stayed, and why

    def __str__(self) -> str:
        lines = [f"{self.kind}: no linear layer was changed"]
        if self.errors:
            name, worst = max(self.errors.items(), key=lambda item: item[1])
            lines = [
                f"{self.kind}: {counted(len(self.errors), 'linear layer')}, {self.bytes_before / 2**20:.1f} MiB of "
                f"weights are {self.bytes_after / 2**20:.1f} MiB; relative error of a weight at most "
                f"{worst:.4f} ({name})"
            ]
        lines += [f"  {name} stayed as it is: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def quantize(model: nn.Module, kind: str, skip: Sequence[str] = ()) -> Quantized:
    """Store the weights of a model's linear layers as int8, int4 or fp8; `skip` names layers that stay as they are.

    The model is changed in place. int8 and int4 have a scale for every 128 weights of a row, fp8 one a row. Stored
    weights are no parameters any more; gradients still flow through the layers.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.Linear):
        what = "a linear layer itself: put it into a module" if isinstance(model, nn.Linear) else type(model).__name__
        raise OptionError(f"quantize: expected a module whose linear layers can be replaced, got {what}")
    if kind not in KINDS:
        raise OptionError(f"quantize: expected a kind among {', '.join(KINDS)}, got {kind!r}")
    places = _places(model)
    layers = {names[0]: layer for layer, names in places.items()}
    if unknown := [name for name in skip if all(name not in names for names in places.values())]:
        raise OptionError(
            f"quantize: no linear layer is called {unknown[0]!r}; there are {', '.join(layers) or 'none'}"
        )
    shared = _shared(model, layers)
    errors: dict[str, float] = {}
    left: dict[str, str] = {}
    before = after = 0
    for name, layer in layers.items():
        if why := _refused(model, places[layer], layer, kind, skip, shared):
            left[name] = why
            continue
        quantized = QuantizedLinear(layer, kind)
        full = layer.weight.detach().float()
        errors[name] = float(
            (dequantized(quantized.weight, quantized.scale, kind) - full).norm() / full.norm().clamp(min=1e-30)
        )
        before += layer.weight.nbytes
        after += quantized.weight.nbytes + quantized.scale.nbytes
        for place in places[layer]:
            setattr(_owner(model, place), place.rpartition(".")[2], quantized.to(layer.weight.device))
    return Quantized(kind, errors, before, after, left)


def _places(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Every linear layer, with all its names: a model may call one layer in several places."""
    places: dict[nn.Linear, list[str]] = {}
    for name, m in model.named_modules(remove_duplicate=False):
        if type(m) is nn.Linear:
            places.setdefault(m, []).append(name)
    return places


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _shared(model: nn.Module, layers: dict[str, nn.Linear]) -> set[str]:
    """Layers whose weight is a parameter of another module too, such as an embedding's."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), set()).add(id(module))
    return {name for name, layer in layers.items() if len(owners[id(layer.weight)]) > 1}


def _refused(
    model: nn.Module, names: list[str], layer: nn.Linear, kind: str, skip: Sequence[str], shared: set[str]
) -> str:
    if any(name in skip for name in names):
        return "asked for"
    if names[0] in shared:
        return "its weight belongs to another module too"
    if any(isinstance(_owner(model, name), nn.TransformerEncoderLayer) for name in names):
        return "torch.nn.TransformerEncoderLayer reads the weights of its layers itself"
    if not layer.weight.numel():
        return "it has no weights"
    if kind != "fp8" and layer.in_features % GROUP:
        return f"its width {layer.in_features} is no multiple of {GROUP}"
    return ""
