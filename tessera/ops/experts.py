"""`tessera.experts`: every token goes to a few experts, and what they make of it is added up.

In: tokens [T, d]; for each the experts it goes to and their weights, [T, k]; the experts' matrices, stacked as those of
`torch.nn.Linear`: up and gate [E, f, d], down [E, d, f]. Out: for each token the sum over its experts of

    weight * (down @ (activation(gate @ token) * (up @ token)))         without gate: down @ activation(up @ token)

A choice outside of 0 … E-1 is no expert. The operator has a derivative; backward computes what stands between the two
layers again. That derivative has derivatives, too, by plain operators that take every token to every expert. On a mesh
the partitioner sends rows to the ranks that have their experts (`ops/factors/experts`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil

import torch
from torch import Tensor

from tessera.ir.builder import emit
from tessera.ir.equation import Arg, Equation, Special, Value
from tessera.ops.expert_rows import ACTIVATIONS, activation_of, dense_pull, hidden, outer, products, pull_hidden
from tessera.ops.formula import finish, pytorch_vjp
from tessera.ops.op import declare
from tessera.util.errors import InputError

SCHEMA = "Tensor tokens, Tensor choice, Tensor weights, Tensor up, Tensor down, Tensor? gate, str activation, int most"


def experts(
    tokens: Tensor,
    choice: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str = "silu",
    capacity: float | None = None,
) -> Tensor:
    """What experts make of tokens, each token's weighted and added up.

    tokens       [..., d]
    choice       [..., k], the experts of each token; a number outside of 0 … E-1 is no expert
    weights      [..., k], what each of them counts
    up, gate     [E, f, d], the first layers of E experts, as `torch.nn.Linear` holds them; gate may be None
    down         [E, d, f], their second layers
    activation   "silu", "gelu", "gelu_tanh" or "relu", of what `gate` gives, or else `up`
    capacity     an expert takes at most capacity * tokens * k / E tokens, the first ones; None: all that come

    Under a plan with an axis of "experts" the stacks lie split along that axis, and rows are sent to them.
    """
    _check(tokens, choice, weights, up, down, gate)
    activation_of(activation)
    lead, count = choice.shape[:-1], up.shape[0]
    choice, weights = choice.reshape(-1, choice.shape[-1]), weights.reshape(-1, weights.shape[-1])
    most = 0
    if capacity is not None:
        if not capacity > 0:
            raise InputError(f"experts: expected a capacity above 0, got {capacity}")
        most = ceil(capacity * choice.numel() / count)
        choice = within(choice, count, most)
    args = tokens.reshape(-1, tokens.shape[-1]), choice, weights.to(tokens.dtype), up, down, gate, activation, most
    return torch.ops.tessera.experts(*args).reshape(*lead, tokens.shape[-1])


def within(choice: Tensor, count: int, most: int) -> Tensor:
    """Choices of the first tokens of each expert; the others choose none."""
    flat = torch.where((choice >= 0) & (choice < count), choice, count).flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    first = (counts.cumsum(0) - counts).gather(0, flat.gather(0, order))  # where each one's expert begins
    places = torch.arange(flat.shape[0], device=flat.device) - first
    return torch.where(torch.empty_like(flat).scatter(0, order, places) < most, flat, count).view(choice.shape)


def _check(tokens: Tensor, choice: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> None:
    if choice.shape != weights.shape or choice.shape[:-1] != tokens.shape[:-1] or choice.ndim < 2:
        raise InputError(
            f"experts: expected a choice and weights of the shape {[*tokens.shape[:-1], 'k']}, "
            f"got {list(choice.shape)} and {list(weights.shape)}"
        )
    if choice.is_floating_point() or choice.is_complex() or choice.dtype == torch.bool:
        raise InputError(f"experts: expected a choice of whole numbers, got {choice.dtype}")
    width = tokens.shape[-1]
    if up.ndim != 3 or up.shape[2] != width:
        raise InputError(f"experts: expected up to be [experts, f, {width}], got {list(up.shape)}")
    if gate is not None and gate.shape != up.shape:
        raise InputError(f"experts: expected gate to be {list(up.shape)} as up is, got {list(gate.shape)}")
    if list(down.shape) != [up.shape[0], width, up.shape[1]]:
        raise InputError(f"experts: expected down to be {[up.shape[0], width, up.shape[1]]}, got {list(down.shape)}")


# --- the operators --------------------------------------------------------------------------------


def _by_expert(choice: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which of all choices are whose, expert by expert, and how many each has."""
    flat = torch.where((choice >= 0) & (choice < count), choice, count).flatten()
    counts = torch.bincount(flat, minlength=count + 1)[:count]
    return torch.argsort(flat, stable=True)[: int(counts.sum())], counts


