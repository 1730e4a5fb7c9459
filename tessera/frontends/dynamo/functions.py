"""A torch.autograd.Function of the user's, which Dynamo hands over as two graphs.

In: the graphs of its forward and backward, and the arguments of the call. Out: one equation that stands for the call;
or its equations one by one, where the call stands inside a transform of torch.func, which differentiates what it sees.
"""

from __future__ import annotations

# ruff: noqa: ANN001, ANN002, ANN205
from collections.abc import Callable, Collection

import torch

from tessera.frontends.functional.function import record_function
from tessera.ir.builder import Builder
from tessera.ir.record import recording
from tessera.torch_internals.autograd import set_grad_enabled, version_of
from tessera.torch_internals.functorch import innermost
from tessera.util.errors import CaptureError


def inside_transform(args: tuple) -> bool:
    """Levels of torch.func's transforms have wrapped an argument."""
    return any(isinstance(x, torch.Tensor) and innermost(x) is not x for x in args)


def autograd_function(
    _: torch.fx.Node,
    builder: Builder,
    fwd: torch.fx.GraphModule,
    bwd: torch.fx.GraphModule,
    *args: object,
    **kwargs: object,
) -> object:
    older = "args_tensor_mask" in kwargs  # until 2.11 both graphs took the context first
    context = (None,) if older else ()
    if older:
        args = args[: sum(kwargs["args_tensor_mask"])]  # type: ignore[call-overload,arg-type]
    fixed: Collection[int] = kwargs.get("non_differentiable_idx") or ()  # type: ignore[assignment]

    def forward(*xs: object) -> tuple[object, list, list[torch.Tensor]]:
        """The results, what is saved, and the arguments that were written."""
        tensors = [x for x in xs if isinstance(x, torch.Tensor)]
        versions = list(map(version_of, tensors))
        out, saved = fwd(*context, *xs)
        written = [x for x, n in zip(tensors, versions, strict=True) if n != version_of(x)]
        return tuple(out) if isinstance(out, list) else out, list(saved), written

    def backward(*cts: object) -> object:
        return bwd(*context, *cts)

    if inside_transform(args):
        bwd = _with_grad(bwd)
        return _within(forward, backward, fixed).apply(*args)

    class FromGraphs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *xs):
            out, ctx.saved, written = forward(*xs)
            ctx.mark_dirty(*written)
            ctx.mark_non_differentiable(*_chosen(out, fixed))
            return out

        @staticmethod
        def backward(ctx, *cts):
            return backward(*cts, *ctx.saved)

    recorder = recording()
    assert recorder is not None
    return record_function(FromGraphs, args, recorder)


def _within(forward: Callable, backward: Callable, fixed: Collection[int]) -> type[torch.autograd.Function]:
    """The function as torch.func takes it. Each level saves its own arguments and results, so that a derivative may be
    differentiated again; what else was saved has no history, as in eager."""
    saved: list[tuple[str, object]] = []

    class FromGraphs(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*xs):
            out, kept, written = forward(*xs)
            if written:
                raise CaptureError("an autograd.Function that writes its argument stands inside a transform")
            saved[:] = [_place(s, xs, out) for s in kept]
            return out

        @staticmethod
        def setup_context(ctx, inputs, output):
            given = {"inputs": inputs, "results": output if isinstance(output, tuple) else (output,)}
            found = [given[kind][at] if kind in given else at for kind, at in saved]
            ctx.places = [isinstance(x, torch.Tensor) for x in found]
            ctx.numbers = [x for x in found if not isinstance(x, torch.Tensor)]
            ctx.save_for_backward(*(x for x in found if isinstance(x, torch.Tensor)))
            ctx.mark_non_differentiable(*_chosen(output, fixed))

        @staticmethod
        def backward(ctx, *cts):
            tensors, numbers = iter(ctx.saved_tensors), iter(ctx.numbers)
            return backward(*cts, *(next(tensors if is_tensor else numbers) for is_tensor in ctx.places))

    return FromGraphs


def _with_grad(bwd: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same with gradients. Dynamo traces a backward under no_grad, whose switches come first and last."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(bwd.graph, {}))
    switches = [n for n in graph.nodes if n.target is set_grad_enabled]
    for node in (switches[0], switches[-1]) if switches and switches[0].args == (False,) else ():
        graph.erase_node(node)
    return torch.fx.GraphModule(bwd, graph)


def _place(x: object, inputs: tuple, out: object) -> tuple[str, object]:
    for kind, given in (("inputs", inputs), ("results", out if isinstance(out, tuple) else (out,))):
        for i, y in enumerate(given):
            if x is y and isinstance(x, torch.Tensor):
                return kind, i
    return "other", x


def _chosen(out: object, places: Collection[int]) -> list:
    return [x for i, x in enumerate(out if isinstance(out, tuple) else (out,)) if i in places]
