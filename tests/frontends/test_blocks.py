"""Equal blocks of a model are traced once, and what each of them holds stays its own."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tessera


class Block(nn.Module):
    """A norm, two layers, a number that the program reads and one that it does not."""

    def __init__(self, width: int = 4, number: int = 0, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.scale, self.number = 1.0, number

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + self.scale * (y if extra is None else y * extra)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()  # a leaf is a tensor of another kind
        for block in self.blocks:
            x = block(x)
        return x


class Normed(nn.Module):
    """A batch norm, whose statistics every call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn(self.conv(x)))


def stack(count: int = 4, **options: float) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block(number=i, **options) for i in range(count)))  # type: ignore[arg-type]


def given(*shape: int) -> Tensor:
    return torch.randn(*shape or (2, 4), generator=torch.Generator().manual_seed(1))


class Pair:
    """A model that is compiled, and its copy that is not."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        self.fast = tessera.jit(model, executors=["aten"], strict=True)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        change(self.model)
        change(self.plain)

    def check(self, x: Tensor | None = None) -> None:
        """Results, gradients and buffers of one call are equal, and so are random numbers."""
        outs, grads = [], []
        for model, call in ((self.model, self.fast), (self.plain, self.plain)):
            model.zero_grad()
            torch.manual_seed(2)
            own = (given() if x is None else x).clone().requires_grad_()
            out = call(own)
            if out.requires_grad:
                out.square().sum().backward()
            outs.append(out.detach())
            grads.append([own.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*outs)
        for mine, theirs in zip(*grads, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs)
        for mine, theirs in zip(self.model.buffers(), self.plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)

    @property
    def graphs(self) -> list:
        return self.fast.__tessera__.backend.graphs

    @property
    def notes(self) -> dict[str, str]:
        return self.graphs[-1].blocks


def repeats(model: nn.Module, x: Tensor | None = None) -> int:
    """How many calls of blocks were not traced."""
    pair = Pair(model)
    pair.check(x)
    return pair.graphs[-1].repeats


def test_one_of_equal_blocks_is_traced() -> None:
    assert repeats(stack(3)) == 2
    assert repeats(stack(6)) == 5


def test_blocks_in_a_sequence_and_in_nested_lists() -> None:
    def nested(count: int) -> nn.Module:
        lists = [nn.Sequential(*(Block() for _ in range(count))), Stack(*(Block() for _ in range(count)))]
        return nn.Sequential(*lists)

    assert repeats(nested(2)) == 2  # the first is given a leaf
    assert repeats(nested(4)) == 6


def test_running_statistics() -> None:
    pair = Pair(nn.Sequential(*(Normed() for _ in range(3))))
    x = given(2, 3, 4, 4)
    for _ in range(2):
        pair.check(x)
    pair.both(lambda m: m.eval())
    pair.check(x)
    pair.both(lambda m: m.train())
    pair.check(x)
    assert len(pair.graphs) == 2  # one for each mode


def test_random_numbers_are_drawn_in_each_block() -> None:
    assert repeats(stack(3, dropout=0.5)) == 2


# --- what is changed after compiling ---


def scaled(model: nn.Module) -> None:
    model.blocks[2].scale = 3.0  # type: ignore[index,union-attr]


def hooked(model: nn.Module) -> None:
    model.blocks[2].register_forward_hook(lambda module, args, out: 2 * out)  # type: ignore[index,union-attr]


def inner_hooked(model: nn.Module) -> None:
    model.blocks[3].up.register_forward_pre_hook(lambda module, args: (2 * args[0],))  # type: ignore[index,union-attr]


def frozen(model: nn.Module) -> None:
    model.blocks[2].up.weight.requires_grad_(False)  # type: ignore[index,union-attr]


def replaced_block(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.blocks[2] = Block()  # type: ignore[index,operator]


def replaced_layer(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.blocks[2].norm = nn.Identity()  # type: ignore[index,union-attr]


def replaced_weight(model: nn.Module) -> None:
    model.blocks[2].up.weight = nn.Parameter(torch.ones(8, 4))  # type: ignore[index,union-attr]


def replaced_data(model: nn.Module) -> None:
    model.blocks[2].up.weight.data = torch.ones(8, 4)  # type: ignore[index,union-attr]


def other_kind_of_data(model: nn.Module) -> None:
    model.blocks[2].up.weight.data = torch.ones(4, 8).t()  # type: ignore[index,union-attr]


def without_bias(model: nn.Module) -> None:
    model.blocks[2].up.bias = None  # type: ignore[index,union-attr]


def other_forward(model: nn.Module) -> None:
    model.blocks[2].forward = lambda x: x * 2  # type: ignore[index,union-attr]


def evaluating(model: nn.Module) -> None:
    model.blocks[2].eval()  # type: ignore[index,union-attr]


def one_block_less(model: nn.Module) -> None:
    del model.blocks[1]  # type: ignore[operator,union-attr]


def reversed_blocks(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(reversed(list(model.blocks)))  # type: ignore[arg-type]


def tied(model: nn.Module) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight  # type: ignore[index,union-attr]


CHANGES = (
    scaled, hooked, inner_hooked, frozen, replaced_block, replaced_layer, replaced_weight, replaced_data,
    other_kind_of_data, without_bias, other_forward, evaluating, one_block_less, reversed_blocks, tied,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_of_one_block_is_seen(change: Callable[[nn.Module], object]) -> None:
    pair = Pair(stack(4, dropout=0.5))
    pair.check()
    pair.both(change)
    pair.check()
    pair.check()


def test_another_weight_of_the_same_kind_compiles_nothing() -> None:
    pair = Pair(stack())
    pair.check()
    pair.both(replaced_weight)
    pair.check()
    pair.both(lambda m: setattr(m.blocks[2], "number", 9))  # type: ignore[index]
    pair.check()
    assert len(pair.graphs) == 1


def test_double_precision_for_all() -> None:
    pair = Pair(stack())
    pair.check()
    pair.both(lambda m: m.double())
    pair.check(given().double())


# --- blocks that differ ---


def test_a_number_that_nobody_reads_may_differ() -> None:
    pair = Pair(stack())
    pair.check()
    assert not pair.notes


def test_explain_says_in_what_blocks_differ() -> None:
    model = stack()
    model.blocks[2].scale = 2.0  # type: ignore[union-attr]
    pair = Pair(model)
    pair.check()
    assert pair.notes == {"blocks.2": "scale is 2.0, not 1.0"}
    assert "blocks.2" in str(tessera.explain(pair.fast)) and "scale is 2.0" in str(tessera.explain(pair.fast))


def test_blocks_of_other_shapes() -> None:
    torch.manual_seed(0)
    model = Stack(*(Block() for _ in range(3)))
    model.blocks[1].up, model.blocks[1].down = nn.Linear(4, 5), nn.Linear(5, 4)  # type: ignore[union-attr]
    pair = Pair(model)
    pair.check()
    assert "up.out_features" in pair.notes["blocks.1"] or "up.weight" in pair.notes["blocks.1"]


class Counting(Block):
    """Writes to itself."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        self.number += 1
        return super().forward(x, extra) * self.number


