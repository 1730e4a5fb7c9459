"""Optimizers' updates, and gradients of a graph."""

from __future__ import annotations

import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context, Scope
from tessera.frontends.onnx.registry import TRAINING, operator
from tessera.frontends.onnx.structure import Node, reads

Tensor = torch.Tensor


def _groups(xs: tuple, kinds: int) -> list[tuple]:
    """Parameters, gradients and states, listed kind by kind."""
    if len(xs) % kinds:
        raise OnnxError(f"expected {kinds} tensors for each parameter, got {len(xs)} in all")
    count = len(xs) // kinds
    return [xs[i * count : (i + 1) * count] for i in range(kinds)]


@operator("Adagrad", domain=TRAINING)
def adagrad(
    rate: Tensor,
    step: Tensor,
    *xs: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple:
    now = rate / (1 + step * decay_factor)
    params, grads, squares = _groups(xs, 3)
    new_params, new_squares = [], []
    for x, g, h in zip(params, grads, squares, strict=True):
        g = norm_coefficient * x + g
        h = h + g * g
        new_params.append((x - now * g / (h.sqrt() + epsilon)).to(x.dtype))
        new_squares.append(h)
    return (*new_params, *new_squares)


@operator("Adam", domain=TRAINING)
def adam(
    rate: Tensor,
    step: Tensor,
    *xs: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple:
    params, grads, firsts, seconds = _groups(xs, 4)
    corrected = torch.where(step > 0, rate * (1 - beta**step).sqrt() / (1 - alpha**step), rate)
    new: tuple[list, list, list] = ([], [], [])
    for x, g, v, h in zip(params, grads, firsts, seconds, strict=True):
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * g * g
        x = x - corrected * v / (h.sqrt() + epsilon)
        for column, value in zip(new, ((1 - norm_coefficient_post) * x, v, h), strict=True):
            column.append(value.to(g.dtype))
    return tuple(value for column in new for value in column)


@operator("Momentum", domain=TRAINING)
def momentum(
    rate: Tensor, step: Tensor, *xs: Tensor, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple:
    params, grads, velocities = _groups(xs, 3)
    new_params, new_velocities = [], []
    for x, g, v in zip(params, grads, velocities, strict=True):
        g = norm_coefficient * x + g
        factor = torch.where(step > 0, beta, 1.0)
        v = (alpha * v + factor * g).to(g.dtype)
        new_params.append((x - rate * (g + alpha * v if mode == "nesterov" else v)).to(x.dtype))
        new_velocities.append(v)
    return (*new_params, *new_velocities)


@operator("Gradient", domain=TRAINING, interpreted="autograd runs the graph that it differentiates")
def gradient(*values: Tensor, xs: list[str], y: str, zs: list[str] | None = None, context: Context) -> tuple:
    """Derivatives of `y` by the values named `xs`, where those named `xs` and `zs` hold what is given."""
    names = [*xs, *(zs or ())]
    if len(names) != len(values):
        raise OnnxError(f"{context.node}: expected {len(names)} inputs, got {len(values)}")
    inner = Scope(context.scope.opsets, context.scope.attributes, context.scope, context.scope.graph)
    with torch.enable_grad():
        given = {n: v.detach().clone().requires_grad_(n in xs) for n, v in zip(names, values, strict=True)}
        inner.values.update(given)
        for node in _between(context, set(names), y):
            context.interpreter.run_node(node, inner)
        target = inner[y]
        assert isinstance(target, Tensor)
        grads = torch.autograd.grad(target.sum(), [given[n] for n in xs], allow_unused=True)
    return tuple(torch.zeros_like(given[n]) if g is None else g for n, g in zip(xs, grads, strict=True))


def _between(context: Context, given: set[str], y: str) -> list[Node]:
    """The nodes that lead from the given values to `y`, in the graph's order."""
    graph = context.scope.graph
    if graph is None:
        raise OnnxError(f"{context.node}: a gradient inside a function has no graph to differentiate")
    wanted, chosen = {y}, []
    for node in reversed(graph.nodes):
        if wanted & set(node.outputs) - given:
            chosen.append(node)
            wanted |= reads(node) - given
    return chosen[::-1]
