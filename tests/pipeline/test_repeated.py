"""Deep programs that are compiled as short ones: they are the programs that the pipeline makes of every layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from stacks import Block, Pair, Stack, given, stack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.ir.equation import Special, Value
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.pipeline import compilation as compilations
from tessera.pipeline.account import Program
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.shorten import shortened
from tessera.pipeline.stretch import NotRepeated, Stretched
from tessera.store.program import COUNTS

DEPTH = 14


@pytest.fixture(autouse=True)
def compiled() -> Iterator[list[Compilation]]:
    """What is compiled meanwhile. Nobody looks at stages: then every layer would be compiled."""
    seen: list[Compilation] = []
    compilations.WATCHERS.append(seen.append)
    with tessera.override(verify=False, dump="", log=0, autotune=False):
        yield seen
    compilations.WATCHERS.remove(seen.append)


class Images(nn.Module):
    """Blocks with batch norms, whose buffers the program writes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Counting(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.layer(x).tanh() * self.calls


class AttentionBlock(nn.Module):
    """A rotation that is the same in all layers, a product by heads, a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(8), nn.Linear(8, 24, bias=False)
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        turn = torch.arange(5, dtype=torch.float32).cos()[:, None]
        x = x + nn.functional.scaled_dot_product_attention(q * turn, k * turn, v).transpose(1, 2).reshape(-1, 5, 8)
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def attention(depth: int) -> Stack:
    torch.manual_seed(0)
    return Stack(*(AttentionBlock() for _ in range(depth)))


def two_kinds() -> Stack:
    return Stack(*stack(DEPTH).blocks, nn.Sequential(nn.Linear(4, 4), nn.Tanh()), *(Counting() for _ in range(DEPTH)))


# Many rows: weights' gradients are smaller than what they are made of, and are computed at once, layer by layer.
MODELS = {
    "linear": (lambda: stack(DEPTH), (64, 4)),
    "dropout": (lambda: stack(DEPTH, dropout=0.3), (64, 4)),
    "batch norm": (lambda: Images(DEPTH), (64, 4)),
    "attention": (lambda: attention(DEPTH), (64, 5, 8)),
    "two kinds": (two_kinds, (64, 4)),
}


def wired(trace: Trace, values: dict[Value, object]) -> list[object]:
    """The program without names: operators, and where what they read was made. `values` says it of the inputs."""
    values |= {v: ("constant", tuple(t.flatten().tolist())) for v, t in trace.constants.items()}
    lines: list[object] = []
    for i, eqn in enumerate(trace.equations):
        op = eqn.op
        callee = (op.namespace, op.of, op.recipe and len(op.recipe.body.equations)) if isinstance(op, Special) else op
        lines.append((callee, [values[v] for v in eqn.inputs()]))
        values |= {v: (trace.name, i, k) for k, v in enumerate(eqn.outputs) if v is not None}
    return [*lines, {values[target]: values[v] for target, v in trace.mutations.items()}]


def wiring(compilation: Compilation, programs: list[Program] | None = None) -> list[object]:
    """All programs of a compilation; backward's inputs are what forward saved, whatever their order."""
    bridge = compilation.executable.ends.bridge
    forward, *others = [p.trace for p in programs or compilation.programs]
    values: dict[Value, object] = {v: ("input", i) for i, v in enumerate(forward.inputs)}
    lines = wired(forward, values)
    for backward in others:
        assert bridge is not None
        saved = forward.outputs[bridge.results :]
        given_: dict[Value, object] = {v: values[s] for v, s in zip(backward.inputs, saved, strict=False)}  # type: ignore[index]
        given_ |= {v: ("cotangent", i) for i, v in enumerate(backward.inputs[len(saved) :])}
        lines += wired(backward, given_)
        lines.append([None if g is None else given_[g] for g in backward.outputs])  # type: ignore[index]
    return lines


def run(model: nn.Module, x: Tensor, executors: list[str] | None, dynamic: bool) -> None:
    torch.manual_seed(3)
    tessera.jit(model, executors=executors, strict=True, dynamic=dynamic)(x.clone()).square().sum().backward()


@pytest.mark.parametrize(
    "name, executors, dynamic",
    [
        ("linear", None, False),
        ("linear", None, True),
        ("dropout", ["aten"], False),
        ("attention", ["aten"], False),
        ("attention", ["aten"], True),
        ("two kinds", ["aten"], False),
    ],
)
def test_programs_are_those_of_every_layer(name, executors, dynamic, compiled, monkeypatch):
    make, shape = MODELS[name]
    model, x = make(), given(*shape)
    whole = copy.deepcopy(model)
    run(model, x, executors, dynamic)
    monkeypatch.setattr(Compilation, "shortens", False)
    run(whole, x, executors, dynamic)
    short, every = compiled
    assert short._stretched is not None and every._stretched is None
    for program in short.programs:
        verify(program.trace)
    assert wiring(short) == wiring(every)
    assert short.executable.ends.layout == every.executable.ends.layout
    mine, theirs = short.executable.ends.bridge, every.executable.ends.bridge
    assert mine is not None and theirs is not None and sorted(mine.own) == sorted(theirs.own)
    for field in ("results", "pulled", "wrt", "inputs", "unsaved", "reached", "cut", "edges", "merges", "contiguous"):
        assert getattr(mine, field) == getattr(theirs, field), field
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, q.grad), name
    for p, q in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["dropout", "batch norm", "two kinds"])
