"""Equal blocks of a model are traced once.

In: the calls of modules that TorchDynamo is about to trace for one of our backends. Out: the first of equal blocks is
traced as ever; the call of another one becomes a single node. Its target (`Block`) knows the nodes of the first and
the tensors that take the place of the first one's. Nothing of such a block passes through Dynamo, so its guards are
ours (`members.py`). Any doubt, and Dynamo traces the block itself: `Blocks.notes` says why.

A call may stand for another one's nodes where these hold.

- The modules are equal (`equal_modules.py`); attributes with other constants (`layer_idx`) were not read.
- The arguments are alike: tensors of the same kinds, the same tensors at the same places, the same constants. A tensor
  that the first one can reach by another name than the argument's (a parameter, a global) is an argument of both.
- Grad mode, autocast and modes of torch functions are the same; there are no hooks for all modules, and no transform of
  `torch.func` runs; the program has written to no module, and to no Python object in between.
- The first one's nodes read its arguments, its tensors, and inputs of the program; nothing else.
- Its results are tensors that these nodes make, and no argument became a tensor of another kind.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tessera.frontends.dynamo.arguments import Arguments, arguments_of, example, filled, given, kind_of
from tessera.frontends.dynamo.equal_modules import Match, match, own_attributes
from tessera.frontends.dynamo.members import Member, Members
from tessera.frontends.dynamo.siblings import Siblings
from tessera.frontends.functional.trace import autocast_state
from tessera.torch_internals import tracing
from tessera.torch_internals.autograd import get_data_attr
from tessera.torch_internals.functorch import level_count
from tessera.torch_internals.modules import hooks_of_all_modules
from tessera.torch_internals.tracing import Tx, Variable

_LATEST = 8  # a block is compared with so many that were traced


@dataclass(eq=False)
class Traced:
    """The first of equal blocks, and the nodes that Dynamo made of its call."""

    module: weakref.ref[nn.Module]
    source: str  # the module, as Dynamo writes it
    path: str  # the same, as Dynamo writes on a node which module it ran in
    arguments: Arguments
    switches: tuple
    graph: torch.fx.Graph  # a copy of the nodes, from arguments and inputs to outputs
    inputs: list[torch.fx.Node]  # of the program, that the nodes read
    outputs: list[torch.fx.Node]
    places: tuple[bool, ...] | None  # which items of the resulting tuple are outputs, the others None; None: no tuple
    read: frozenset[str]  # names in what Dynamo has guarded
    body: torch.fx.GraphModule | None = None

    def as_module(self, root: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """The graph, with what its nodes take from `root`."""
        if self.body is None:
            self.body = torch.fx.GraphModule(root, self.graph)
        return self.body


class Block:
    """What a node calls in place of a block's own nodes."""

    def __init__(self, module: nn.Module, traced: Traced, members: Members, own: dict[int, int]) -> None:
        """`own`: for positions among `traced.inputs`, those among the members' tensors."""
        self.module, self.traced, self.members, self.own = weakref.ref(module), traced, members, own
        self.name = self.__name__ = type(module).__name__
        self.tracing = False

    def __call__(self, *operands: object) -> object:
        """While Dynamo traces, fake tensors like the first one's. Where the graph runs as it is, the module runs."""
        if self.tracing:
            outs = tuple(example(n).clone() for n in self.traced.outputs)  # type: ignore[attr-defined]
            return outs[0] if len(outs) == 1 else outs
        module = self.module()
        assert module is not None, "a graph runs for a model that is gone"
        args, kwargs = filled(self.traced.arguments, operands)
        out = module(*args, **kwargs)
        outs = tuple(x for x in out if x is not None) if self.traced.places else (out,)
        return outs[0] if len(outs) == 1 else outs

    def places(self) -> dict[int, str]:
        """Where its tensors are in the module, by their positions among the members'."""
        member, begin = self.members.by_module.get(id(self.module()), (None, 0))
        return {} if member is None else {begin + i: place for i, place in enumerate(member.order)}

    def operands(self, given: tuple, tensors: Sequence[object]) -> list[object]:
        """What goes into the body: `given` by the node, and the members' `tensors`."""
        count = len(self.traced.arguments.nodes)
        rest = iter(given[count:])
        inputs = (tensors[self.own[i]] if i in self.own else next(rest) for i in range(len(self.traced.inputs)))
        return [*given[:count], *inputs]


