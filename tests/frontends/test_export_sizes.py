"""Sizes that may change, of arguments in structures, and of those that `*args` and `**kwargs` take."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tessera
from tessera.torch_internals import pytree
from tessera.util.errors import CaptureError, InputError, OptionError

Named = collections.namedtuple("Named", "first second")  # noqa: PYI024


@dataclasses.dataclass
class Fields:
    first: Tensor
    second: Tensor


torch.export.register_dataclass(Fields)

T = torch.ones(3, 4)
STRUCTURES: dict[str, object] = {
    "list": [T, T + 1],
    "tuple": (T, 2),
    "dict": {"second": T},
    "nested": {"more": [T, {"most": (T,)}]},
    "ordered": collections.OrderedDict(second=T, first=T),
    "default": collections.defaultdict(list, second=T),
    "named": Named(T, T + 1),
    "dataclass": Fields(T, T + 1),
    "inside": (1, [Fields(T, T + 1)]),
    "empty": [],
}
DOORS: dict[str, Callable] = {"torch.export": tessera.to_exported, "onnx": tessera.onnx.export}


def total(tree: object) -> Tensor | float:
    if isinstance(tree, Fields):
        tree = (tree.first, tree.second)
    if isinstance(tree, (dict, list, tuple)):
        return sum((total(x) for x in (tree.values() if isinstance(tree, dict) else tree)), 0.0)
    return tree  # type: ignore[return-value]


def added(x: Tensor, more: object) -> Tensor:
    return x + total(more)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_which_nothing_is_said(name: str, tmp_path: Path) -> None:
    def fn(x: Tensor, more: object) -> Tensor:
        return x.sum(0) + total(more)

    more, x = STRUCTURES[name], torch.randn(9, 4)
    program = tessera.to_exported(fn, (T, more), dynamic={"x": {0: "rows"}})
    tessera.export(fn, (T, more), tmp_path / "m.tess", dynamic={"x": {0: "rows"}})
    torch.testing.assert_close(tessera.jit(program)(x, more), fn(x, more))
    torch.testing.assert_close(tessera.load(tmp_path / "m.tess")(x, more), fn(x, more))


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ([T, T], [{0: "n"}, {0: "n"}]),
        ([2.0, T], {1: {0: "n"}}),
        ({"a": 2, "b": T}, {"b": {0: "n"}}),
        (Fields(T, torch.ones(1, 4)), {"first": {0: "n"}}),
        (Named(torch.ones(1, 4), T), {"second": {0: "n"}}),
        ({"a": [T, {"b": T}]}, {"a": [{0: "n"}, {"b": {0: "n"}}]}),
    ],
)
def test_sizes_of_some_members(more: object, sizes: object, tmp_path: Path) -> None:
    tessera.export(added, (T, more), tmp_path / "m.tess", dynamic={"x": {0: "n"}, "more": sizes})
    run = tessera.load(tmp_path / "m.tess")
    for x in (torch.randn(2, 4), torch.randn(5, 4)):
        grown = pytree.tree_map(lambda y, x=x: torch.randn_like(x) if y is T else y, more)
        torch.testing.assert_close(run(x, grown), added(x, grown))


@pytest.mark.parametrize(
    ("more", "sizes", "message"),
    [
        ({"a": T}, {"b": {0: "n"}}, "more has a, got 'b'"),
        ([T], [{0: "n"}, {0: "n"}], "more has 1 members, got sizes of 2"),
        ([T], "n", "more is a list: expected sizes of its members, got 'n'"),
        ([T], [{2: "n"}], "more.0 has 2 dimensions, got 2"),
        (Fields(T, T), {"third": {0: "n"}}, "more has first, second, got 'third'"),
        (T, "n", "more: expected sizes by their dimensions"),
        (T, ("n", None), "more: expected sizes by their dimensions"),
    ],
)
def test_sizes_that_do_not_fit(more: object, sizes: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        tessera.to_exported(added, (T, more), dynamic={"more": sizes})


class Rest(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, *rest: Tensor, bias: Tensor, **more: Tensor) -> Tensor:
        return x * scale + sum(rest) * bias + sum(more.values())


def summed(*xs: Tensor) -> Tensor:
    return sum(xs)  # type: ignore[return-value]


@pytest.mark.parametrize("door", DOORS)
def test_arguments_without_names_of_their_own(door: str, tmp_path: Path) -> None:
    if door == "onnx":
        pytest.importorskip("onnx")
    sizes = {name: {0: "n"} for name in ("x", "rest_0", "rest_1", "late")}
    args, kwargs = (T, 2.0, T.clone(), T.clone()), {"bias": torch.randn(4), "late": T.clone()}
    written = DOORS[door](Rest(), args, kwargs=kwargs, dynamic=sizes)
    run = tessera.onnx.load(written) if door == "onnx" else tessera.jit(written)
    x, y, z, late = torch.randn(4, 5, 4).unbind(0)
    given = (x, y, z) if door == "onnx" else (x, 2.0, y, z)
    got = run(*given, bias=kwargs["bias"], late=late)
    torch.testing.assert_close(got, Rest()(x, 2.0, y, z, bias=kwargs["bias"], late=late))


def test_keys_that_an_artifact_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected texts or numbers as the keys of a dict"):
        tessera.export(lambda x: {True: x + 1}, (T,), tmp_path / "m.tess")


def test_nothing_but_arguments_without_names(tmp_path: Path) -> None:
    tessera.export(summed, (T, T + 1), tmp_path / "m.tess", dynamic={"xs_0": {0: "n"}, "xs_1": {0: "n"}})
    x, y = torch.randn(2, 6, 4).unbind(0)
    torch.testing.assert_close(tessera.load(tmp_path / "m.tess")(x, y), x + y)
    with pytest.raises(OptionError, match="expected one of xs_0, xs_1, got 'xs'"):
        tessera.export(summed, (T, T + 1), tmp_path / "m.tess", dynamic={"xs": {0: "n"}})


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("rows", "tiles", "columns"), [(1, 1, 1), (0, 1, 3), (3, 2, 0)])
def test_sizes_of_0_and_1_stay_open(door: str, rows: int, tiles: int, columns: int) -> None:
    """PyTorch's export makes constants of them."""

    def example(rows: int, tiles: int, columns: int) -> tuple:
        image = torch.randn(rows, 2, 4 * tiles, 3).to(memory_format=torch.channels_last)
        return image, {"ids": [torch.randint(9, (rows, columns))]}

    def fn(image: Tensor, more: dict) -> Tensor:
        return image.mean((1, 2)) + more["ids"][0].sum(1, keepdim=True)

    dynamic = {"image": {0: "rows", 2: "4*tiles"}, "more": {"ids": {0: {0: "rows", -1: ("columns", 0, 9)}}}}
    given = example(rows, tiles, columns)
    program = DOORS[door](fn, given, dynamic=dynamic)
    if door == "onnx":
        shapes = [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in program.graph.input]
        assert shapes == [["rows", 2, "4*tiles", 3], ["rows", "columns"]]
        return
    for sizes in ((1, 1, 1), (2, 3, 0), (3, 1, 4)):
        other = example(*sizes)
        torch.testing.assert_close(program.module()(*other), fn(*other))