def test_a_block_that_writes_to_itself() -> None:
    pair = Pair(Stack(*(Counting() for _ in range(3))))
    for _ in range(3):
        pair.check()
    assert [b.number for b in pair.model.blocks] == [3, 3, 3]  # type: ignore[union-attr]


class Setting(Stack):
    """Writes to its blocks while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            block.scale = i + 0.5  # type: ignore[assignment]
            x = block(x)
        return x


def test_a_model_that_writes_to_its_blocks() -> None:
    pair = Pair(Setting(*(Block() for _ in range(3))))
    for _ in range(2):
        pair.check()


class Numbered(Block):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x, extra) * (self.number + 1)


def test_a_number_that_is_read() -> None:
    pair = Pair(Stack(*(Numbered(number=i) for i in range(3))))
    pair.check()
    assert pair.notes["blocks.1"] == "number is 1, not 0"


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


# --- how they are called ---


def test_sizes_that_change() -> None:
    pair = Pair(stack())
    for n in (2, 3, 5, 7):
        pair.check(given(n, 4))
    assert len(pair.graphs) == 2


def test_a_function_around_a_model() -> None:
    model, x = stack(), given()
    fast = tessera.jit(lambda x: model(x).sin(), executors=["aten"], strict=True)
    torch.testing.assert_close(fast(x), model(x).sin())
    model.blocks[3].scale = 2.0  # type: ignore[union-attr]
    torch.testing.assert_close(fast(x), model(x).sin())
    assert fast.__tessera__.backend.graphs[0].repeats == 2  # the first one is given no gradient


def test_models_as_arguments_share_a_program() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    fast = tessera.jit(run, executors=["aten"], strict=True)
    for seed in range(3):
        torch.manual_seed(seed)
        model = Stack(*(Block() for _ in range(3)))
        torch.testing.assert_close(fast(model, given()), model(given()))
    assert len(fast.__tessera__.backend.graphs) == 1


def test_forward_mode_runs_the_graph_as_it_is() -> None:
    pair = Pair(stack())
    pair.check()
    x, tangent = given(), torch.ones(2, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        mine = torch.autograd.forward_ad.unpack_dual(pair.fast(dual)).tangent
        theirs = torch.autograd.forward_ad.unpack_dual(pair.plain(dual)).tangent
    torch.testing.assert_close(mine, theirs)


def test_second_derivatives() -> None:
    pair, x = Pair(stack(3)), given()
    grads = []
    for call in (pair.fast, pair.plain):
        own = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(own).square().sum(), own, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), own)[0])
    torch.testing.assert_close(*grads)


def test_train_step() -> None:
    model = stack()
    plain = copy.deepcopy(model)
    own, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), own, executors=["aten"], strict=True)
    for _ in range(3):
        loss = step(given())
        theirs.zero_grad()
        expected = plain(given()).square().mean()
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_model_goes_when_nobody_needs_it() -> None:
    model = stack()
    fast = tessera.jit(model, executors=["aten"])
    fast(given())
    gone = [weakref.ref(model), weakref.ref(model.blocks[2]), weakref.ref(model.blocks[2].up.weight)]  # type: ignore[union-attr]
    del model, fast
    gc.collect()
    assert [r() for r in gone] == [None, None, None]