@dataclass
class Blocks:
    """What a backend knows of blocks: its attribute `blocks`."""

    notes: dict[str, str] = field(default_factory=dict)  # a block that was traced by itself -> why

    def taken(self) -> dict[str, str]:
        """The notes, which are then gone."""
        notes, self.notes = self.notes, {}
        return notes


class Program:
    """The blocks of one program while Dynamo traces it."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.siblings, self.members = blocks, Siblings(notes=blocks.notes), Members()
        self.traced: dict[int, list[Traced]] = {}  # by the id of the first of equal modules
        self.busy = False  # a block is being traced
        self.inputs: set[int] = set()  # the ids of modules whose tensors Dynamo takes as inputs
        self.writes = 0  # to Python objects that were there before
        self.written = False  # one of them is a module, or may be part of one

    def call(self, tx: Tx, module: Variable, args: list, kwargs: dict, trace: Callable[[], Variable]) -> Variable:
        if self.busy or tracing.is_argument(module.source) or not tracing.in_program(tx):
            self.inputs.add(id(module.value))
            return trace()
        if id(module.value) not in self.siblings.seen:
            self.siblings.look_into(module.value)
        first = self.siblings.firsts.get(id(module.value))
        if first is None:
            return trace()
        arguments, known = arguments_of(tx, args, kwargs), self.traced.setdefault(id(first), [])
        if why := self.obstacle():
            self.note(module, why)
        elif arguments is None:
            self.note(module, "its arguments are more than plain tensors, constants and tuples of them")
        else:
            for traced in known[-_LATEST:]:
                block = self.block(tx, traced, module, arguments)
                if isinstance(block, Block):
                    return _result(tx, module, block, arguments)
                why = block
            if why:
                self.note(module, why)
            return self.trace(tx, module, arguments, trace, known)
        self.inputs.add(id(module.value))
        return trace()

    def obstacle(self) -> str:
        """Why no block may stand for another one now."""
        if self.written:
            return "the program writes to a module, a list or a dictionary before it"
        if level_count():
            return "a transform of torch.func runs"
        return "there are hooks for all modules" if any(hooks_of_all_modules().values()) else ""

    def switches(self, tx: Tx) -> tuple:
        """What decides over a trace besides modules and arguments. `random` gives numbers in the order of calls."""
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return *grad, *autocast_state(), tracing.function_modes(tx), tracing.random_calls(tx), self.writes

    def note(self, module: Variable, why: str) -> None:
        self.blocks.notes.setdefault(_path(module), why)

    # --- the first of equal blocks ---

    def trace(
        self, tx: Tx, module: Variable, arguments: Arguments, trace: Callable[[], Variable], known: list[Traced]
    ) -> Variable:
        graph, switches = tx.output.graph, self.switches(tx)
        last = next(iter(reversed(graph.nodes)), None)
        self.inputs.add(id(module.value))
        self.busy = True
        try:
            result = trace()
        finally:
            self.busy = False
        traced = self.traced_as(tx, module, arguments, _nodes_after(graph, last), result, switches)
        if isinstance(traced, Traced):
            known.append(traced)
        else:
            self.note(module, traced)
        return result

    def traced_as(
        self, tx: Tx, module: Variable, arguments: Arguments, nodes: list | None, result: Variable, switches: tuple
    ) -> Traced | str:
        """What was traced, or why it stands for no other block."""
        items = tracing.items_of(tracing.realized(result))
        outputs = [tracing.node_of(x) for x in (items if items is not None else [tracing.realized(result)])]
        nones = [tracing.constant_of(x) == (True, None) for x in items or ()]
        if any(n is None and not (nones and nones[i]) for i, n in enumerate(outputs)):
            return "its result is more than a tensor or a tuple of tensors"
        if nodes is None or switches != self.switches(tx):
            return "it writes to a Python object, draws from `random`, or leaves grad mode or autocast another one"
        inside, passed = set(nodes), set(arguments.nodes)
        results = [n for n in outputs if n is not None]
        if not results or len(set(results)) < len(results) or not inside.issuperset(results):
            return "its result is one of its arguments"
        fakes = [x for x in map(example, results) if isinstance(x, torch.Tensor)]
        if len(fakes) < len(results):
            return "its result is a number known only when it runs"
        if any(kind_of(x.clone()) != kind_of(x) for x in fakes):
            return "its result lies in memory as no copy of it does"
        read = dict.fromkeys(a for n in nodes for a in n.all_input_nodes)
        inputs = [n for n in read if n not in inside and n not in passed]
        if any(n.op != "placeholder" and isinstance(example(n), torch.Tensor) for n in inputs):
            return "it reads a tensor of the program that is no argument"
        if any(n.meta.get("unbacked_bindings") for n in nodes):
            return "it has sizes that are known only when it runs"
        if any(tracing.is_higher_order(n.target) or n.target is get_data_attr for n in nodes):
            return "it holds an operator over functions (a checkpoint, a hook, a loop) or reads `.data`"
        if [kind_of(example(n)) for n in arguments.nodes] != arguments.kinds:
            return "it changes the kind of an argument"
        if tracing.names_of_one(tx) & {*map(_source, arguments.nodes)}:
            return "an argument is a tensor that has another name too"
        return Traced(
            weakref.ref(module.value), _name(module.source), tracing.stack_path(module), arguments, switches,
            _copied(nodes, [*arguments.nodes, *inputs], results), inputs, results,
            None if items is None else tuple(not none for none in nones), _names(tx),
        )  # fmt: skip

    # --- another one ---

    def block(self, tx: Tx, traced: Traced, module: Variable, arguments: Arguments) -> Block | str:
        """What stands for the module's call, or why nothing does."""
        if difference := arguments.difference(traced.arguments):
            return difference
        if traced.switches != self.switches(tx):
            return "grad mode, autocast or a Python object that the program writes is another one"
        if any(map(_of_its_own, arguments.nodes, traced.arguments.nodes)) or {*arguments.nodes} & {*traced.inputs}:
            return "an argument is a tensor that it may reach by another name"
        first = traced.module()
        assert first is not None
        if module.value is first:
            return Block(first, traced, self.members, {})
        compared = match(first, module.value)
        if compared.differences:
            return compared.differences[0]
        if read := compared.constants.keys() & traced.read:
            return compared.constants[min(read)]
        own: dict[int, str] = {}  # position among the inputs -> place of the tensor
        for i, node in enumerate(traced.inputs):
            tensor = given(node)
            if id(tensor) in compared.places:
                own[i] = compared.places[id(tensor)]
            elif id(tensor) not in compared.pairs and _source(node).startswith(traced.source):
                return f"{_source(node)} is a number that the program takes"
        tensors = {*compared.places, *map(id, compared.tensors.values())}
        if any(id(given(n)) in tensors for n in (*arguments.nodes, *traced.arguments.nodes)):
            return "an argument is one of its own tensors"
        place = self.place(module, first, compared, traced.read, tuple(own.values()))
        if place is None:
            return "it is called in two ways, or shares tensors with another block"
        return Block(module.value, traced, self.members, {i: place + k for k, i in enumerate(own)})

    def place(
        self, module: Variable, first: nn.Module, compared: Match, read: frozenset[str], order: tuple[str, ...]
    ) -> int | None:
        """Where the module's tensors begin among those of all members; it becomes one."""
        members, value = self.members, module.value
        if known := members.by_module.get(id(value)):
            member, place = known
            return place if (member.traced(), member.order) == (first, order) else None
        if id(value) in self.inputs or any(id(t) in members.owners for t in compared.tensors.values()):
            return None
        if not members.members:
            tracing.guard_holds(members.hold, "blocks that equal another one have been changed")
        tracing.guard_is(module)
        return members.add(Member(first, value, compared, read, order))


