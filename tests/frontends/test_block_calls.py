"""Calls of equal blocks: what they share, what they are given, what they do, and what stands around them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from stacks import Block, Pair, Stack, given, repeats, stack
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tessera

# --- what blocks share, and what they are given ---


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


def test_blocks_that_are_called_twice() -> None:
    assert repeats(Twice(Block(), Block(), Block())) == 5


class TwiceOtherwise(Stack):
    """Every block is called in two ways."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = block(x.double().float(), x)
        return x


def test_blocks_that_are_called_in_two_ways() -> None:
    assert repeats(TwiceOtherwise(*(Block() for _ in range(4)))) >= 3


def test_blocks_that_share_a_weight() -> None:
    model = stack(4)
    model.blocks[2].up.weight = model.blocks[1].up.weight  # type: ignore[union-attr]
    model.blocks[3].norm = model.blocks[0].norm  # type: ignore[union-attr]
    pair = Pair(model)
    pair.check()
    pair.check()


class Given(Stack):
    """Gives its blocks a tensor of the program, of its own, or nothing."""

    def __init__(self, *blocks: nn.Module):
        super().__init__(*blocks)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x, doubled = x.sin(), 2 * self.weight
        for i, block in enumerate(self.blocks):
            x = block(x, extra=(None, doubled, self.weight)[i % 3])
        return x


def test_other_arguments() -> None:
    assert repeats(Given(*(Block() for _ in range(6)))) == 3


class Tuples(Block):
    def forward(self, x: tuple[Tensor, Tensor], extra: Tensor | None = None) -> tuple:  # type: ignore[override]
        return super().forward(x[0], x[1]), x[1] + 1, None


class Unpacking(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, y = x.sin(), x * 2
        for block in self.blocks:
            x, y, nothing = block((x, y))
            assert nothing is None
        return x + y


def test_tuples_in_and_out() -> None:
    assert repeats(Unpacking(*(Tuples() for _ in range(5)))) == 4


class InPlace(Block):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        assert extra is not None
        extra.add_(y.detach())
        return y


class Summing(Stack):
    """A sum that all blocks write to."""

    def forward(self, x: Tensor) -> Tensor:
        x, total = x.sin(), torch.zeros_like(x)
        for block in self.blocks:
            x = block(x, total)
        return x + total


def test_a_tensor_that_all_blocks_write_to() -> None:
    assert repeats(Summing(*(InPlace() for _ in range(5)))) == 4


class Around(Stack):
    """Switches, and checkpoints, around its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, *rest = self.blocks
        with torch.no_grad():
            y = second(first(x))
        for block in rest:
            x = checkpoint(block, x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x.float() + y


def test_switches_around_blocks() -> None:
    model = Around(*(Block() for _ in range(4)))
    fast, x = tessera.jit(model, executors=["aten"], strict=True), given()
    plain = copy.deepcopy(model)
    out, expected = fast(x), plain(x)
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)
    out.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=0.2, rtol=0.1)


class Hooked(Block):
    """Sets a hook on a tensor, writes through `.data`, and holds a checkpoint."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        y.register_hook(lambda grad: 2 * grad)
        with torch.no_grad():
            self.up.bias.data.mul_(0.5)
        return y * 2


def test_blocks_that_hold_hooks_and_checkpoints() -> None:
    pair = Pair(Stack(*(Hooked() for _ in range(3))))
    pair.fast = tessera.jit(pair.model, executors=["aten"])
    pair.check()
    pair.check()


class Breaking(Block):
    """Ends Dynamo's graph."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = super().forward(x, extra)
        torch._dynamo.graph_break()
        return y.tanh()


def test_blocks_that_break_the_graph() -> None:
    pair = Pair(Stack(*(Breaking() for _ in range(3))))
    pair.check()
    pair.both(lambda m: setattr(m.blocks[1], "scale", 2.0))  # type: ignore[index]
    pair.check()


class Scripted(Block):
    """Holds a module of another kind, whose tables are no dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.trace(nn.Linear(4, 4), given())

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x, extra) + self.linear(x)


def test_blocks_that_hold_something_of_another_kind() -> None:
    model = Stack(*(Scripted() for _ in range(3)))
    with torch.no_grad():
        torch.testing.assert_close(tessera.jit(model, executors=["aten"])(given()), model(given()))


def test_lazy_blocks() -> None:
    model = Stack(*(nn.Sequential(nn.LazyLinear(4), nn.Tanh()) for _ in range(3)))
    fast = tessera.jit(model, executors=["aten"])
    torch.testing.assert_close(fast(given()), model(given()))


# --- what a block's own code does ---