def test_examples_that_grow_lie_as_before() -> None:
    x = torch.randn(4, 1, 3, 5).permute(0, 3, 2, 1)
    program = tessera.to_exported(lambda x: x * 2, (x,), dynamic={"x": {3: "n"}})
    (given,) = program.example_inputs[0]
    assert given.shape[:3] == x.shape[:3] and given.stride()[1] == 1 and not program.example_inputs[1]
    assert torch.equal(given[..., 1], x[..., 0])


def test_a_dimension_named_twice() -> None:
    with pytest.raises(OptionError, match="each dimension once, got -1 and 1"):
        tessera.to_exported(total, (T,), dynamic={"tree": {1: "n", -1: "n"}})


class Positions(nn.Module):
    """Rows of a table, one for each place, as encoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.register_buffer("places", torch.arange(16)[None])
        self.register_buffer("kinds", torch.zeros(1, 16, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        kinds = self.kinds[:, : x.shape[1]].expand(x.shape[0], x.shape[1])
        return x + self.table(self.places[:, : x.shape[1]]) + kinds[..., None]


@pytest.mark.parametrize("length", [1, 6])
def test_a_table_ends_an_open_range(length: int, tmp_path: Path) -> None:
    net = Positions().eval()
    dynamic = {"x": {0: "batch", 1: "length"}}
    tessera.export(net, (torch.randn(2, length, 4),), tmp_path / "m.tess", dynamic=dynamic)
    run = tessera.load(tmp_path / "m.tess")
    with torch.no_grad():
        for shape in ((1, 1, 4), (3, 7, 4), (2, 15, 4)):
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), net(x))
        with pytest.raises(InputError, match="expected length from"):
            run(torch.randn(1, 17, 4))


def test_a_number_that_a_size_decides_is_asked_for(tmp_path: Path) -> None:
    """A tensor made of a size alone reads no argument, and yet no two calls agree on it."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(min(x.shape[0], 9)).item()
        torch._check(count >= 0)
        return x[:count] * count

    tessera.export(fn, (torch.ones(4, 3),), tmp_path / "m.tess", dynamic={"x": {0: "rows"}})
    run = tessera.load(tmp_path / "m.tess")
    for rows in (4, 2, 12):
        assert torch.equal(run(torch.ones(rows, 3)), fn(torch.ones(rows, 3)))


def test_a_size_of_1_that_a_model_treats_in_its_own_way_is_told(tmp_path: Path) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == 1 else x.cumsum(0)

    def export(size: object) -> None:
        tessera.export(fn, (torch.ones(4, 3),), tmp_path / "m.tess", dynamic={"x": {0: size}})

    with pytest.raises(CaptureError, match="for rows = 1 in a way of its own: expected a range that begins with 2"):
        export(("rows", 1, 64))
    export("rows")
    run = tessera.load(tmp_path / "m.tess")
    assert torch.equal(run(torch.ones(2, 3)), fn(torch.ones(2, 3)))
    with pytest.raises(InputError, match="rows from 2 to any size, got 1; a model that computes for 1 in a way of"):
        run(torch.ones(1, 3))
