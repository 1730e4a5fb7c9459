"""Traces as data: written, read, and the same again; what has no form is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from programs import same_bits, trace_of

from tessera import checkpoint, cond, scan
from tessera.ir.builder import Builder
from tessera.ir.equation import NOWHERE, Equation, Special, Value
from tessera.ir.interp import run
from tessera.ir.serial import Reader, Writer
from tessera.ir.serial_size import Sizes
from tessera.ir.trace import Trace
from tessera.ir.types import ScalarType, TensorType
from tessera.ir.verify import verify
from tessera.util.errors import Unserial

X = torch.linspace(-1, 1, 12).view(3, 4)


def again(trace: Trace, held: tuple = (), sizes: Sizes | None = None) -> Trace:
    """Through JSON, read for the same lines and tensors."""
    writer = Writer(held=held)
    number = writer.trace(trace)
    tables = json.loads(json.dumps(writer.tables()))
    places = [tuple(p) for p in tables.pop("places")]
    return Reader({**tables, "places": []}, places, held, sizes).trace(number)  # type: ignore[arg-type]


def _cond(x: torch.Tensor) -> torch.Tensor:
    return cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def _scan(x: torch.Tensor) -> tuple:
    return scan(lambda c, y: (c + y, c * y), x[0], x)


def _checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x.sin().exp())(x) * 2


def _writes(x: torch.Tensor) -> torch.Tensor:
    x[1:].mul_(2)
    return x.sum(0)


PROGRAMS: list[Callable] = [
    lambda x: (x * 2.5 + 1).to(torch.bfloat16).float(),
    lambda x: torch.where(x > 0, x, float("-inf")).amax([0, 1], keepdim=True),
    lambda x: torch.cat([x, -x], 1).split([2, 6], 1),
    lambda x: torch.var_mean(x, 1)[1],
    lambda x: x[:, [0, 2]],
    lambda x: torch.zeros(3, device=x.device, dtype=torch.float64) + x[:, 0],
    lambda x: x.to(memory_format=torch.contiguous_format) * complex(1, 2),
    lambda x: (x.t(), None, 3, "text", 2.5, True),
    lambda x: torch.nn.functional.dropout(x, 0.5),
    _cond,
    _scan,
    _checkpoint,
    _writes,
]


@pytest.mark.parametrize("fn", PROGRAMS)
def test_round_trip(fn: Callable) -> None:
    trace = trace_of(fn, X)
    made = again(trace)
    verify(made)
    assert str(made) == str(trace)
    assert [v.type for v in made.values()] == [v.type for v in trace.values()]
    left, right = X.clone(), X.clone()
    torch.manual_seed(0)
    expected = run(trace, left)
    torch.manual_seed(0)
    found = run(made, right)
    assert all(map(same_bits, found, expected)) and same_bits(left, right)


def test_what_was_one_object_is_one_object() -> None:
    trace = trace_of(lambda x: x * 2 + x, X)
    made = again(trace)
    mul, add = made.equations
    assert mul.args[0] is made.inputs[0] and add.args[1] is made.inputs[0] and add.args[0] is mul.out
    assert made.outputs[0] is add.out


def test_tags_sources_and_offsets() -> None:
    with torch.no_grad():
        trace = trace_of(lambda x: x.sin(), X)
    made = again(trace)
    assert [e.tags for e in made.equations] == [e.tags for e in trace.equations]
    assert [e.source for e in made.equations] == [e.source for e in trace.equations]
    odd = TensorType(torch.float32, (3,), (2,), torch.device("cpu"), offset=5, bits=(False, True))
    x, n = Value("x", odd), Value("n", ScalarType(float))
    found = again(Trace("program", (x, n), (), (x, slice(1, None, 2))))
    assert found.inputs[0].tensor.offset == 5 and found.inputs[0].tensor.bits == (False, True)
    assert found.inputs[1].type == ScalarType(float) and found.outputs[1] == slice(1, None, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan"), -0.0]),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(True),
        torch.ones(1, 3, dtype=torch.bfloat16).expand(2, 3),
        torch.empty(0, 2),
    ],
    ids=["floats", "turned", "bool", "expanded", "empty"],
)
def test_small_constants_are_written_whole(tensor: torch.Tensor) -> None:
    v = Value("c", TensorType(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device))
    made = again(Trace("program", (), (), (v,), {}, {v: tensor}))
    (found,) = made.constants.values()
    assert same_bits(found, tensor) and found.stride() == tensor.stride()


def test_constants_of_the_reader_are_the_readers() -> None:
    held = torch.randn(2000, 100)
    v = Value("c", TensorType(held.dtype, (2000, 100), (100, 1), held.device))
    trace = Trace("program", (), (), (v,), {}, {v: held})
    assert next(iter(again(trace, (held,)).constants.values())) is held
    with pytest.raises(Unserial, match="constant of 200000 elements"):
        again(trace)


def test_symbolic_sizes_belong_to_the_readers_program() -> None:
    trace = trace_of(lambda x: torch.cat([x, x]).reshape(-1, 2, 4).sum(1) * (x.shape[0] / 2), X, dynamic=(0,))
    sizes = [s for v in trace.values() for s in (*v.shape, *v.tensor.stride)]
    made = again(trace, (), Sizes(sizes))
    assert str(made) == str(trace) and made.symbols.keys() == trace.symbols.keys()
    theirs = [s for v in made.values() for s in (*v.shape, *v.tensor.stride)]
    assert list(map(str, theirs)) == list(map(str, sizes))
    assert all(s.node.shape_env is sizes[0].node.shape_env for s in theirs if isinstance(s, torch.SymInt))
    with pytest.raises(Unserial, match="does not belong"):
        again(trace)


def _with(op: object, *args: object) -> Trace:
    builder = Builder("program")
    x = builder.input("x", TensorType(torch.float32, (3,), (1,), torch.device("cpu")))
    out = Value("y", x.type)
    return Trace("program", (x,), (Equation(op, (x, *args), {}, (out,), False, NOWHERE),), (out,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (_with(Special("mine", lambda x: x, "made_here")), "made for one program"),
        (_with(Special("number", lambda x: x)), "made for one program"),
        (_with(torch.ops.aten.add.Tensor, object()), "argument of type object"),
        (_with(torch.ops.aten.add.Tensor, lambda x: x), "argument of type function"),
        (_with(torch.ops.aten.add.Tensor, torch.ones(2)), "argument of type Tensor"),
        (_with(torch.ops.profiler._record_function_enter_new.default), "another library's"),
    ],
    ids=["callable", "name", "object", "function", "tensor", "library"],
)
def test_what_is_not_known_is_refused(trace: Trace, reason: str) -> None:
    with pytest.raises(Unserial, match=reason):
        Writer().trace(trace)


def test_an_operator_that_is_gone_is_refused() -> None:
    writer = Writer()
    writer.trace(trace_of(lambda x: x.sin(), X))
    tables = json.loads(json.dumps(writer.tables()))
    tables["ops"][0][2] = "no_such_operator"
    with pytest.raises((Unserial, AttributeError)):
        Reader(tables).trace(0)
