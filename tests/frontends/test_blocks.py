"""Equal blocks of a model are traced once, and what each of them holds stays its own."""

from __future__ import annotations

import cmath
import copy
import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from stacks import Block, Pair, Stack, given, repeats, stack
from torch import Tensor, nn

import tessera


class Normed(nn.Module):
    """A batch norm, whose statistics every call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn(self.conv(x)))


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


def kind(number: int) -> type:
    class Kind:
        value = number

    return Kind


class Choosing(Block):
    """Reads a class, a function, and a list in a list."""

    def __init__(self, chosen: type, root: Callable) -> None:
        super().__init__()
        self.chosen, self.root, self.sizes = chosen, root, [[1], [2]]

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x) * self.chosen.value * self.sizes[0][0] * (2 if self.root is math.sqrt else 3)


def test_classes_and_functions_of_the_same_name() -> None:
    one, two = kind(1), kind(2)
    model = Stack(*(Choosing(c, f) for c, f in ((one, math.sqrt), (one, cmath.sqrt), (two, math.sqrt))))
    torch.testing.assert_close(tessera.jit(model, executors=["aten"])(given()), model(given()))


def test_a_list_in_a_list_that_is_changed() -> None:
    one = kind(1)
    pair = Pair(Stack(*(Choosing(one, math.sqrt) for _ in range(3))))
    pair.check()
    pair.both(lambda m: m.blocks[2].sizes[0].__setitem__(0, 5))  # type: ignore[index]
    pair.check()


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