class Sized(Block):
    """Asks for sizes, and computes what nobody reads: Dynamo takes both out of its graph in the end."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        y = super().forward(x).view(rows, 2, width // 2)
        unread = y[:, -1]  # noqa: F841
        return y.reshape(rows, width) / rows


@pytest.mark.parametrize("train", (True, False))
def test_blocks_that_ask_for_sizes_and_compute_what_nobody_reads(train: bool) -> None:
    pair = Pair(Stack(*(Sized() for _ in range(4))))
    pair.both(lambda m: m.train(train))
    with torch.set_grad_enabled(train):
        for rows in (2, 2, 2, 3, 5):
            pair.check(given(rows, 4))
    assert [graph.repeats for graph in pair.graphs] == [3, 3]


def test_equations_say_which_block_they_come_from() -> None:
    pair = Pair(stack(3))
    pair.check()
    trace = next(stage.trace for stage in tessera.stages(pair.fast) if stage.name == "inline")
    modules = [e.source.module for e in trace.equations if e.opname == "linear"]
    assert modules == [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]


class Drawing(Block):
    """Takes a number from Python's generator."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x) * random.random()


def test_numbers_that_python_draws() -> None:
    model = Stack(*(Drawing() for _ in range(3)))
    fast = tessera.jit(model, executors=["aten"])
    for call in (fast, fast):
        random.seed(1)
        mine = call(given())
        random.seed(1)
        torch.testing.assert_close(mine, model(given()))


_calls = 0


class Global(Block):
    """Counts its calls."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        global _calls
        _calls += 1
        return super().forward(x)


def test_a_global_that_blocks_write() -> None:
    fast = tessera.jit(Stack(*(Global() for _ in range(3))), executors=["aten"])
    before = _calls
    for _ in range(2):
        fast(given())
    assert _calls - before == 6


class Alone(Block):
    """Is given nothing."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return super().forward(self.norm.weight)


class Sum(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum(block() for block in self.blocks)


def test_blocks_without_arguments() -> None:
    assert repeats(Sum(*(Alone() for _ in range(4)))) == 3


class Expanded(Block):
    """Gives a view whose rows are one."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x)[:1].expand(2, 4)


class Asking(Stack):
    """Asks how results lie in memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for block in self.blocks:
            x = block(x)
            x = x * (1 if x.is_contiguous() else 2)
        return x


def test_results_that_lie_as_no_copy_does() -> None:
    Pair(Asking(*(Expanded() for _ in range(4)))).check()


# --- a tensor that a block can reach by another name than its argument's ---

TABLE = torch.arange(4.0)


class Reading(Block):
    """Reads a tensor that all blocks have, and a global one."""

    shared: Tensor

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x, extra) + self.shared + TABLE


class GivenShared(Stack):
    """Gives its first block what that reads itself, and the others something of the same kind."""

    def __init__(self, *blocks: nn.Module, from_global: bool) -> None:
        super().__init__(*blocks)
        self.shared, self.from_global = torch.ones(4), from_global
        for block in blocks:
            block.shared = self.shared  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        first = TABLE if self.from_global else self.shared
        for i, block in enumerate(self.blocks):
            x = block(x, first if i == 0 else first.cos())
        return x


@pytest.mark.parametrize("from_global", (True, False))
def test_an_argument_that_blocks_read_themselves(from_global: bool) -> None:
    pair = Pair(GivenShared(*(Reading() for _ in range(4)), from_global=from_global))
    with torch.no_grad():
        pair.check()


def test_the_programs_input_under_a_second_name() -> None:
    model = GivenShared(*(Reading() for _ in range(4)), from_global=True)
    fast = tessera.jit(model, executors=["aten"])
    with torch.no_grad():
        for x in (TABLE, TABLE * 2, TABLE):
            torch.testing.assert_close(fast(x), model(x))


class Flagged(Block):
    """Reads an attribute of its argument."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x) * (2 if hasattr(x, "flag") else 1)


class Flagging(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == 2:
                x = x * 1
                x.flag = True  # type: ignore[attr-defined]
            x = block(x)
        return x


def test_attributes_of_arguments() -> None:
    model = Flagging(*(Flagged() for _ in range(4)))
    fast, x = tessera.jit(model, executors=["aten"]), given()
    x.flag = True  # type: ignore[attr-defined]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


# --- what stands around a call ---


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return func(*args, **(kwargs or {})) * (2 if func is F.gelu else 1)


class Moded(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        for i, block in enumerate(self.blocks):
            with Doubling() if i == 2 else nullcontext():
                x = block(x)
        return x


def test_modes_of_torch_functions() -> None:
    model = Moded(*(Block() for _ in range(4)))
    torch.testing.assert_close(tessera.jit(model, executors=["aten"])(given()), model(given()))


def test_transforms_and_other_parameters_around_a_model() -> None:
    model, x = stack(), given()
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    for function in (
        lambda x: functional_call(model, doubled, (x,)),
        lambda x: torch.vmap(model)(x),
        lambda x: torch.func.grad(lambda x: model(x).square().sum())(x),
        model,
    ):
        torch.testing.assert_close(tessera.jit(function, executors=["aten"])(x), function(x))
