"""RNN, GRU and LSTM, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.quantization import dequantize_linear, dynamic_quantize_linear
from tessera.frontends.onnx.registry import MICROSOFT, operator
from tessera.frontends.onnx.values import Untraceable
from tessera.ir.record import recording

Tensor = torch.Tensor
_DEFAULTS = {"leakyrelu": (0.01, 0.0), "thresholdedrelu": (1.0, 0.0), "elu": (1.0, 0.0), "hardsigmoid": (0.2, 0.5)}


def _activation(name: str, alpha: float | None, beta: float | None) -> Callable[[Tensor], Tensor]:
    key = name.lower()
    a = _DEFAULTS.get(key, (1.0, 0.0))[0] if alpha is None else alpha
    b = _DEFAULTS.get(key, (1.0, 0.0))[1] if beta is None else beta
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softsign": F.softsign,
        "softplus": F.softplus,
        "affine": lambda x: a * x + b,
        "leakyrelu": lambda x: torch.where(x < 0, a * x, x),
        "thresholdedrelu": lambda x: torch.where(x > a, x, 0.0),
        "scaledtanh": lambda x: a * torch.tanh(b * x),
        "hardsigmoid": lambda x: torch.clamp(a * x + b, 0, 1),
        "elu": lambda x: torch.where(x < 0, a * torch.expm1(x), x),
    }
    if key not in known:
        raise OnnxError(f"activations: expected one of {', '.join(known)}, got {name!r}")
    return known[key]


class _Layer:
    """What the three have in common: directions, lengths, clipping."""

    def __init__(
        self,
        x: Tensor,
        lengths: Tensor | None,
        direction: str,
        layout: int,
        clip: float | None,
        names: Sequence[str] | None,
        default: Sequence[str],
        alpha: Sequence[float] | None,
        beta: Sequence[float] | None,
        context: Context,
    ) -> None:
        self.x = x.transpose(0, 1) if layout else x  # [length, batch, size]
        self.layout, self.clip, self.lengths = layout, clip, lengths
        self.turns = self.x.shape[0]
        if recording() is not None and self.turns > context.limits.unrolled:
            raise Untraceable(f"a sequence of more than {context.limits.unrolled} steps")
        if direction not in ("forward", "reverse", "bidirectional"):
            raise OnnxError(f"direction: expected forward, reverse or bidirectional, got {direction!r}")
        self.directions = [False, True] if direction == "bidirectional" else [direction == "reverse"]
        names = list(names or list(default) * len(self.directions))
        alphas, betas = list(alpha or ()), list(beta or ())
        activations = []
        for i, name in enumerate(names):
            activations.append(
                _activation(name, alphas[i] if i < len(alphas) else None, betas[i] if i < len(betas) else None)
            )
        each = len(default)
        self.activations = [activations[i * each : (i + 1) * each] for i in range(len(self.directions))]

    def clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else torch.clamp(x, -self.clip, self.clip)

    def initial(self, given: Tensor | None, place: int, hidden: int) -> Tensor:
        if given is None:
            return self.x.new_zeros(self.x.shape[1], hidden)
        return given[:, place] if self.layout else given[place]

    def run(self, backwards: bool, state: tuple[Tensor, ...], step: Callable) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All outputs in the order of time, and the last state. Past its length an example stands still."""
        rows: list[Tensor | None] = [None] * self.turns
        for t in reversed(range(self.turns)) if backwards else range(self.turns):
            new = step(self.x[t], state)
            if self.lengths is None:
                rows[t] = new[0]
            else:
                live = (self.lengths > t).reshape(-1, 1)
                rows[t] = torch.where(live, new[0], 0.0)
                new = tuple(torch.where(live, a, b) for a, b in zip(new, state, strict=True))
            state = new
        return torch.stack(rows), state  # type: ignore[arg-type]

    def results(self, outputs: list[Tensor], *lasts: list[Tensor]) -> tuple:
        y = torch.stack(outputs, 1)  # [length, directions, batch, hidden]
        last = [torch.stack(states) for states in lasts]
        if self.layout:
            return (y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last))
        return (y, *last)


def _biases(b: Tensor | None, place: int, count: int) -> tuple[Tensor | float, Tensor | float]:
    if b is None:
        return 0.0, 0.0
    return b[place].split(b.shape[1] // 2)  # type: ignore[return-value]


@operator("RNN")
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_sequence: int = 0,
    context: Context,
) -> tuple:
    layer = _Layer(
        x, lengths, direction, layout, clip, activations, ["Tanh"], activation_alpha, activation_beta, context
    )
    outputs, last = [], []
    for d, backwards in enumerate(layer.directions):
        wb, rb = _biases(b, d, 1)
        (f,) = layer.activations[d]

        def step(row: Tensor, state: tuple, d: int = d, bias: object = wb + rb, f: Callable = f) -> tuple:
            return (f(layer.clipped(row @ w[d].t() + state[0] @ r[d].t() + bias)),)

        ys, state = layer.run(backwards, (layer.initial(h, d, r.shape[2]),), step)
        outputs.append(ys)
        last.append(state[0])
    return layer.results(outputs, last)