def _run(
    tokens: Tensor, choice: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None, activation: str,
    most: int,
) -> Tensor:  # fmt: skip
    order, counts = _by_expert(choice, up.shape[0])
    rows = tokens[order // choice.shape[1]]
    own = products(hidden(rows, counts, up, gate, activation_of(activation)), down, counts)
    every = tokens.new_zeros(choice.numel(), tokens.shape[1])
    every[order] = own * weights.flatten()[order].unsqueeze(1)
    return every.view(*choice.shape, -1).sum(1)


def _pull(
    ct: Tensor, tokens: Tensor, choice: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None,
    activation: str, most: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    order, counts = _by_expert(choice, up.shape[0])
    rows, ct_rows = tokens[order // choice.shape[1]], ct[order // choice.shape[1]]
    scale, known = weights.flatten()[order].unsqueeze(1), activation_of(activation)
    between = hidden(rows, counts, up, gate, known)
    pulled = products(ct_rows, down.transpose(1, 2), counts)
    d_rows, d_up, d_gate = pull_hidden(pulled * scale, rows, counts, up, gate, known)
    d_weights = weights.new_zeros(choice.numel())
    d_weights[order] = (between * pulled).sum(1)
    every = tokens.new_zeros(choice.numel(), tokens.shape[1])
    every[order] = d_rows
    d_gate = up.new_zeros(0) if d_gate is None else d_gate
    d_down = outer(ct_rows * scale, between, counts)
    return every.view(*choice.shape, -1).sum(1), d_weights.view(choice.shape), d_up, d_down, d_gate


library = torch.library.Library("tessera", "FRAGMENT")
library.define(f"experts({SCHEMA}) -> Tensor")
library.define(f"experts_backward(Tensor ct, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
library.impl("experts", _run, "CompositeExplicitAutograd")
library.impl("experts_backward", _pull, "CompositeExplicitAutograd")


def _types(ct, tokens, choice, weights, up, down, gate, activation, most):  # noqa: ANN001, ANN202
    like = [tokens, weights, up, down, up.new_empty(0) if gate is None else gate]
    return tuple(x.new_empty(x.shape) for x in like)


torch.library.register_fake("tessera::experts", lambda tokens, *rest: tokens.new_empty(tokens.shape), lib=library)
torch.library.register_fake("tessera::experts_backward", _types, lib=library)


def _remember(ctx, inputs: tuple, output: Tensor) -> None:  # noqa: ANN001
    *tensors, ctx.activation, ctx.most = inputs
    ctx.save_for_backward(*tensors)


def _eager_backward(ctx, ct: Tensor) -> tuple:  # noqa: ANN001
    given = ctx.saved_tensors
    tokens, weights, up, down, gate = torch.ops.tessera.experts_backward(ct, *given, ctx.activation, ctx.most)
    return tokens, None, weights, up, down, None if given[-1] is None else gate, None, None


torch.library.register_autograd("tessera::experts", _eager_backward, setup_context=_remember, lib=library)


def _eager_second(ctx, *cts: Tensor | None) -> tuple:  # noqa: ANN001
    """By PyTorch's derivative of the plain operators, which may be differentiated again."""
    ct, tokens, choice, *rest = ctx.saved_tensors
    given = [ct, tokens, *(x for x in rest if x is not None)]

    def run(ct: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None = None) -> tuple:
        return tuple(dense_pull(ct, tokens, choice, weights, up, down, gate, ctx.activation))

    outs, pull = torch.func.vjp(run, *given)  # type: ignore[misc]
    seeds = [torch.zeros_like(x) if g is None else g for x, g in zip(outs, cts, strict=False)]
    d_ct, d_tokens, *d_rest = pull(tuple(seeds))
    return d_ct, d_tokens, None, *d_rest, *[None] * (3 + len(rest) - len(d_rest) - 1)


torch.library.register_autograd("tessera::experts_backward", _eager_second, setup_context=_remember, lib=library)

run_experts = torch.ops.tessera.experts.default
pull_experts = torch.ops.tessera.experts_backward.default


def _vjp(ct: Value, y: Value, *args: Arg) -> tuple:
    tokens, weights, up, down, gate = emit(pull_experts, ct, *args)
    return tokens, None, weights, up, down, None if args[5] is None else gate, None, None


def _cost(factor: int):  # noqa: ANN202
    """Products an expert's rows take part in; all choices count."""

    def cost(eqn: Equation) -> float:
        *_, choice, _, up, _, gate, _, _ = eqn.args
        assert isinstance(choice, Value) and isinstance(up, Value)
        matrices = (2 if gate is None else 3) * factor
        return 2.0 * matrices * choice.numel() * up.tensor.numel() / max(int(up.shape[0]), 1)

    return cost


declare("tessera.experts", "experts", vjp=_vjp, cost=_cost(1))
DENSE_PULL = Special("experts_dense_backward", dense_pull)


def _second(need: Sequence[object], *args: Arg) -> Generator[object, object, tuple]:
    out = emit(pull_experts, *args)
    cts = yield out
    *given, _ = args
    rule = pytorch_vjp(list(need)[: len(given)], DENSE_PULL, *given)
    outputs = next(rule)
    grads = finish(rule, list(cts)[: len(outputs)])  # type: ignore[arg-type, call-overload]
    return *grads, None


declare("tessera.experts_backward", "experts", forward=_second, cost=_cost(3))

__all__ = ["ACTIVATIONS", "experts", "pull_experts", "run_experts"]
