"""TorchDynamo's graphs become Traces.

In: the graph module and inputs that Dynamo gives a backend. Out: a `Captured` trace over ATen in which
high-level operators stay whole, with the user's lines and module paths on its equations. Dynamo keeps the
guards and the Python around the graph; nothing here runs on real data.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from tessera.frontends.captured import Captured, capture
from tessera.frontends.dynamo.blocks import Block
from tessera.frontends.dynamo.data_writes import refuse_hidden_writes, refuse_inner_leaves, uncounted_arguments
from tessera.frontends.dynamo.frames import MODEL, OWN_FILE
from tessera.frontends.dynamo.functions import autograd_function, inside_transform
from tessera.frontends.dynamo.global_state import leave_contexts, refuse_setter
from tessera.frontends.dynamo.hooks import behind_hooks, check_between_results, record_hook
from tessera.frontends.dynamo.launch import record_launch
from tessera.frontends.dynamo.outside import refuse_outside_histories
from tessera.frontends.functional import control, flex  # noqa: F401  (record PyTorch's operators over functions)
from tessera.frontends.functional.bodies import record_call
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.call import CALL, CHECKPOINT, moved
from tessera.ir.checks import record_check
from tessera.ir.equation import Source, Special
from tessera.ir.record import Recorder, recording
from tessera.ir.types import type_of
from tessera.ops.op import keep_whole
from tessera.torch_internals.autograd import BackwardState, set_grad_enabled
from tessera.torch_internals.dynamo import TracingContext
from tessera.torch_internals.exporting import is_layer
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode, detect_fake_mode
from tessera.torch_internals.functorch import level_count, pop_levels
from tessera.torch_internals.higher_order import CALLS_ON_COPIES, register_hook
from tessera.torch_internals.shapes import torch_check
from tessera.util.errors import CaptureError

_HIDDEN_PARTS = {"L", "G", "self", MODEL, "_modules", "_parameters", "_buffers", "__dict__"}
_LINE = re.compile(r"File \"([^\"]+)\", line (\d+)")
_FRAMES = re.compile(r"File \"[^\"]+\", line \d+, in (\S+)")


def capture_graph(
    gm: torch.fx.GraphModule, example_inputs: list[object], name: str = "forward", arguments: tuple[str, ...] = ()
) -> Captured:
    """The trace of one Dynamo graph. `arguments` are the names of what the user passes by position."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if any(isinstance(x, BackwardState) for x in example_inputs):
        raise CaptureError(
            "hooks of modules in a graph made for compiled autograd; they run as the graph does, eagerly"
        )
    check_between_results(gm)
    refuse_hidden_writes(gm)
    refuse_inner_leaves(gm)
    refuse_outside_histories(gm, example_inputs)
    mode = fake_mode(placeholders, example_inputs)
    mode.epoch += 1  # sizes that Dynamo learned of its inputs' contents are forgotten: the trace has symbols of its own
    fakes = [_fake_input(n, x, mode) for n, x in zip(placeholders, example_inputs, strict=True)]
    builder = Builder(name, mode)
    names = [input_name(n, arguments) for n in placeholders]
    further, further_names = _of_blocks(gm)
    fakes += fake.fakes_of(map(type_of, further), mode)  # type: ignore[arg-type]
    names += further_names
    grads = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in (*example_inputs, *further))
    run, enables = run_graph(gm, builder), enables_grad(gm)
    builder.by_base = torch.is_grad_enabled() and any(grads)
    with torch.enable_grad() if enables else nullcontext(), _levels_kept():
        captured = capture(run, fakes, names, keep_whole, builder, locate=False, enables_grad=enables)
    return dataclasses.replace(
        captured,
        trace=behind_hooks(captured.trace, builder.hooked, captured.outputs),
        requires_grad=grads,
        uncounted=uncounted_arguments(gm),
    )


@contextmanager
def _levels_kept() -> Iterator[None]:
    """A graph enters and leaves the levels of torch.func's transforms; one that fails half way has left none."""
    depth = level_count()
    try:
        yield
    except Exception:
        pop_levels(depth)
        raise