def _result(tx: Tx, module: Variable, block: Block, arguments: Arguments) -> Variable:
    shared = [n for i, n in enumerate(block.traced.inputs) if i not in block.own]
    block.tracing = True
    out = tracing.emit(tx, module, block, [*arguments.nodes, *shared])
    block.tracing = False
    places = block.traced.places
    if places is None:
        return out
    items = iter([out] if len(block.traced.outputs) == 1 else tracing.items_of(out) or ())
    return tracing.tuple_of([next(items) if there else None for there in places])


def _nodes_after(graph: torch.fx.Graph, last: torch.fx.Node | None) -> list[torch.fx.Node] | None:
    """What was traced since, without the program's inputs; None where that cannot be told."""
    nodes = []
    for n in reversed(graph.nodes):
        if n is last:
            break
        nodes.append(n)
    else:
        if last is not None:
            return None
    return [n for n in reversed(nodes) if n.op != "placeholder"]


def _copied(nodes: list[torch.fx.Node], inputs: list[torch.fx.Node], outputs: list[torch.fx.Node]) -> torch.fx.Graph:
    """A graph of their own. Dynamo's goes on changing: in the end, Dynamo erases nodes that nobody reads, and has the
    others read one symbol where each asked a tensor for its size."""
    graph = torch.fx.Graph()
    env = {n: graph.placeholder(n.name) for n in inputs}
    for n in nodes:
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(tuple(env[n] for n in outputs))
    return graph