def test_eager(name):
    make, shape = MODELS[name]
    pair = Pair(make().double())
    pair.check(given(*shape).double())
    pair.check(given(*shape).double() * 2)


def test_without_gradients(compiled):
    model = stack(DEPTH)
    with torch.no_grad():
        out = tessera.jit(model, executors=["aten"], strict=True)(given())
        torch.testing.assert_close(out, model(given()))
    assert compiled[0]._stretched is not None


def test_any_size(compiled):
    model = attention(DEPTH)
    fast = tessera.jit(model, dynamic=True, strict=True)
    with torch.no_grad():
        for rows in (64, 3, 7):
            x = given(rows, 5, 8)
            torch.testing.assert_close(fast(x), model(x))
    assert len(compiled) == 1 and compiled[0].captured.trace.symbols and compiled[0]._stretched is not None


def layers(captured: list[Compilation]) -> int:
    """How many layers were left out of the compilation."""
    level = shortened(captured[-1].captured)
    return 0 if level is None else level.gone


def test_layers_that_want_no_gradient(compiled):
    pair = Pair(stack(DEPTH))
    pair.both(lambda m: m.blocks[6].up.weight.requires_grad_(False))  # type: ignore[union-attr,index]
    pair.check()
    assert layers(compiled) == 0
    pair = Pair(stack(DEPTH))
    pair.both(lambda m: [p.requires_grad_(False) for p in m.parameters()])
    pair.check()
    assert layers(compiled) > 0 and compiled[-1]._stretched is not None


def test_a_weight_that_two_layers_share(compiled):
    model = stack(DEPTH)
    model.blocks[9].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr]
    Pair(model).check()
    assert layers(compiled) == 0


def test_a_weight_that_all_layers_share(compiled):
    model = stack(DEPTH)
    for block in model.blocks:
        block.up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    Pair(model).check()


def test_a_result_of_every_layer():
    class Every(Stack):
        def forward(self, x: Tensor) -> Tensor:
            states = [x]
            for block in self.blocks:
                states.append(block(states[-1]))
            return torch.stack(states)

    Pair(Every(*stack(DEPTH).blocks)).check()


def test_checkpoints():
    class Again(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    Pair(Again(*stack(DEPTH).blocks)).check()


def test_layers_of_other_sizes(compiled):
    blocks = [Block(number=i) for i in range(7)], [Block(number=i) for i in range(7)]
    blocks[0][3].scale = 2.0
    Pair(Stack(*blocks[0], *blocks[1])).check()
    assert layers(compiled) == 0


def second_gradients(model: nn.Module, call) -> list[Tensor]:
    x = given(64, 4).double().requires_grad_()
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("times", [1, 2], ids=["compiled", "stored"])
def test_a_gradient_of_a_gradient(times, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    eager = stack(DEPTH).double()
    with tessera.override(program_cache=True):
        for _ in range(times):
            torch.compiler.reset()
            model, loaded = stack(DEPTH).double(), COUNTS["loaded"]
            mine = second_gradients(model, tessera.jit(model, executors=["aten"], strict=True))
    assert COUNTS["loaded"] - loaded >= times - 1
    assert times > 1 or compiled[0]._stretched is not None
    for a, b in zip(mine, second_gradients(eager, eager), strict=True):
        torch.testing.assert_close(a, b)


def test_stages_show_every_layer(compiled):
    model = stack(DEPTH)
    fast = tessera.jit(model, executors=["aten"], strict=True)
    before = fast(given(64, 4))
    assert compiled[0]._stretched is not None
    captured = tessera.stages(fast)[0].trace
    assert len(captured.inputs) >= DEPTH * 6
    account = compiled[0].account
    assert wiring(compiled[0], account.programs) == wiring(compiled[0])
    modules = {eqn.source.module for p in account.programs for eqn in p.trace.equations}
    assert {f"blocks.{i}.up" for i in range(DEPTH)} <= modules
    torch.testing.assert_close(fast(given(64, 4)), before)
    compiled[0].edit("dce", dict(account.stages)["dce"])
    assert compiled[0]._stretched is None
    torch.testing.assert_close(fast(given(64, 4)), before)


def test_a_program_that_does_not_repeat_itself_is_refused(compiled):
    model = stack(DEPTH)
    tessera.jit(model, executors=["aten"], strict=True)(given())
    level = shortened(compiled[0].captured)
    assert level is not None
    trace = level.short.trace
    Stretched(trace, level.chains, level.gone, 1)
    places = [i for i, eqn in enumerate(trace.equations) if eqn.opname == "gelu"]
    changed = list(trace.equations)
    for place in places[1::2]:
        changed[place] = changed[place].with_(op=torch.ops.aten.sigmoid.default)
    with pytest.raises(NotRepeated):
        Stretched(trace.with_(equations=tuple(changed)), level.chains, level.gone, 1)