def enables_grad(gm: torch.fx.GraphModule) -> bool:
    """Called under no_grad, the program turns gradients on."""
    return not torch.is_grad_enabled() and any(
        n.target is set_grad_enabled and n.args[0] is True for n in gm.graph.nodes
    )


def given_fakes(gm: torch.fx.GraphModule) -> bool:
    """Whether the user called with fake tensors of their own: there is nothing that a kernel could read."""
    arguments = (n.meta.get("grapharg") for n in gm.graph.nodes if n.op == "placeholder")
    return any(a is not None and isinstance(a.example, FakeTensor) for a in arguments)


def fake_mode(placeholders: list[torch.fx.Node], inputs: list[object]) -> FakeTensorMode:
    """The mode Dynamo traced this graph in: its fake inputs carry the symbolic sizes."""
    for node in placeholders:
        if isinstance(known := node.meta.get("example_value"), FakeTensor):
            return known.fake_mode
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(inputs)
    return mode or FakeTensorMode(allow_non_fake_inputs=True)


def _fake_input(node: torch.fx.Node, x: object, mode: FakeTensorMode) -> object:
    """What Dynamo traced this input as: symbolic sizes are its choice."""
    known = node.meta.get("example_value", x)
    if not isinstance(known, torch.Tensor):
        return known
    if type(x) not in (torch.Tensor, torch.nn.Parameter, FakeTensor, torch.nn.Buffer):
        raise CaptureError(f"input {node.name} is a {type(x).__name__}, a tensor subclass that runs its own code")
    if not isinstance(known, FakeTensor):
        return mode.from_tensor(known)
    if isinstance(x, torch.Tensor) and not _agrees(known, x):
        raise CaptureError(f"the program changes the shape or dtype of its input {node.name} itself")
    return known


def _agrees(fake: torch.Tensor, real: torch.Tensor) -> bool:
    """Dynamo's fake input still describes the real one (the program did not reshape it in place)."""
    if fake.dtype != real.dtype or fake.layout != real.layout or fake.ndim != real.ndim:
        return False
    if fake.layout is not torch.strided:
        return True
    mine, theirs = (*fake.shape, *fake.stride()), (*real.shape, *real.stride())
    return all(a == b for a, b in zip(mine, theirs, strict=True) if type(a) is int and type(b) is int)


def input_name(node: torch.fx.Node, arguments: tuple[str, ...] = ()) -> str:
    """`L['self']._modules['fc']._parameters['weight']` reads `fc_weight`, `L['args'][0]` the argument's name."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name
    text = source.name if isinstance(source.name, str) else source.name()
    parts = _parts(text)
    if parts[:1] == ["args"] and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) < len(arguments):
        parts[:2] = [arguments[int(parts[1])]]
    elif parts[:1] == ["kwargs"]:
        parts = parts[1:]
    return "_".join(parts) or node.name


def run_graph(gm: torch.fx.GraphModule, builder: Builder, home: tuple[str, str] = ("", "")) -> Callable:
    """A function that runs the graph node by node, telling the builder where each comes from. `home`: the module that
    the nodes were traced in, and the one that they now stand for."""

    def run(*inputs: object) -> object:
        given = iter(inputs)
        env: dict[torch.fx.Node, object] = {}
        further = inputs[sum(n.op == "placeholder" for n in gm.graph.nodes) :]
        nodes = iter(gm.graph.nodes)
        try:
            for node in nodes:
                builder.source = moved(node_source(node), *home)
                if node.op == "output":
                    return torch.fx.map_arg(node.args[0], env.__getitem__)
                env[node] = next(given) if node.op == "placeholder" else run_node(gm, node, env, further, builder)
        except Exception:
            leave_contexts(nodes, env)
            raise
        raise CaptureError("the graph has no output node")

    return run


def run_node(
    gm: torch.fx.GraphModule, node: torch.fx.Node, env: dict[torch.fx.Node, object], further: tuple, builder: Builder
) -> object:
    """`further`: the tensors of blocks that were not traced."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), partial(_value, env))
    match node.op:
        case "call_function" if isinstance(node.target, Block):
            return _block(node, gm, node.target.operands(args, further))  # type: ignore[arg-type]
        case "call_function" if node.target in BODIES:
            return BODIES[node.target](node, builder, *args, **kwargs)
        case "call_function":
            refuse_setter(node)
            return node.target(*args, **kwargs)  # type: ignore[operator]
        case "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
        case "call_module":
            return gm.get_submodule(node.target)(*args, **kwargs)  # type: ignore[arg-type]
        case "get_attr":
            return _attribute(gm, node.target)  # type: ignore[arg-type]
    raise CaptureError(f"a graph of TorchDynamo's holds a node that calls nothing: {node.format_node()}")