def _names(tx: Tx) -> frozenset[str]:
    return frozenset(part for name in tracing.guarded_names(tx) for part in re.findall(r"\w+", name))


def _of_its_own(mine: torch.fx.Node, first: torch.fx.Node) -> bool:
    """A call with `mine` is another one than with `first`, though the kind is the same: the program reads `first` by a
    name that leads everywhere to this tensor, or users set attributes of one of them."""
    if mine is first:
        return False
    source = getattr(first.meta.get("grapharg"), "source", None)
    own = [x for x in (given(mine), given(first)) if isinstance(x, torch.Tensor) and own_attributes(x)]
    return bool(own) or (first.op == "placeholder" and not tracing.is_argument(source))


def _source(node: torch.fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    return "" if source is None else _name(source)


def _name(source: Any) -> str:
    """As Dynamo writes it."""
    return source.name if isinstance(source.name, str) else source.name()


def _path(module: Variable) -> str:
    """`G['tessera_model']._modules['blocks']._modules['3']` reads `blocks.3`."""
    text = _name(module.source)
    return ".".join(re.findall(r"\['?(\w+)'?\]", text)[1:]) or text


# --- from Dynamo's side ---


def follow_blocks() -> None:
    """From now on, equal blocks are traced once for every backend that has `blocks`."""
    tracing.ask_at_module_calls(_ask, _wrote)


def _ask(tx: Tx, module: Variable, args: list, kwargs: dict, trace: Callable[[], Variable]) -> Variable:
    program = _program(tx.output)
    return trace() if program is None else program.call(tx, module, args, kwargs, trace)


def _wrote(output: object, may_be_module: bool) -> None:
    if (program := _program(output)) is not None:
        program.writes += 1
        program.written |= may_be_module


def _program(output: object) -> Program | None:
    """What is known of the program that Dynamo traces into `output`; None where its backend does not ask for blocks."""
    if not hasattr(output, _PROGRAM):
        blocks = getattr(tracing.backend_of(output), "blocks", None)
        setattr(output, _PROGRAM, Program(blocks) if isinstance(blocks, Blocks) else None)
    return getattr(output, _PROGRAM)


_PROGRAM = "tessera_blocks"
