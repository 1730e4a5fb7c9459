"""`tessera.onnx.load`: calling, names, sizes, structure, training, what is told of it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import BOOL, FLOAT, INT64, STRING, constant, graph, helper, model, node, onnx, value

import tessera
from tessera import onnx as tessera_onnx
from tessera.frontends.onnx.registry import forget
from tessera.onnx import Limits, OnnxError
from tessera.util.errors import InputError


def compiled_graphs(net) -> int:
    return len(net.__tessera__.compilations())


def reasons(net) -> list[str]:
    return [g.eager_reason for g in tessera.explain(net).eager]


def mlp():
    rng = np.random.default_rng(0)
    weights = [
        constant("layer.0.weight", rng.standard_normal((8, 4)).astype(np.float32)),
        constant("layer.0.bias", rng.standard_normal(8).astype(np.float32)),
        constant("layer.2.weight", rng.standard_normal((3, 8)).astype(np.float32)),
    ]
    nodes = [
        helper.make_node("Gemm", ["input", "layer.0.weight", "layer.0.bias"], ["h"], name="/layer.0/Gemm", transB=1),
        helper.make_node("Relu", ["h"], ["r"], name="/layer.1/Relu"),
        helper.make_node("Gemm", ["r", "layer.2.weight"], ["logits"], name="/layer.2/Gemm", transB=1),
    ]
    return model(nodes, [value("input", ["batch", 4])], ["logits"], weights)


def by_hand(net, x: torch.Tensor) -> torch.Tensor:
    state = net.state_dict()
    hidden = torch.relu(x @ state["layer.0.weight"].T + state["layer.0.bias"])
    return hidden @ state["layer.2.weight"].T


# --- calling ---


def test_inside_a_model_that_is_compiled() -> None:
    """Dynamo, a transform and PyTorch's export meet an imported graph among other layers."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.net = torch.nn.Linear(4, 4), tessera_onnx.load(mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(input=self.first(x)).tanh()

    own, x = Own(), torch.randn(5, 4)
    expected = by_hand(own.net, own.first(x)).tanh()
    weight = own.first.weight
    (wanted,) = torch.autograd.grad(expected.sum(), weight)
    for run in (own, tessera.jit(own), torch.export.export(own, (x,)).module()):
        got = run(x)
        torch.testing.assert_close(got, expected)
    (grad,) = torch.autograd.grad(tessera.jit(own)(x).sum(), weight)
    torch.testing.assert_close(grad, wanted)


def test_compiled_once_more() -> None:
    net, x = tessera_onnx.load(mlp()), torch.randn(5, 4)
    fast = tessera.jit(net)
    for got in (fast(x), fast(input=x), tessera.jit(lambda y: net(y) + 1)(x) - 1):
        torch.testing.assert_close(got, by_hand(net, x))


def test_by_position_and_by_name(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    net, x = tessera_onnx.load(tmp_path / "mlp.onnx"), torch.randn(5, 4)
    expected = by_hand(net, x)
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(net(input=x), expected)
    assert net.input_names == ("input",) and net.output_names == ("logits",)


def test_state_has_the_names_of_the_file() -> None:
    net = tessera_onnx.load(mlp())
    assert set(dict(net.named_parameters())) == {"layer.0.weight", "layer.0.bias", "layer.2.weight"}
    other = torch.nn.Sequential()
    other.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3, bias=False))
    net.load_state_dict(other.state_dict())
    x = torch.randn(2, 4)
    torch.testing.assert_close(net(x), other.layer(x))


