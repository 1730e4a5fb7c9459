"""The derivative of an operator whose formula cannot be traced, because it looks at data.

A custom operator's backward may read a tensor's values in Python. Such a formula becomes one equation,
`tessera.pullback`, that runs PyTorch's autograd of that operator when the program runs: the forward again, with
gradients noted, then its backward. It costs the forward twice and is right; random operators are refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Special, Value, map_values
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.torch_internals.dispatch import DispatchKey, is_key_excluded
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode
from tessera.util.errors import RuleError

NAMESPACE = "autograd"


def is_opaque(eqn: Equation) -> bool:
    """A pullback itself: on fake tensors it shows types only, so nothing can be traced through it."""
    return isinstance(eqn.op, Special) and eqn.op.namespace == NAMESPACE


def opaque_vjp(eqn: Equation, values: list[Value], mask: tuple[bool, ...], mode: FakeTensorMode) -> Trace:
    """A trace of two equations: the operator, then its pullback from (values, cotangents) to gradients."""
    if has_effect(eqn):
        raise RuleError(f"{eqn.op} is random or has effects, and its derivative looks at data: it cannot be run again")
    builder = Builder("vjp_formula", mode)
    inputs = [builder.input(f"x{i}", v.type) for i, v in enumerate(values)]
    rename = dict(zip(values, inputs, strict=True))
    outputs = tuple(None if v is None else builder.value(v.name, v.type) for v in eqn.outputs)
    builder.append(eqn.substitute(rename).with_(outputs=outputs))
    floats = [v for v in outputs if v is not None and v.is_differentiable]
    cts = [builder.input(f"ct{i}", v.type) for i, v in enumerate(floats)]
    wanted = [v for v, m in zip(inputs, mask, strict=True) if m]
    run = Special(f"pullback_{eqn.opname or 'function'}", _pullback(eqn, values, mask), NAMESPACE)
    grads = builder.record(run, (*inputs, *cts), {}, [v.type for v in wanted], "grad")
    results = [v for v in outputs if v is not None]
    return builder.finish([*results, *grads])  # type: ignore[misc]


def _noted() -> bool:
    """Whether autograd notes what runs now; a compiled program runs below it, whatever its parameters require."""
    below = is_key_excluded(DispatchKey.AutogradFunctionality)
    return torch.is_grad_enabled() and not below


def _pullback(eqn: Equation, values: list[Value], mask: tuple[bool, ...]) -> Callable:
    fn = eqn.op.fn if isinstance(eqn.op, Special) else eqn.op

    def pull(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if isinstance(tensors[0], FakeTensor):  # only types are asked for
            return [torch.empty_like(x) for x, m in zip(tensors, mask, strict=False) if m]
        deeper = _noted() and any(x.requires_grad for x in tensors)  # a pullback of this pullback
        with fake.alone(), torch.enable_grad():
            primals = [
                x if deeper and x.requires_grad else x.detach().requires_grad_(m)
                for x, m in zip(tensors, mask, strict=False)
            ]
            env = dict(zip(values, primals, strict=True))
            out = fn(*map_values(eqn.args, env.__getitem__), **map_values(eqn.kwargs, env.__getitem__))  # type: ignore[misc]
            listed = out if isinstance(out, (tuple, list)) else (out,)
            heads = [o for o in listed if isinstance(o, torch.Tensor) and (o.is_floating_point() or o.is_complex())]
            pairs = [(o, c) for o, c in zip(heads, tensors[len(values) :], strict=True) if o.requires_grad]
            sources = [x for x, m in zip(primals, mask, strict=True) if m]
            outs, seeds = zip(*pairs, strict=True)
            grads = torch.autograd.grad(outs, sources, seeds, allow_unused=True, create_graph=deeper)
            pulled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, sources, strict=True)]
            return pulled if deeper else [g.detach() for g in pulled]

    return pull
