"""Names of a file that mean something elsewhere: to Python, to modules, to ONNX, or to whoever reads a program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import BOOL, constant, graph, helper, model, node, value

import tessera
from tessera import onnx as tessera_onnx
from tessera.onnx import OnnxError
from tessera.util.errors import InputError

ATTRIBUTES = ("training", "forward", "__class__", "_parameters")
REVERSED = "y\u202e\nimport os  #"


def relu_of_its_own():
    """A function of the file goes before the operator whose name it has."""
    own = helper.make_function("", "Relu", ["x"], ["y"], [node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 21)])
    return model([node("Relu", ["x"], ["y"])], ["x"], ["y"], functions=[own])


def python():
    names = ["x", "class", "__import__('os')", "self"]
    nodes = [node(op, [a], [b]) for op, a, b in zip(("Neg", "Relu", "Neg"), names, names[1:], strict=False)]
    return model(nodes, ["x"], ["self"])


def text_that_turns_around():
    return model([node("Relu", ["x"], [REVERSED]), node("Neg", [REVERSED], ["z"])], ["x"], ["z"])


def one_name_once_cleaned():
    nodes = [node("Relu", ["x"], ["a.b"]), node("Neg", ["x"], ["a_b"]), node("Sub", ["a.b", "a_b"], ["a/b"])]
    return model(nodes, ["x"], ["a/b"])


def attributes_of_modules():
    names = ["x", *(f"y{i}" for i in range(len(ATTRIBUTES)))]
    nodes = [node("Sub", [a, w], [b]) for a, w, b in zip(names, ATTRIBUTES, names[1:], strict=False)]
    weights = [constant(w, np.full(3, 2.0**i, np.float32)) for i, w in enumerate(ATTRIBUTES)]
    return model(nodes, ["x"], [names[-1]], weights)


def inner_name_of_outside():
    inner = graph([node("Relu", ["x"], ["a"])], [], ["a"]), graph([node("Neg", ["x"], ["b"])], [], ["b"])
    choice = node("If", ["c"], ["y"], then_branch=inner[0], else_branch=inner[1])
    nodes = [node("Neg", ["x"], ["a"]), choice, node("Sub", ["y", "a"], ["z"])]
    return model(nodes, ["x"], ["z"], [constant("c", np.array(True))])


RIGHT: dict[Callable, Callable[[torch.Tensor], torch.Tensor]] = {
    relu_of_its_own: lambda x: -x,
    python: lambda x: -(-x).relu(),
    text_that_turns_around: lambda x: -x.relu(),
    one_name_once_cleaned: lambda x: x.relu() + x,
    attributes_of_modules: lambda x: x - 15,
    inner_name_of_outside: lambda x: x.relu() + x,
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_right(make: Callable, compile: bool) -> None:  # noqa: A002
    x = torch.tensor([-1.0, 2.0, 3.0])
    with torch.no_grad():
        torch.testing.assert_close(tessera_onnx.load(make(), compile=compile)(x), RIGHT[make](x))


TAKEN = ("self", "args", "kwargs", "forward", "class", "fn", "input", "module", "training", "values", "x y", "0")


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_inputs_by_names_that_python_uses(name: str, compile: bool) -> None:  # noqa: A002
    x, y = torch.randn(3), torch.randn(3)
    net = tessera_onnx.load(model([node("Sub", [name, "other"], ["z"])], [name, "other"], ["z"]), compile=compile)
    for again in (net, copy.deepcopy(net)):
        torch.testing.assert_close(again(**{name: x, "other": y}), x - y)
        torch.testing.assert_close(again(x, other=y), x - y)
    with pytest.raises(InputError, match="given twice"):
        net(x, **{name: y})


def test_self_everywhere(tmp_path: Path) -> None:
    """Whatever calls a function for its user leaves the name `self` to it."""

    def minus(self: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        return self - fn

    x, y = torch.randn(3), torch.randn(3)
    named = {"self": x, "fn": y}
    torch.testing.assert_close(tessera.jit(minus)(**named), x - y)
    torch.testing.assert_close(tessera.vmap(minus, in_dims=0)(x, y), x - y)
    assert tessera.check(minus, **named).ok
    assert "aten.sub" in str(tessera.trace(minus, **named))
    made = model([node("Sub", ["self", "fn"], ["z"])], [value("self", [3]), value("fn", [3])], ["z"])
    net = tessera_onnx.load(made)
    torch.testing.assert_close(tessera.jit(net)(**named), x - y)
    path = tmp_path / "named.tess"
    tessera.export(net, (), path, kwargs=named)
    torch.testing.assert_close(tessera.load(path)(**named), x - y)


def weight_that_a_node_makes():
    return model([node("Relu", ["x"], ["w"])], ["x"], ["w"], [constant("w", np.ones(3, np.float32))])


def name_from_inside():
    inner = graph([node("Relu", ["x"], ["a"])], [], ["a"]), graph([node("Neg", ["x"], ["b"])], [], ["b"])
    choice = node("If", ["c"], ["y"], then_branch=inner[0], else_branch=inner[1])
    return model([choice, node("Neg", ["a"], ["z"])], ["x", value("c", [], BOOL)], ["z"])


def function_that_takes_a_name_twice():
    body, imports = [node("Neg", ["x"], ["y"])], [helper.make_opsetid("", 21)]
    own = helper.make_function("own", "f", ["x", "x"], ["y"], body, imports)
    return model([node("f", ["x", "x"], ["y"], domain="own")], ["x"], ["y"], functions=[own], own=1)


def two_million_letters():
    return model([node("Relu", ["x"], ["y" * 2_000_000])], ["x"], ["y" * 2_000_000])


REFUSED: dict[Callable, str] = {
    weight_that_a_node_makes: "'w' is defined twice",
    name_from_inside: "'a' is defined nowhere",
    function_that_takes_a_name_twice: "'x' is defined twice",
    two_million_letters: "expected a name",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused(make: Callable) -> None:
    with pytest.raises(OnnxError, match=REFUSED[make]) as told:
        tessera_onnx.load(make())
    assert len(str(told.value)) < 500