def _value(env: dict[torch.fx.Node, object], node: torch.fx.Node) -> object:
    if node not in env:  # older Dynamo, after hooks on a tensor whose sizes are open
        raise CaptureError(f"a graph of TorchDynamo's reads {node}, which it does not hold; it runs eagerly")
    return env[node]


# --- graphs inside graphs: what a higher-order operator does with its body ---


def _checkpoint(
    node: torch.fx.Node, builder: Builder, body: torch.fx.GraphModule, *args: object, **kwargs: object
) -> object:
    """What backward runs again: an equation that holds the body."""
    if kwargs.get("context_fn") is not None:
        raise CaptureError("checkpoint with a context_fn chooses its own saved tensors; the graph runs eagerly")
    return _call(CHECKPOINT, node, body, args)


def _inline(_: torch.fx.Node, builder: Builder, body: torch.fx.GraphModule, *args: object, **__: object) -> object:
    return run_graph(body, builder)(*args)


def _region(
    node: torch.fx.Node, builder: Builder, body: torch.fx.GraphModule, identifier: object, *args: object
) -> object:
    """A region the user asked to be compiled once: every call refers to the same body."""
    return _call(CALL, node, body, args, key=body)


def _block(node: torch.fx.Node, gm: torch.fx.GraphModule, operands: list[object]) -> object:
    """A block that equals one traced before: a call of the same body."""
    assert isinstance(node.target, Block)
    traced, source = node.target.traced, node_source(node)
    home = (_path(traced.path), source.module)
    body = traced.as_module(gm)
    outs = _record(CALL, source, body, tuple(operands), node.target.name, source.module, key=traced, home=home)
    return outs[0] if len(outs) == 1 else outs  # type: ignore[arg-type,index]


def _of_blocks(gm: torch.fx.GraphModule) -> tuple[list[torch.Tensor], list[str]]:
    """What a program takes after Dynamo's inputs, and names for it: the tensors of blocks that were not traced."""
    tensors: list[torch.Tensor] = []
    names: dict[int, str] = {}
    for node in gm.graph.nodes:
        if isinstance(node.target, Block):
            path, tensors = node_source(node).module.replace(".", "_"), node.target.members.tensors
            names |= {at: f"{path}_{place.replace('.', '_')}" for at, place in node.target.places().items()}
    return tensors, [names.get(i, f"weight_{i}") for i in range(len(tensors))]


def counted(gm: torch.fx.GraphModule) -> tuple[int, int]:
    """How many operators the program has, and how many calls of blocks that were not traced."""
    calls = [n for n in gm.graph.nodes if n.op.startswith("call")]
    blocks = [n.target.traced for n in calls if isinstance(n.target, Block)]
    inside = (sum(n.op.startswith("call") for n in traced.graph.nodes) for traced in blocks)
    return len(calls) - len(blocks) + sum(inside), len(blocks)


def fed(call: Callable, gm: torch.fx.GraphModule) -> Callable:
    """What Dynamo calls with its inputs alone: the program, with what it takes after these."""
    further = next((n.target.members.tensors for n in gm.graph.nodes if isinstance(n.target, Block)), None)
    if further is None:
        return call

    def feed(*inputs: object) -> object:
        return call(*inputs, *further)  # the list is the members' own: it is always up to date

    return feed


def eager_of(gm: torch.fx.GraphModule, count: int) -> Callable:
    """The graph as it is, of a program's inputs: the first `count` of these are Dynamo's."""
    if not any(isinstance(n.target, Block) for n in gm.graph.nodes):
        return gm.forward
    return lambda *inputs: gm.forward(*inputs[:count])


def _call(op: Special, node: torch.fx.Node, body: torch.fx.GraphModule, args: tuple, key: object = None) -> object:
    name, module = _owner(node, body)
    return _record(op, node_source(node), body, args, name, module, key)


