"""Linear layers that multiply in 8 bits, forward and backward: which do, and why the others stay as they are.

`fp8_layers`, before differentiation. In: a functional trace, and what the user asked for (`FP8`). Out: the same program
with `tessera.fp8_linear` in place of linear layers in 16 bits, and the reasons of those that stayed. A product by a
matrix that is an input of the program (`x @ w`, `addmm`) is a linear layer too.

`fp8_products`, after it. In: a trace that may hold `tessera.fp8_linear` without a gradient. Out: the same layers as
arithmetic that rounds around one product (`ops/fp8_linear` says which), and one record of largest magnitudes for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from tessera.ir.builder import aten, emit
from tessera.ir.equation import Arg, Equation, Value
from tessera.ir.rewrite import Rewrite
from tessera.ir.trace import Trace
from tessera.ir.types import Size, dtype_name, size_hint, type_of
from tessera.ir.views import PERMUTES, RESHAPES
from tessera.ops.families import product
from tessera.ops.fp8 import FEW_ROWS, WHOLE
from tessera.ops.fp8_linear import AMAX_SCALES, FP8_LINEAR, RECORD_AMAX, written_out
from tessera.ops.linear_loss import LINEAR_LOSS
from tessera.transforms.fp8_recipe import FP8, Histories

DTYPES = (torch.bfloat16, torch.float16)
_SAME_NUMBERS = RESHAPES | PERMUTES | {"_to_copy", "detach", "alias", "contiguous", "clone"}
Reasons = Mapping[str, str]  # by the name of a layer, why it stays in 16 bits; empty where it does not


@dataclass(frozen=True)
class Layer:
    """A linear layer of a trace, as `aten.linear` has it; `turned`: its weight lies `(inputs, outputs)`."""

    x: Value
    w: Value
    bias: Value | None = None
    turned: bool = False
    joined: bool = False  # with the loss after it

    @property
    def sides(self) -> tuple[Size, Size]:
        """How many inputs and outputs it has."""
        inputs, outputs = self.w.shape if self.turned else self.w.shape[::-1]
        return inputs, outputs


# --- before differentiation ---


def fp8_layers(
    trace: Trace, recipe: FP8, grad: bool, refusal: Callable[[torch.device], str], histories: Histories | None
) -> tuple[Trace, Reasons]:
    """`grad`: gradients will be taken; `refusal(device)`: why a device has no such products."""
    layers = _layers(trace)
    names = _names(layers)
    reasons = {eqn: why_not(layer, recipe, grad, refusal) for eqn, layer in layers.items()}
    for eqn, why in _skipped(names, recipe).items():
        reasons[eqn] = why
    told = {names[eqn]: why for eqn, why in reasons.items()}
    chosen = {eqn: names[eqn] for eqn, why in reasons.items() if not why}
    if not chosen:
        return trace, told
    rewrite = Rewrite(trace)
    state = _state(rewrite, {eqn: layers[eqn] for eqn in chosen}, chosen, histories) if histories is not None else {}
    for eqn in rewrite:
        if eqn in chosen:
            layer, of = layers[eqn], state.get(eqn, (None, None))
            replaced = rewrite.replace(eqn, lambda _, layer=layer, of=of: _in_eight_bits(layer, recipe.scaling, *of))
            assert replaced, f"{eqn.out} became another type"
    return rewrite.finish(), told


def _in_eight_bits(layer: Layer, scaling: str, scales: list[Value] | None, history: Value | None) -> Value:
    w = aten.t(layer.w) if layer.turned else layer.w
    return emit(FP8_LINEAR, layer.x, w, layer.bias, scaling, scales, history)


def _state(
    rewrite: Rewrite, layers: dict[Equation, Layer], names: dict[Equation, str], histories: Histories
) -> dict[Equation, tuple[list[Value] | None, Value | None]]:
    """For each layer its three scales, all read before the first, and where to record what they will be made of.
    Layers that read one value, or have one weight, have one scale for it: it is rounded once."""
    builder = rewrite.builder
    held = {eqn: histories.of(names[eqn], eqn.out.tensor.device) for eqn in layers}
    values = {eqn: builder.constant("history", tensor, type_of(tensor)) for eqn, tensor in held.items()}
    own: dict[Value, Value] = {}

    def scale(row: int, column: int, of: Value | None = None) -> Value:
        if of is None or of not in own:
            one = aten.select(aten.select(scales, 0, row), 0, column)
            return one if of is None else own.setdefault(of, one)
        return own[of]

    with builder:
        scales = emit(AMAX_SCALES, list(values.values()))
        return {
            eqn: ([scale(i, 0, layer.x), scale(i, 1, layer.w), scale(i, 2)], values[eqn])
            for i, (eqn, layer) in enumerate(layers.items())
        }


def _layers(trace: Trace) -> dict[Equation, Layer]:
    makers, inputs = trace.makers(), set(trace.inputs)

    def is_input(v: Arg) -> bool:
        while isinstance(v, Value) and v in makers and makers[v].opname in _SAME_NUMBERS:
            v = makers[v].inputs()[0]
        return v in inputs

    pairs = ((eqn, _layer(eqn, is_input)) for eqn in trace.equations)
    return {eqn: layer for eqn, layer in pairs if layer is not None}


def _layer(eqn: Equation, is_input: Callable[[Arg], bool]) -> Layer | None:
    if eqn.op is LINEAR_LOSS:
        return Layer(*eqn.args[:3], joined=True)  # type: ignore[arg-type]
    args, options = eqn.bound()
    match eqn.opname:
        case "linear":
            x, w, bias = args
            return Layer(x, w, bias) if w.ndim == 2 else None
        case "mm" | "matmul":
            (x, w), bias = args[:2], None
        case "addmm" if options["beta"] == options["alpha"] == 1:
            bias, x, w = args
        case _:
            return None
    by_weight = w.ndim == 2 and x.ndim >= 2 and is_input(w) and not is_input(x)
    return Layer(x, w, bias, turned=True) if by_weight and len(eqn.results()) == 1 else None


def _names(layers: dict[Equation, Layer]) -> dict[Equation, str]:
    """By its module, or its result where there is none; a module that runs again has a number behind its name."""
    seen: dict[str, int] = {}
    names = {}
    for eqn in layers:
        name = eqn.source.module or eqn.results()[0].name
        seen[name] = seen.get(name, 0) + 1
        names[eqn] = name if seen[name] == 1 else f"{name}:{seen[name]}"
    return names


def _skipped(names: dict[Equation, str], recipe: FP8) -> dict[Equation, str]:
    """Those that the user wants to stay, and the first and the last of the program."""
    patterns = [name for name in recipe.skip if name not in ("first", "last")]
    skipped = {eqn: "skip names it" for eqn, name in names.items() if any(fnmatchcase(name, p) for p in patterns)}
    ends = {"last": next(reversed(names), None), "first": next(iter(names), None)}
    for which, eqn in ends.items():
        if eqn is not None and which in recipe.skip:
            skipped[eqn] = f"{which} layer"
    return skipped


def why_not(layer: Layer, recipe: FP8, grad: bool, refusal: Callable[[torch.device], str]) -> str:
    """Why a layer stays as it is; empty where it need not."""
    x, w = layer.x, layer.w
    if reason := refusal(x.tensor.device):
        return reason
    if other := next((v for v in (x, w) if v.dtype not in DTYPES), None):
        return f"its numbers are {dtype_name(other.dtype)}, not of 16 bits"
    if layer.joined:
        return "its loss is computed with it"
    inputs, outputs = layer.sides
    rows = product(x.shape[:-1])
    sides = {"inputs": inputs, "outputs": outputs, **({"rows": rows} if grad else {})}
    for what, side in sides.items():
        if not _is_whole(side):
            return f"{side} {what} are no multiple of {WHOLE}" + ("" if type(side) is int else ", as far as is known")
    if type(rows) is int and rows == 0:
        return "it has no rows"
    if size_hint(rows) <= FEW_ROWS:
        return f"over {rows} rows reading the weights is all the work"
    if min(map(size_hint, (inputs, outputs))) < recipe.smallest:
        return f"too small: {outputs} × {inputs}, below {recipe.smallest}"
    return ""


def _is_whole(side: Size) -> bool:
    """A multiple of what the library wants, whatever sizes that are not known yet turn out to be."""
    return (side if type(side) is int else side.node.expr) % WHOLE == 0  # type: ignore[union-attr]


# --- after it ---


def fp8_products(trace: Trace) -> Trace:
    """Layers that nobody differentiates are written out; all largest magnitudes are recorded by the last record."""
    records = [eqn for eqn in trace.equations if eqn.op is RECORD_AMAX]
    rewrite = Rewrite(trace)
    for eqn in rewrite:
        if eqn.op is FP8_LINEAR:
            assert rewrite.replace(eqn, written_out), f"{eqn.out} became another type"
        elif eqn in records[:-1]:
            rewrite.erase()
        elif eqn in records:
            histories, tops = ([v for record in records for v in record.args[i]] for i in range(2))  # type: ignore[union-attr]
            rewrite.keep(eqn.with_(args=(histories, tops)))
    return rewrite.finish()