def test_wrong_inputs_are_told() -> None:
    net = tessera_onnx.load(mlp())
    with pytest.raises(InputError, match=r"expected the shape \[batch, 4\], got \[2, 5\]"):
        net(torch.randn(2, 5))
    with pytest.raises(InputError, match="expected torch.float32, got torch.float64"):
        net(torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(InputError, match="unknown input 'image'; the inputs are input"):
        net(image=torch.randn(2, 4))
    with pytest.raises(InputError, match="'input' is missing"):
        net()
    with pytest.raises(InputError, match="given twice"):
        net(torch.randn(2, 4), input=torch.randn(2, 4))


def test_an_initializer_that_is_an_input_may_be_given() -> None:
    made = model([node("Add", ["x", "w"], ["y"])], ["x", "w"], ["y"], [constant("w", np.ones(2, np.float32))])
    net, x = tessera_onnx.load(made), torch.zeros(2)
    assert net(x).tolist() == [1, 1]
    assert net(x, w=torch.full((2,), 5.0)).tolist() == [5, 5]


def test_bytes_and_messages() -> None:
    made, x = mlp(), torch.randn(2, 4)
    torch.testing.assert_close(tessera_onnx.load(made)(x), tessera_onnx.load(made.SerializeToString())(x))


# --- programs ---


def test_the_program_reads_like_pytorch(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    net = tessera_onnx.load(tmp_path / "mlp.onnx")
    net(torch.randn(5, 4))
    text = str(tessera.stages(net)["captured"])
    assert "aten.linear(input, layer_0_weight, layer_0_bias)" in text
    assert "mlp.onnx:0 /layer.0/Gemm (Gemm)" in text and "/layer.1/Relu (Relu)" in text


def test_one_program_serves_every_batch() -> None:
    net = tessera_onnx.load(mlp())
    for n in (5, 3, 17):
        x = torch.randn(n, 4)
        torch.testing.assert_close(net(x), by_hand(net, x))
    assert compiled_graphs(net) == 1


def test_strides_are_looked_at() -> None:
    made = model([node("Exp", ["x"], ["y"])], [value("x", ["n", "m"])], ["y"])
    net = tessera_onnx.load(made)
    for x in (torch.randn(4, 6), torch.randn(8, 3).T, torch.randn(5, 7), torch.randn(6, 4).T, torch.randn(9, 4)[::2]):
        torch.testing.assert_close(net(x), torch.exp(x))


def test_sizes_are_arithmetic() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    given = [constant("zero", np.int64(0)), constant("axes", np.array([0])), constant("rest", np.array([2, -1]))]
    net = tessera_onnx.load(model(nodes, [value("x", ["n", 6])], ["y"], given))
    for n in (4, 7):
        x = torch.randn(n, 6)
        torch.testing.assert_close(net(x), x.reshape(n, 2, 3))
    (compilation,) = net.__tessera__.compilations()
    operators = [str(e.op) for e in compilation.captured.trace.equations]
    assert set(operators) <= {"aten.reshape.default", "tessera.number"}  # a view may be made outside, of a number


def test_the_end_of_a_slice_bounds_a_size(tmp_path: Path) -> None:
    """Positions up to a length are sliced off a table; the length stays a size."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["positions", "zero", "s", "zero"], ["used"]),
        node("Cast", ["used"], ["floats"], to=FLOAT),
        node("Add", ["x", "floats"], ["y"]),
    ]
    given = [constant("zero", np.array([0])), constant("positions", np.arange(9))]
    imported = tessera_onnx.load(model(nodes, [value("x", ["length"])], ["y"], given))
    x = torch.zeros(9)
    for n in (3, 5, 9):
        assert imported(x[:n]).tolist() == list(range(n))
    assert len(tessera.explain(imported).graphs) == 1
    tessera.export(imported, (x[:4],), tmp_path / "positions.tess")
    fast = tessera.load(tmp_path / "positions.tess")
    assert fast(x[:2]).tolist() == [0.0, 1.0]
    with pytest.raises(RuntimeError, match=r"Min\(9, s\d+\).*= 10"):  # the program's own check
        fast(torch.zeros(10))


def test_a_value_that_decides_a_size_is_read() -> None:
    made = model([node("Reshape", ["x", "s"], ["y"])], ["x", value("s", [2], INT64)], ["y"])
    net, x = tessera_onnx.load(made), torch.arange(6.0)
    assert net(x, torch.tensor([2, 3])).shape == (2, 3)
    assert net(x, torch.tensor([3, -1])).shape == (3, 2)
    assert net(x, torch.tensor([2, 3])).shape == (2, 3)
    assert compiled_graphs(net) == 2


def test_past_the_bound_the_interpreter_runs() -> None:
    made = model([node("Tile", ["x", "n"], ["y"])], ["x", value("n", [1], INT64)], ["y"])
    net = tessera_onnx.load(made, limits=Limits(programs=2))
    for n in (1, 2, 3, 4):
        assert net(torch.ones(2), torch.tensor([n])).shape == (2 * n,)
    assert compiled_graphs(net) == 2
    assert any("more than 2 programs" in reason for reason in reasons(net))


def test_what_is_interpreted_is_told() -> None:
    nodes = [
        node("Relu", ["x"], ["r"]),
        helper.make_node("NonZero", ["r"], ["z"], name="find"),
        node("Cast", ["z"], ["y"], to=1),
    ]
    net = tessera_onnx.load(model(nodes, ["x"], ["y"]))
    x = torch.tensor([[1.0, -1.0], [0.0, 2.0]])
    assert net(x).tolist() == [[0, 1], [0, 1]]
    (reason,) = reasons(net)
    assert "node 1 (NonZero, 'find')" in reason and "how many results" in reason
    assert compiled_graphs(net) == 2  # before it and behind it


# --- structure ---


def branch(op: str, out: str):
    return graph([node(op, ["x"], [out])], [], [out], name=op)


def test_if_on_a_value_that_is_computed() -> None:
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["y"], then_branch=branch("Exp", "a"), else_branch=branch("Neg", "b")),
    ]
    net = tessera_onnx.load(model(nodes, ["x"], ["y"], [constant("zero", np.float32(0))]))
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(net(x), torch.exp(x) if x.sum() > 0 else -x)
    assert compiled_graphs(net) == 1 and "cond" in str(tessera.stages(net)["captured"])


def test_loop_over_outer_values() -> None:
    body = graph(
        [node("Add", ["a", "x"], ["b"]), node("Identity", ["c"], ["d"]), node("Identity", ["b"], ["row"])],
        [value("i", [], INT64), value("c", [], BOOL), "a"],
        [value("d", [], BOOL), "b", "row"],
    )
    given = [constant("n", np.int64(3)), constant("go", np.array(True)), constant("start", np.zeros(2, np.float32))]
    net = tessera_onnx.load(
        model([node("Loop", ["n", "go", "start"], ["y", "rows"], body=body)], ["x"], ["y", "rows"], given)
    )
    x = torch.tensor([1.0, 2.0])
    y, rows = net(x)
    torch.testing.assert_close(y, 3 * x)
    torch.testing.assert_close(rows, torch.stack([x, 2 * x, 3 * x]))
    assert not reasons(net)


def test_functions_of_the_file_with_attributes_and_overloads() -> None:
    imports = [helper.make_opsetid("", 21)]
    scaled = node("Elu", ["x"], ["y"])
    scaled.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    first = helper.make_function("own", "f", ["x"], ["y"], [scaled], imports, ["slope"])
    second = helper.make_function("own", "f", ["x"], ["y"], [node("Neg", ["x"], ["y"])], imports, overload="negative")
    calls = [node("f", ["x"], ["a"], domain="own", slope=3.0), node("f", ["a"], ["y"], domain="own")]
    calls[1].overload = "negative"
    net, x = tessera_onnx.load(model(calls, ["x"], ["y"], functions=[first, second], own=1)), torch.randn(5)
    torch.testing.assert_close(net(x), -torch.nn.functional.elu(x, 3.0))


def test_an_operator_without_a_function_of_ours_is_expanded() -> None:
    made = model([node("SwiGLU", ["a", "b"], ["y"])], ["a", "b"], ["y"], opset=28)
    net, (a, b) = tessera_onnx.load(made), torch.randn(2, 3, 4)
    torch.testing.assert_close(net(a, b), torch.nn.functional.silu(a) * b)


def test_sparse_initializers() -> None:
    made = model([node("Add", ["x", "w"], ["y"])], ["x"], ["y"])
    values, places = constant("w", np.array([2.0, 3.0], np.float32)), constant("i", np.array([[0, 1], [1, 0]]))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2, 2]))
    assert tessera_onnx.load(made)(torch.zeros(2, 2)).tolist() == [[0, 2], [3, 0]]


def test_strings_and_tensors_in_one_graph() -> None:
    nodes = [node("StringConcat", ["a", "b"], ["s"]), node("Relu", ["x"], ["y"])]
    texts = [value("a", [2], STRING), value("b", [2], STRING)]
    net = tessera_onnx.load(model(nodes, [*texts, "x"], [value("s", [2], STRING), "y"]))
    s, y = net(np.array(["x", "y"]), np.array(["1", "2"]), torch.tensor([-1.0, 1.0]))
    assert s.tolist() == ["x1", "y2"] and y.tolist() == [0, 1]


def test_sequences_are_lists() -> None:
    nodes = [
        node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=0),
        node("ConcatFromSequence", ["s"], ["y"], axis=0),
    ]
    net, x = tessera_onnx.load(model(nodes, ["x"], ["y"])), torch.arange(6.0).reshape(2, 3)
    assert net(x).tolist() == x.reshape(-1).tolist() and not reasons(net)


@pytest.mark.parametrize("code", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1])
def test_elements_of_four_bits(code: int) -> None:
    packed = helper.make_tensor("w", code, [3], [1, 2, 3])
    made = model([node("Cast", ["w"], ["y"], to=1)], [], ["y"], [packed], opset=23)
    assert tessera_onnx.load(made)().tolist() == [1, 2, 3]


@pytest.mark.parametrize("code", [27, 28])
def test_elements_of_six_bits(code: int) -> None:
    """Raw data packs four of them into three bytes, int32_data has a number for each."""
    elements = [1.0, 2.0, -1.0, 0.5, 3.0]
    typed = helper.make_tensor("k", code, [5], elements)
    raw = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(typed), "k")
    for held in (typed, raw):
        net = tessera_onnx.load(model([node("Cast", ["k"], ["y"], to=FLOAT)], [], ["y"], [held]))
        assert net().tolist() == elements
    typed.int32_data[0] = 64
    with pytest.raises(OnnxError, match="'k': expected patterns of 6 bits in int32_data"):
        tessera_onnx.load(model([node("Cast", ["k"], ["y"], to=FLOAT)], [], ["y"], [typed]))


def test_metadata() -> None:
    made = mlp()
    helper.set_model_props(made, {"author": "somebody"})
    assert tessera_onnx.load(made).metadata == {"author": "somebody"}


# --- training ---


def test_gradients_are_pytorchs() -> None:
    net, x = tessera_onnx.load(mlp()), torch.randn(6, 4, requires_grad=True)
    net(x).square().sum().backward()
    ours = {name: p.grad for name, p in net.named_parameters()}
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    y = x.detach().clone().requires_grad_()
    hidden = torch.relu(y @ weights["layer.0.weight"].T + weights["layer.0.bias"])
    (hidden @ weights["layer.2.weight"].T).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, p in weights.items():
        torch.testing.assert_close(ours[name], p.grad)


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    net = tessera_onnx.load(mlp()).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, target = torch.randn(16, 4), torch.randint(0, 3, (16,))
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(net(x), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0] and compiled_graphs(net) == 1


def test_gradients_flow_past_an_interpreted_node() -> None:
    nodes = [node("Mul", ["x", "w"], ["a"]), node("Compress", ["a", "keep"], ["b"], axis=0), node("Exp", ["b"], ["y"])]
    made = model(nodes, ["x", value("keep", [3], BOOL)], ["y"], [constant("w", np.ones(3, np.float32))])
    net, keep = tessera_onnx.load(made), torch.tensor([True, False, True])
    net(torch.ones(3), keep).sum().backward()
    torch.testing.assert_close(net.w.grad, torch.exp(torch.ones(3)) * keep)


def test_statistics_and_scalars_are_not_trained() -> None:
    rng = np.random.default_rng(0)
    given = [constant(n, rng.random(2, np.float32) + 1) for n in ("scale", "bias", "mean", "var")]
    nodes = [node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["a"]), node("Mul", ["a", "two"], ["y"])]
    net = tessera_onnx.load(model(nodes, ["x"], ["y"], [*given, constant("two", np.float32(2))]))
    assert set(dict(net.named_parameters())) == {"scale", "bias"}
    x = torch.randn(3, 2, 4, 4)
    expected = torch.nn.functional.batch_norm(x, net.mean, net.var, net.scale, net.bias) * 2
    torch.testing.assert_close(net(x), expected)


def test_transforms_see_through_it() -> None:
    net, x = tessera_onnx.load(mlp()), torch.randn(4)
    row = lambda v: net(v[None]).sum()  # noqa: E731
    expected = torch.func.grad(lambda v: by_hand(net, v[None]).sum())(x)
    torch.testing.assert_close(tessera.grad(row)(x), expected)


def test_a_new_state_counts() -> None:
    made = model([node("Mul", ["x", "w"], ["y"])], ["x"], ["y"], [constant("w", np.float32(2))])
    net, x = tessera_onnx.load(made), torch.ones(2)
    assert net(x).tolist() == [2, 2]
    net.load_state_dict({"w": torch.tensor(3.0)})
    assert net(x).tolist() == [3, 3]


@pytest.mark.parametrize("name", ["forward", "__tessera__", "__tessera_onnx__", "training", "a..b", ".", "__class__"])
def test_names_of_the_file_hide_nothing(name: str) -> None:
    given = [constant(name, np.full(2, 3, np.float32)), constant("a", np.ones(2, np.float32))]
    nodes = [helper.make_node("Mul", ["x", name], ["m"], name="x\nimport os  # "), node("Add", ["m", "a"], ["y"])]
    net = tessera_onnx.load(model(nodes, ["x"], ["y"], given))
    assert net(torch.ones(2)).tolist() == [4, 4] and len(net.state_dict()) == 2
    assert "\nimport os  #" not in str(tessera.stages(net)["captured"])


def test_copies_are_independent() -> None:
    net = tessera_onnx.load(mlp())
    other, x = copy.deepcopy(net), torch.randn(2, 4)
    with torch.no_grad():
        other.get_parameter("layer.0.weight").zero_()
    torch.testing.assert_close(net(x), by_hand(net, x))
    torch.testing.assert_close(other(x), by_hand(other, x))


# --- operators of your own ---


def test_register() -> None:
    @tessera_onnx.register("Twice", domain="own")
    def twice(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        return 2 * x + plus

    try:
        net = tessera_onnx.load(model([node("Twice", ["x"], ["y"], domain="own", plus=1.0)], ["x"], ["y"], own=1))
        assert net(torch.tensor([1.0, 2.0])).tolist() == [3, 5] and not reasons(net)
    finally:
        forget("own", "Twice", twice)


def test_an_operator_that_nobody_knows() -> None:
    net = tessera_onnx.load(model([node("Twice", ["x"], ["y"], domain="own")], ["x"], ["y"], own=1))
    with pytest.raises(OnnxError, match=r"no operator 'Twice' of own is known.*register declares one"):
        net(torch.ones(1))


def test_nearest_elements_are_those_of_single_precision() -> None:
    """An element that lies halfway between two is found as runtimes find it: (8 + 0.5) / 1.7 - 0.5 is 4.5 there."""
    about = {"coordinate_transformation_mode": "half_pixel", "mode": "nearest", "nearest_mode": "round_prefer_ceil"}
    nodes = [helper.make_node("Resize", ["x", "", "scales"], ["y"], **about)]
    scales = constant("scales", np.array([1, 1, 1.7], np.float32))
    x = torch.arange(8.0).reshape(1, 1, 8)
    got = tessera_onnx.load(model(nodes, [value("x", [1, 1, 8])], ["y"], [scales]))(x)
    assert torch.equal(got, torch.nn.functional.interpolate(x, scale_factor=1.7, mode="nearest-exact"))


@pytest.mark.parametrize(
    ("start", "end", "step"), [(-1, -(2**63) + 1, -1), (-2, -5, -2), (5, 0, -1), (0, 5, -1), (3, -9, -2)]
)
def test_slices_backwards(start: int, end: int, step: int) -> None:
    """The first place is brought into the axis, as ONNX says and ONNX Runtime does; Python has nothing there."""
    names = {"start": start, "end": end, "axis": 1, "step": step}
    nodes = [node("Slice", ["x", *names], ["y"])]
    sizes = [constant(n, np.array([v])) for n, v in names.items()]
    net = tessera_onnx.load(model(nodes, [value("x", ["a", "b"])], ["y"], sizes))
    for shape in ((2, 3), (4, 7), (1, 1), (3, 0), (0, 2)):
        x = torch.randn(shape)
        n = shape[1]
        first = min(max(start + n * (start < 0), 0), n - 1)
        last = max(end + n * (end < 0), -1)
        places = [p for p in range(first, last, step) if 0 <= p < n]
        assert torch.equal(net(x), x[:, places])


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, 0.0])
def test_powers_and_signs_at_the_edges(exponent: float) -> None:
    """PyTorch takes square roots for powers of a half, and says that NaN has the sign 0."""
    nodes = [node("Pow", ["x", "e"], ["y"]), node("Sign", ["x"], ["s"])]
    net = tessera_onnx.load(
        model(nodes, [value("x", ["n"])], ["y", "s"], [constant("e", np.array(exponent, np.float32))])
    )
    x = np.array([-np.inf, -2, -0.0, 0, 0.3, 4, np.inf, np.nan], np.float32)
    with np.errstate(all="ignore"):
        expected = np.power(x, np.full(8, exponent, np.float32)), np.sign(x)  # of a number NumPy takes roots, too
    for got, wanted in zip(net(torch.from_numpy(x)), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)
        assert np.array_equal(np.signbit(got.numpy()[:-1]), np.signbit(wanted[:-1]))