def _record(
    op: Special,
    source: Source,
    body: torch.fx.GraphModule,
    args: tuple,
    name: str,
    module: str,
    key: object = None,
    home: tuple[str, str] = ("", ""),
) -> object:
    recorder = recording()
    assert recorder is not None
    if inside_transform(args):  # which works on what the body computes
        return run_graph(body, recorder.builder, home)(*args)
    recorder.builder.source = dataclasses.replace(source, module=module or source.module)

    def names() -> list[str]:
        return list({id(x): _operand_name(x, recorder, module) for x in args}.values())

    return record_call(op, recorder, lambda b: run_graph(body, b, home), args, {}, name, names, key)


def _operand_name(x: object, recorder: Recorder, module: str) -> str:
    """A parameter by its name in the module that is called, a size by its symbol, what is computed is `x`."""
    if not isinstance(x, torch.Tensor):
        return str(x) if str(x).isidentifier() else "n"
    with fake.alone():
        v = recorder.value(recorder.fake(x))
    return v.name.removeprefix(module.replace(".", "_") + "_") if v in recorder.builder.inputs else "x"


def _owner(node: torch.fx.Node, body: torch.fx.GraphModule) -> tuple[str, str]:
    """What of the user's the body is: a function's or a class's name, and the module that all of it ran in."""
    inside = [n for n in body.graph.nodes if n.meta.get("stack_trace")]
    stacks = [list((n.meta.get("nn_module_stack") or {}).values()) for n in inside]
    common = os.path.commonprefix(stacks) or list((node.meta.get("nn_module_stack") or {}).values())
    module, cls = common[-1] if common else ("", None)
    outer = _FRAMES.findall(node.meta.get("stack_trace") or "")
    frames = [name for name in _FRAMES.findall(inside[0].meta["stack_trace"])[len(outer) :]] if inside else []
    name = frames[0] if frames and frames[0].isidentifier() and frames[0] != "forward" else ""
    return name or (cls.__name__ if frames[:1] == ["forward"] and isinstance(cls, type) else "body"), _path(module)


def _check(_: torch.fx.Node, builder: Builder, condition: object, message: str) -> None:
    """What the program claims about a number known only when it runs; the shape environment may rely on it from now."""
    record_check(builder, condition, message)
    torch_check(condition)  # type: ignore[arg-type]


def _plainly(call: Callable, _: torch.fx.Node, __: Builder, *args: object, **kwargs: object) -> object:
    return call(*args, **kwargs)


_higher = torch.ops.higher_order
BODIES: dict[object, Callable] = {
    _higher.tag_activation_checkpoint: _checkpoint,
    _higher.wrap: _inline,
    _higher.invoke_subgraph: _region,
    _higher.autograd_function_apply: autograd_function,
    _higher.triton_kernel_wrapper_mutation: record_launch,
    torch.ops.aten._assert_scalar.default: _check,
    **{op: partial(_plainly, on_copies) for op, on_copies in CALLS_ON_COPIES.items()},
}
if register_hook is not None:
    BODIES[register_hook] = record_hook


def _attribute(gm: torch.fx.GraphModule, path: str) -> object:
    owner: object = gm
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


_sources: dict[tuple[str, str], Source] = {}


def node_source(node: torch.fx.Node) -> Source:
    text = node.meta.get("stack_trace") or ""
    stack = node.meta.get("nn_module_stack") or {}
    module = next(reversed(stack.values()))[0] if stack else ""
    key = (text, module)
    if key not in _sources:
        lines = [place for place in _LINE.findall(text) if not place[0].startswith(OWN_FILE)]
        own = [place for place in lines if not is_layer(place[0])]
        file, line = (own or lines or [("", 0)])[-1]
        _sources[key] = Source(file, int(line), _path(module))
    return _sources[key]


def _path(module: str) -> str:
    """`L['self'].blocks.0` reads `blocks.0`."""
    return ".".join(_parts(module))


def _parts(text: str) -> list[str]:
    """The user's own names in one of Dynamo's. A model that has none is given one by some versions, made of its id."""
    parts = re.findall(r"\w+", text)
    return [p for p in parts if p not in _HIDDEN_PARTS and not p.startswith("___unnamed_scope")]