@operator("GRU")
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
    context: Context,
) -> tuple:
    default = ["Sigmoid", "Tanh"]
    layer = _Layer(
        x, lengths, direction, layout, clip, activations, default, activation_alpha, activation_beta, context
    )
    hidden, outputs, last = r.shape[2], [], []
    for d, backwards in enumerate(layer.directions):
        wb, rb = _biases(b, d, 3)
        f, g = layer.activations[d]

        def step(
            row: Tensor, state: tuple, d: int = d, wb: object = wb, rb: object = rb, f: Callable = f, g: Callable = g
        ) -> tuple:
            (old,) = state
            zx, rx, hx = (row @ w[d].t() + wb).split(hidden, 1)
            weights = r[d].split(hidden)
            biases = (0.0,) * 3 if isinstance(rb, float) else rb.split(hidden)  # type: ignore[union-attr]
            update = f(layer.clipped(zx + old @ weights[0].t() + biases[0]))
            reset = f(layer.clipped(rx + old @ weights[1].t() + biases[1]))
            if linear_before_reset:
                inner = hx + reset * (old @ weights[2].t() + biases[2])
            else:
                inner = hx + (reset * old) @ weights[2].t() + biases[2]
            new = g(layer.clipped(inner))
            return ((1 - update) * new + update * old,)

        ys, state = layer.run(backwards, (layer.initial(h, d, hidden),), step)
        outputs.append(ys)
        last.append(state[0])
    return layer.results(outputs, last)


@operator("LSTM")
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
    context: Context,
) -> tuple:
    default = ["Sigmoid", "Tanh", "Tanh"]
    layer = _Layer(
        x, lengths, direction, layout, clip, activations, default, activation_alpha, activation_beta, context
    )
    return _lstm_layer(layer, w, r, b, h, c, p, bool(input_forget))


def _lstm_layer(
    layer: _Layer,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    h: Tensor | None,
    c: Tensor | None,
    p: Tensor | None,
    input_forget: bool,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple:
    """`rounded` is what a product sees of the state."""
    hidden, outputs, hs, cs = r.shape[2], [], [], []
    for d, backwards in enumerate(layer.directions):
        wb, rb = _biases(b, d, 4)
        peep = (0.0,) * 3 if p is None else p[d].split(hidden)
        f, g, o = layer.activations[d]

        def step(
            row: Tensor,
            state: tuple,
            d: int = d,
            bias: object = wb + rb,
            peep: tuple = peep,
            f: Callable = f,
            g: Callable = g,
            o: Callable = o,
        ) -> tuple:
            old_h, old_c = state
            gates = row @ w[d].t() + rounded(old_h) @ r[d].t() + bias
            enter, leave, forget, new = gates.split(hidden, 1)
            enter = f(layer.clipped(enter + peep[0] * old_c))
            forget = 1 - enter if input_forget else f(layer.clipped(forget + peep[2] * old_c))
            cell = forget * old_c + enter * g(layer.clipped(new))
            leave = f(layer.clipped(leave + peep[1] * cell))
            return leave * o(cell), cell

        start = layer.initial(h, d, hidden), layer.initial(c, d, hidden)
        ys, (last_h, last_c) = layer.run(backwards, start, step)
        outputs.append(ys)
        hs.append(last_h)
        cs.append(last_c)
    return layer.results(outputs, hs, cs)


@operator("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    p: Tensor | None = None,
    w_scale: Tensor | None = None,
    w_zero: Tensor | None = None,
    r_scale: Tensor | None = None,
    r_zero: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    context: Context,
) -> tuple:
    """Weights are stored turned, in 8 bits; what they are multiplied with is rounded to 8 bits on the way."""
    if w_scale is None or r_scale is None:
        raise OnnxError(f"{context.node}: expected scales of both weights")
    default = ["Sigmoid", "Tanh", "Tanh"]
    layer = _Layer(
        _in_8_bits(x), lengths, direction, 0, clip, activations, default, activation_alpha, activation_beta, context
    )
    weights = (_widened(w, w_scale, w_zero).mT, _widened(r, r_scale, r_zero).mT)
    return _lstm_layer(layer, *weights, b, h, c, p, bool(input_forget), _in_8_bits)


def _in_8_bits(x: Tensor) -> Tensor:
    return dequantize_linear(*dynamic_quantize_linear(x))


def _widened(w: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """A scale for each direction, or for each column of it."""
    factor = scale.reshape(scale.shape[0], 1, -1) if scale.ndim else scale
    shift = 0 if zero is None else zero.reshape(factor.shape).to(torch.int32)
    return (w.to(torch.int32) - shift).to(factor.dtype) * factor
