"""Recurrent layers. ONNX has one node for a layer in both its directions, over a sequence of batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form

# In which order ONNX has the gates of PyTorch: input, output, forget, cell; update, reset, new.
GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
MKLDNN_LSTM = 2  # the library's number for it


@form("lstm.input")
def lstm(g: Graph, x: Ref, states: list[Ref], *rest: object) -> list[Ref]:
    return layers(g, "LSTM", x, states, *rest)  # type: ignore[arg-type]


@form("gru.input")
def gru(g: Graph, x: Ref, hidden: Ref, *rest: object) -> list[Ref]:
    return layers(g, "GRU", x, [hidden], *rest, linear_before_reset=1)  # type: ignore[arg-type]


@form("rnn_tanh.input")
def rnn_tanh(g: Graph, x: Ref, hidden: Ref, *rest: object) -> list[Ref]:
    return layers(g, "RNN", x, [hidden], *rest)  # type: ignore[arg-type]


@form("rnn_relu.input")
def rnn_relu(g: Graph, x: Ref, hidden: Ref, *rest: object) -> list[Ref]:
    *_, both_ways, _ = rest
    return layers(g, "RNN", x, [hidden], *rest, activations=["Relu"] * (2 if both_ways else 1))  # type: ignore[arg-type]


def layers(
    g: Graph,
    kind: str,
    x: Ref,
    states: list[Ref],
    weights: list[Ref],
    has_biases: bool,
    count: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
    **attributes: Any,
) -> list[Ref]:
    ways, each = 2 if both_ways else 1, 4 if has_biases else 2
    need(not (train and dropout) and len(weights) == count * ways * each)  # more of them project what a layer gives
    length, batch = x.sizes[1::-1] if batch_first else x.sizes[:2]
    steps = g.permute(x, (1, 0, 2)) if batch_first else x
    last: list[list[Ref]] = [[] for _ in states]
    for i in range(count):
        mine = weights[i * ways * each : (i + 1) * ways * each]
        directions = [mine[k * each : (k + 1) * each] for k in range(ways)]
        given = [g.slice(s, 0, i * ways, (i + 1) * ways) if count > 1 else s for s in states]
        direction = "bidirectional" if both_ways else "forward"
        out, *ends = layer(g, kind, steps, given, directions, direction, **attributes)
        for listed, end in zip(last, ends, strict=True):
            listed.append(end)
        if both_ways:  # steps, directions, batch, width
            out = g.op("Transpose", out, perm=[0, 2, 1, 3])
            steps = g.reshape(out, (length, batch, 2 * states[0].sizes[-1]))
        else:
            steps = g.op("Squeeze", out, g.ints([1]), shape=(length, batch, states[0].sizes[-1]))
    final = [ends[0] if count == 1 else g.op("Concat", *ends, axis=0) for ends in last]
    return [g.permute(steps, (1, 0, 2)) if batch_first else steps, *final]


def layer(
    g: Graph, kind: str, x: Ref, states: list[Ref], directions: list[list[Ref]], direction: str, **attributes: Any
) -> list[Ref]:
    """One node: all steps, and the last states."""
    width = directions[0][1].sizes[-1]
    assert isinstance(width, int)
    rows = g.tensor(torch.cat([torch.arange(width) + width * gate for gate in GATES[kind]]))
    parts = directions
    if len(GATES[kind]) > 1:
        parts = [[g.op("Gather", w, rows, axis=0) for w in weights] for weights in directions]
    matrices = [_stacked(g, [weights[i] for weights in parts]) for i in range(2)]
    biases = [g.op("Concat", *weights[2:], axis=0) for weights in parts if len(weights) == 4]
    bias = _stacked(g, biases) if biases else None
    return g.op(
        kind, x, *matrices, bias, None, *states,
        hidden_size=width, direction=direction, outputs=1 + len(states), **attributes,
    )  # fmt: skip


def _stacked(g: Graph, parts: list[Ref]) -> Ref:
    """One of each direction, along a dimension of their own."""
    wide = [g.op("Unsqueeze", part, g.ints([0])) for part in parts]
    return wide[0] if len(wide) == 1 else g.op("Concat", *wide, axis=0)


@form("mkldnn_rnn_layer")
def mkldnn_layer(
    g: Graph,
    x: Ref,
    input_weight: Ref,
    hidden_weight: Ref,
    input_bias: Ref,
    hidden_bias: Ref,
    hidden: Ref,
    cell: Ref,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    width: int,
    count: int,
    has_biases: bool,
    both_ways: bool,
    batch_first: bool,
    train: bool,
) -> list[Ref | None]:
    """A layer in one direction, as PyTorch's library for CPUs runs it."""
    need(mode == MKLDNN_LSTM and count == 1 and not both_ways and not batch_first and not batch_sizes and not train)
    weights = [input_weight, hidden_weight, *((input_bias, hidden_bias) if has_biases else ())]
    out, last, state = layer(g, "LSTM", x, [hidden, cell], [weights], "reverse" if reverse else "forward")
    return [g.op("Squeeze", out, g.ints([1])), last, state, None]
