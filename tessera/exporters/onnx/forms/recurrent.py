"""Recurrent layers that PyTorch's library for CPUs runs whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.exporters.onnx.forms.common import need
from tessera.exporters.onnx.graph import Graph, Ref
from tessera.exporters.onnx.registry import form

LSTM = 2  # the library's number for it
GATES = (0, 3, 1, 2)  # ONNX has them as input, output, forget, cell; PyTorch as input, forget, cell, output


@form("mkldnn_rnn_layer")
def rnn_layer(
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
    layers: int,
    has_biases: bool,
    both_ways: bool,
    batch_first: bool,
    train: bool,
) -> list[Ref | None]:
    """One layer in one direction, over a sequence of batches."""
    need(mode == LSTM and layers == 1 and not both_ways and not batch_first and not batch_sizes and not train)
    rows = g.tensor(torch.cat([torch.arange(width) + width * gate for gate in GATES]))
    weights = [g.unsqueeze(g.op("Gather", w, rows, axis=0, shape=w.sizes), 0) for w in (input_weight, hidden_weight)]
    bias = None
    if has_biases:
        parts = [g.op("Gather", b, rows, axis=0) for b in (input_bias, hidden_bias)]
        bias = g.unsqueeze(g.op("Concat", *parts, axis=0, shape=(8 * width,)), 0)
    direction = "reverse" if reverse else "forward"
    out, last, state = g.op(
        "LSTM", x, *weights, bias, None, hidden, cell, hidden_size=width, direction=direction, outputs=3
    )
    return [g.op("Squeeze", out, g.ints([1])), last, state, None]
