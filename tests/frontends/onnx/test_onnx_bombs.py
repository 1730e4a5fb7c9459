"""ONNX files of which a few bytes ask for much time or memory: one error each, or the right answer, soon."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import BOOL, INT64, STRING, constant, graph, helper, model, node, onnx, value

from tessera import onnx as tessera_onnx
from tessera.frontends.onnx import interpreter
from tessera.frontends.onnx.elements import BITS, RANGES
from tessera.frontends.onnx.limits import LIMITS, Limits
from tessera.frontends.onnx.operators.patterns import MOST_STEPS, steps
from tessera.frontends.onnx.tensors import unpack
from tessera.onnx import OnnxError


def functions(twice: int):
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    made = [helper.make_function("own", "f0", ["x"], ["y"], [node("Relu", ["x"], ["y"])], imports)]
    for i in range(1, twice):
        body = [node(f"f{i - 1}", ["x"], ["a"], domain="own"), node(f"f{i - 1}", ["a"], ["y"], domain="own")]
        made.append(helper.make_function("own", f"f{i}", ["x"], ["y"], body, imports))
    last = node(f"f{twice - 1}", ["x"], ["y"], domain="own")
    return model([last], [value("x", [4])], ["y"], functions=made, own=1)


def loops(depth: int, turns: int):
    nodes = [node("Identity", ["a0"], ["b0"])]
    for d in range(1, depth + 1):
        takes = [value(f"i{d}", [], INT64), value(f"c{d}", [], BOOL), f"a{d - 1}"]
        body = [node("Identity", [f"c{d}"], [f"d{d}"]), *nodes]
        inner = graph(body, takes, [value(f"d{d}", [], BOOL), f"b{d - 1}"])
        nodes = [node("Loop", ["n", "go", f"a{d}"], [f"b{d}"], body=inner)]
    given = [constant("n", np.int64(turns)), constant("go", np.array(True))]
    return model([node("Identity", ["x"], [f"a{depth}"]), *nodes], [value("x", [4])], [f"b{depth}"], given)


def chain(op: str, count: int, **attributes: int):
    names = ["x", *(f"y{i}" for i in range(count))]
    nodes = [node(op, [a, a], [b], **attributes) for a, b in zip(names, names[1:], strict=False)]
    return model(nodes, [value("x", [4])], [names[-1]])


def outer_products():
    """Each of them squares how many elements there are."""
    nodes, last = [], "x"
    for i in range(4):
        nodes += [node("Reshape", [last, "a"], [f"r{i}"]), node("Reshape", [last, "b"], [f"q{i}"])]
        nodes += [node("MatMul", [f"r{i}", f"q{i}"], [f"m{i}"]), node("Reshape", [f"m{i}", "f"], [f"y{i}"])]
        last = f"y{i}"
    shapes = [constant("a", np.array([-1, 1])), constant("b", np.array([1, -1])), constant("f", np.array([-1]))]
    return model(nodes, [value("x", [4])], [last], shapes)


def texts(nodes: list, output: object, text: bytes):
    made = model(nodes, [value("x", [4])], [output], [helper.make_tensor("s", STRING, [1], [text])])
    del made.graph.input[:]
    return made


def strings():
    names = ["s", *(f"t{i}" for i in range(40))]
    nodes = [node("StringConcat", [a, a], [b]) for a, b in zip(names, names[1:], strict=False)]
    return texts(nodes, value("t39", None, STRING), b"0123456789")


def pattern(text: str):
    return texts([node("RegexFullMatch", ["s"], ["y"], pattern=text)], value("y", None, BOOL), b"a" * 40)


def sparse(count: int, size: int):
    made = model([node("Relu", ["x"], ["y"])], [value("x", [4])], ["y"])
    for i in range(count):
        values, places = constant(f"w{i}", np.ones(1, np.float32)), constant("i", np.array([0], np.int64))
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [size]))
    return made


def columns():
    """Columns of a picture with more places than anyone has."""
    data = [constant("c", np.ones((1, 4, 4), np.float32)), constant("b", np.array([2, 2]))]
    return model([node("Col2Im", ["c", "s", "b"], ["y"])], [], ["y"], [*data, constant("s", np.array([2**30, 2**30]))])


def grams(index: int):
    words = {"pool_int64s": [1, 2], "ngram_counts": [0], "ngram_indexes": [0, index], "mode": "TF"}
    far = {"max_gram_length": 2**40, "max_skip_count": 2**40, "min_gram_length": 1}
    return model([node("TfIdfVectorizer", ["i"], ["y"], **words, **far)], [], ["y"], [constant("i", np.array([1, 2]))])


def forest():
    nodes = {"treeids": [0], "nodeids": [0], "featureids": [0], "values": [0.5], "modes": ["LEAF"]}
    nodes |= {"truenodeids": [0], "falsenodeids": [0]}
    leaf = {"target_treeids": [0], "target_nodeids": [0], "target_ids": [0], "target_weights": [1.0]}
    attributes = {**{f"nodes_{key}": x for key, x in nodes.items()}, **leaf, "n_targets": 2**41}
    made = node("TreeEnsembleRegressor", ["i"], ["y"], domain="ai.onnx.ml", **attributes)
    imports = {"ai.onnx.ml": 3}
    return model([made], [], ["y"], [constant("i", np.ones((1, 1), np.float32))], **imports)


BOMBS: dict[str, tuple[Callable[[], object], str]] = {
    "functions that call others twice, and so on": (lambda: functions(50), "nodes where functions are called"),
    "loops in loops": (lambda: loops(4, 5000), "turns"),
    "loops in loops of few turns": (lambda: loops(5, 60), "turns"),
    "tensors that double": (lambda: chain("Concat", 40, axis=0), "takes more than the limit"),
    "outer products of outer products": (outer_products, "takes more than the limit"),
    "texts that double": (strings, "characters are more than the limit"),
    "a pattern that looks back": (lambda: pattern("(a+)+b"), "may take too long"),
    "a pattern of choices": (lambda: pattern("(a|aa)*b"), "may take too long"),
    "a pattern of many repeats": (lambda: pattern("a*a*a*a*a*a*a*b"), "may take too long"),
    "columns of a huge picture": (columns, "more than the limit"),
    "parts without end": (
        lambda: model([node("Split", ["x"], ["y"], num_outputs=2**31)], [value("x", [4])], ["y"]),
        "expected num_outputs=1",
    ),
    "words of a huge dictionary": (lambda: grams(2**40), "more than the limit"),
    "trees of too many targets": (forest, "more than the limit"),
    "many sparse tensors": (lambda: sparse(30, 1 << 24), "sparse tensors of the file"),
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", BOMBS)
def test_refused(name: str, compile: bool) -> None:  # noqa: A002
    make, expected = BOMBS[name]
    made = make()
    tessera_onnx.load(model([node("Relu", ["x"], ["y"])], ["x"], ["y"]))(torch.ones(3))  # what is done once
    # The interpreter runs such loops for the compiler too: the limit that there is takes seconds, once.
    limits = Limits(loop_turns=1000) if name.startswith("loops") and (compile or "few" in name) else LIMITS
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OnnxError, match=expected):
        net = tessera_onnx.load(made, compile=compile, limits=limits)
        net(*[torch.ones(4)] * len(net.input_names))
    assert time.process_time() - start < (10 if compile else 5)  # a bomb takes minutes; the compiler may share its core
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024


def test_windows_beyond_all_there_is() -> None:
    """They end where there is nothing more, soon and with the right answer."""
    assert tessera_onnx.load(grams(1))().tolist() == [1, 1]
    picture = torch.randn(1, 4, 2, 2)
    net = tessera_onnx.load(model([node("LRN", ["x"], ["y"], size=2**40)], [value("x", [1, 4, 2, 2])], ["y"]))
    torch.testing.assert_close(net(picture), picture)  # the sum of squares, by the size


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("op", ["Gather", "GatherElements", "ScatterElements"])
def test_an_index_out_of_bounds_names_its_node(op: str, compile: bool) -> None:  # noqa: A002
    """Only a run tells; the kernel that a program calls knows nothing of nodes."""
    given = [constant("i", np.array([0, 99])), constant("u", np.ones(2, np.float32))]
    inputs = ["x", "i", "u"] if op == "ScatterElements" else ["x", "i"]
    net = tessera_onnx.load(
        model([node(op, inputs, ["y"], name="far")], [value("x", [4])], ["y"], given), compile=compile
    )
    with pytest.raises(OnnxError, match="far.*out of (range|bounds)"):
        net(torch.ones(4))


@pytest.mark.parametrize("compile", [True, False])
def test_numbers_made_of_sizes_wrap_around(compile: bool) -> None:  # noqa: A002
    """Forty squares of a size are no number of a terabyte, but what 64 bits hold of it."""
    names = ["s0", *(f"s{i}" for i in range(1, 41))]
    nodes = [node("Shape", ["x"], ["s0"])]
    nodes += [node("Mul", [a, a], [b]) for a, b in zip(names, names[1:], strict=False)]
    made = model(nodes, [value("x", ["n"])], [value("s40", None, INT64)])
    expected = {3: pow(3, 2**40, 2**64), 4: 0}
    for size, squared in expected.items():
        out = tessera_onnx.load(made, compile=compile)(torch.ones(size))
        assert out.tolist() == [squared - 2**64 if squared >= 2**63 else squared]


def test_tensors_that_share_bytes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())

    def shared(count: int):
        tensors = []
        for i in range(count):
            made = onnx.TensorProto(name=f"w{i}", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
            made.external_data.add(key="location", value="w.bin")
            tensors.append(made)
        return model([node("Sum", [t.name for t in tensors], ["y"])], [], ["y"], tensors)

    assert tessera_onnx.load(shared(3), folder=tmp_path)().tolist() == [0, 3, 6, 9]
    with pytest.raises(OnnxError, match="share the bytes"):
        tessera_onnx.load(shared(1000), folder=tmp_path)


def test_patterns_that_take_no_time() -> None:
    for text in ("[a-z]+@[a-z]+", "(abc)?x{2,5}", r"\d{4}-\d{2}", "a|b", "(ab)+"):
        assert steps(text, 40) <= MOST_STEPS


@pytest.mark.parametrize("code", RANGES)
def test_narrow_integers_are_looked_up(code: int) -> None:
    bits, (low, high) = BITS[code], RANGES[code]
    wanted = [low, high, 0, 1, high, low, 1]
    packed = sum((n % 2**bits) << i * bits for i, n in enumerate(wanted))
    data = np.frombuffer(packed.to_bytes(-(-len(wanted) * bits // 8), "little"), np.uint8)
    assert unpack(data, code, (7,)).data.tolist() == wanted


def test_many_graphs_see_what_is_around_them() -> None:
    """Every branch may read all names before it; none of them makes a copy of these."""
    nodes = []
    for i in range(3000):
        branches = [graph([node("Identity", ["x"], [f"{b}{i}"])], [], [f"{b}{i}"]) for b in "te"]
        nodes.append(node("If", ["c"], [f"y{i}"], then_branch=branches[0], else_branch=branches[1]))
    made = model(nodes, [value("x", [4]), value("c", [], BOOL)], ["y2999"])
    assert len(tessera_onnx.load(made).input_names) == 2


def test_sizes_of_results_are_foreseen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    foreseen = interpreter._foreseen
    monkeypatch.setattr(interpreter, "_foreseen", lambda *args: asked.append(args) or foreseen(*args))
    file = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["n", 64], onnx.TensorProto.DOUBLE)],
        ["y"],
        [constant("w", np.eye(64, 512))],
    )
    net = tessera_onnx.load(file, compile=False)
    few, many = torch.randn(512, 64).double(), torch.randn(1024, 64).double()
    for x in (few, few, many, few):
        torch.testing.assert_close(net(x), x @ torch.eye(64, 512, dtype=torch.float64))
    assert len(asked) == 2


def image_of(op: str, inputs: tuple = (), shape: tuple = (1, 1, 16), **attributes: object) -> onnx.ModelProto:
    """One operator over an image of 16 places."""
    names = [f"w{i}" for i in range(len(inputs))]
    nodes = [node("Reshape", ["x", "places"], ["image"]), node(op, ["image", *names], ["y"], **attributes)]
    given = [constant(n, np.asarray(v)) for n, v in zip(names, inputs, strict=True)]
    return model(nodes, [value("x", [16])], ["y"], [constant("places", np.array(shape)), *given])


THREE = np.ones((1, 1, 3), np.float32)
FAR = {
    "padding": image_of("Conv", (THREE,), pads=[2**29, 2**29]),
    "padding of many channels": image_of("Conv", (np.ones((4096, 1, 3), np.float32),), pads=[2**26, 2**26]),
    "a convolution that reaches far": image_of("Conv", (THREE,), dilations=[2**62]),
    "a pool that reaches far": image_of("MaxPool", kernel_shape=[2], dilations=[2**62]),
    "windows of padding": image_of("MaxPool", kernel_shape=[2**26], pads=[2**25, 2**25]),
    "means of padding": image_of("AveragePool", kernel_shape=[2**15], pads=[2**15, 2**15 - 9]),
    "a transform": image_of("DFT", (2**30, 1), (1, 16, 1)),
    "a crop": image_of("CenterCropPad", ([1, 1, 2**30],)),
    "places": image_of("MaxUnpool", (np.zeros((1, 1, 16), np.int64), [1, 1, 2**30]), kernel_shape=[1]),
}


@pytest.mark.parametrize("name", FAR)
def test_attributes_that_make_much_of_a_small_image(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(OnnxError, match="more than|do not fit"):
        tessera_onnx.load(FAR[name])(torch.zeros(16))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("more", [{"sampling_ratio": 2**13}, {}])
def test_samples_of_regions(more: dict) -> None:
    nodes = [node("RoiAlign", ["x", "rois", "of"], ["y"], output_height=2, output_width=2, **more)]
    rois = constant("rois", np.array([[0, 0, 1e9, 1e9]], np.float32))
    net = tessera_onnx.load(model(nodes, [value("x", [1, 1, 4, 4])], ["y"], [rois, constant("of", np.array([0]))]))
    with pytest.raises(OnnxError, match="more than the limit"):
        net(torch.zeros(1, 1, 4, 4))
