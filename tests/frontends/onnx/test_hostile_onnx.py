"""Files that somebody made to break the reader: each ends in one clear error, and nothing outside is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mutations
import numpy as np
import pytest
from graphs import INT64, STRING, constant, graph, helper, model, node, onnx, value

from tessera import onnx as tessera_onnx
from tessera.onnx import Limits, OnnxError

CASES: dict[str, tuple[Callable[[], object], str]] = {}


def case(expected: str) -> Callable:
    """A model that must be refused, with words of the message."""

    def declare(make: Callable[[], object]) -> Callable:
        CASES[make.__name__] = make, expected
        return make

    return declare


def relu(**changes: object):
    made = model([node("Relu", ["x"], ["y"])], ["x"], ["y"])
    for name, new in changes.items():
        setattr(made, name, new)
    return made


def with_tensor(tensor: object):
    return model([node("Identity", ["w"], ["y"])], [], ["y"], [tensor])


def tensor(name: str = "w", dims: tuple = (2,), kind: int = 1, **fields: object):
    made = onnx.TensorProto(name=name, data_type=kind, dims=dims)
    for field, values in fields.items():
        if field == "raw_data":
            made.raw_data = values  # type: ignore[assignment]
        else:
            getattr(made, field).extend(values)
    return made


# --- the file ---


@case("do not parse")
def no_message() -> bytes:
    return b"\xff\xff\xff\xffnot a model"


@case("expected a model with a graph")
def empty_file() -> bytes:
    return b""


@case("do not parse|graph|initializer|bytes")
def cut_in_half() -> bytes:
    data = with_tensor(constant("w", np.ones(100, np.float32))).SerializeToString()
    return data[: len(data) // 2]


@case("IR version")
def no_ir_version() -> object:
    return relu(ir_version=0)


@case("opset 999")
def opset_of_the_future() -> object:
    return model([node("Relu", ["x"], ["y"])], ["x"], ["y"], opset=999)


@case("imported twice")
def two_versions_of_a_domain() -> object:
    made = relu()
    made.opset_import.append(helper.make_opsetid("ai.onnx", 3))
    return made


@case("no opset is imported for domain")
def domain_that_is_not_imported() -> object:
    return model([node("Relu", ["x"], ["y"], domain="nobody")], ["x"], ["y"])


# --- graphs ---


@case("'nothing' is defined nowhere")
def undefined_input() -> object:
    return model([node("Relu", ["nothing"], ["y"])], ["x"], ["y"])


@case("without circles")
def circle() -> object:
    return model([node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"])], ["x"], ["b"])


@case("defined twice")
def output_defined_twice() -> object:
    return model([node("Relu", ["x"], ["y"]), node("Tanh", ["x"], ["y"])], ["x"], ["y"])


@case("defined twice")
def output_that_is_an_input() -> object:
    return model([node("Relu", ["x"], ["x"])], ["x"], ["x"])


@case("its output 'z' is not defined")
def undefined_graph_output() -> object:
    return model([node("Relu", ["x"], ["y"])], ["x"], ["z"])


@case("defined twice")
def two_inputs_of_a_name() -> object:
    return model([node("Relu", ["x"], ["y"])], ["x", "x"], ["y"])


@case("'w' is defined twice")
def two_initializers_of_a_name() -> object:
    return model([node("Relu", ["w"], ["y"])], [], ["y"], [constant("w", [1.0]), constant("w", [2.0])])


@case("expected a name")
def name_with_a_zero_byte() -> object:
    return model([node("Relu", ["x"], ["y\0z"])], ["x"], ["y\0z"])


@case("needs an operator")
def node_without_an_operator() -> object:
    return model([node("", ["x"], ["y"])], ["x"], ["y"])


@case("nested more than")
def graphs_in_graphs() -> object:
    inner = graph([node("Identity", ["x"], ["y0"])], [], ["y0"])
    for depth in range(1, 20):
        branches = {"then_branch": inner, "else_branch": inner if depth == 1 else graph([], [], ["x"])}
        inner = graph([node("If", ["c"], [f"y{depth}"], **branches)], [], [f"y{depth}"])
    made = model([node("Identity", ["x"], ["y"])], ["x", value("c", [], 9)], ["y"])
    made.graph.node.append(node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))
    return made


@case("given twice")
def attribute_given_twice() -> object:
    made = model([node("Elu", ["x"], ["y"], alpha=1.0)], ["x"], ["y"])
    made.graph.node[0].attribute.append(helper.make_attribute("alpha", 2.0))
    return made


@case("missing")
def graph_attribute_without_a_graph() -> object:
    made = model([node("Elu", ["x"], ["y"])], ["x"], ["y"])
    made.graph.node[0].attribute.append(onnx.AttributeProto(name="body", type=onnx.AttributeProto.GRAPH))
    return made


# --- functions ---


def function(name: str, calls: str):
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["x"], ["y"], [node(calls, ["x"], ["y"], domain="own")], imports)


@case("calls itself")
def function_that_calls_itself() -> object:
    return model([node("f", ["x"], ["y"], domain="own")], ["x"], ["y"], functions=[function("f", "f")], own=1)


@case("calls itself")
def functions_that_call_each_other() -> object:
    both = [function("f", "g"), function("g", "f")]
    return model([node("f", ["x"], ["y"], domain="own")], ["x"], ["y"], functions=both, own=1)


@case("deep")
def long_chain_of_functions() -> object:
    chain = [function(f"f{i}", f"f{i + 1}") for i in range(200)]
    return model([node("f0", ["x"], ["y"], domain="own")], ["x"], ["y"], functions=chain, own=1)


@case("defined twice")
def function_defined_twice() -> object:
    both = [function("f", "g"), function("f", "h")]
    return model([node("f", ["x"], ["y"], domain="own")], ["x"], ["y"], functions=both, own=1)


# --- tensors ---


@case("expected 8 bytes")
def too_few_bytes() -> object:
    return with_tensor(tensor(raw_data=b"1234"))


@case("expected 4000000000000 bytes|more than any")
def a_terabyte_of_four_bytes() -> object:
    return with_tensor(tensor(dims=(10**6, 10**6), raw_data=b"1234"))


@case("more than any machine")
def sizes_that_overflow() -> object:
    return with_tensor(tensor(dims=(2**62, 2**62, 4), raw_data=b"1234"))


@case("at least 0")
def negative_size() -> object:
    return with_tensor(tensor(dims=(-1,), raw_data=b""))


@case("dimensions")
def a_thousand_dimensions() -> object:
    return with_tensor(tensor(dims=(1,) * 1000, raw_data=b"1234"))


@case("element type")
def unknown_element_type() -> object:
    return with_tensor(tensor(kind=99, raw_data=b"12345678"))


@case("both raw_data and")
def elements_in_two_places() -> object:
    return with_tensor(tensor(raw_data=b"12345678", float_data=[1.0, 2.0]))


@case("expected its elements in float_data")
def elements_in_the_wrong_place() -> object:
    return with_tensor(tensor(int64_data=[1, 2]))


@case("expected 2 elements")
def too_many_elements() -> object:
    return with_tensor(tensor(float_data=[1.0] * 5))


@case("expected 1 strings|expected 3 strings")
def too_few_strings() -> object:
    return with_tensor(tensor(dims=(3,), kind=STRING, string_data=[b"a"]))


@case("UTF-8")
def strings_that_are_no_text() -> object:
    return with_tensor(tensor(dims=(1,), kind=STRING, string_data=[b"\xff\xfe"]))


@case("segments")
def tensor_in_segments() -> object:
    made = tensor(raw_data=b"12345678")
    made.segment.begin, made.segment.end = 0, 10**12
    return with_tensor(made)


def sparse(shape: list, indices: list):
    values = constant("w", np.ones(1, np.float32))
    made = model([node("Identity", ["w"], ["y"])], [], ["y"])
    listed = constant("i", np.array(indices, np.int64))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, listed, shape))
    return made


@case("outside")
def sparse_index_outside() -> object:
    return sparse([4], [9])


@case("outside")
def sparse_index_below_zero() -> object:
    return sparse([4, 4], [[0, -1]])


@case("limit")
def sparse_tensor_of_gigabytes() -> object:
    return sparse([10**5, 10**5], [0])


@case("expected an index for each")
def sparse_indices_that_do_not_fit() -> object:
    return sparse([4], [0, 1])


# --- what a few bytes ask for when it runs ---


@case("limit")
def filled_tensor_of_gigabytes() -> object:
    return model([node("ConstantOfShape", ["s"], ["y"])], [], ["y"], [constant("s", np.array([10**5, 10**5]))])


@case("limit")
def range_of_gigabytes() -> object:
    ends = [constant(n, np.int64(v)) for n, v in (("a", 0), ("b", 10**12), ("c", 1))]
    return model([node("Range", ["a", "b", "c"], ["y"])], [], [value("y", None, INT64)], ends)


@case("limit")
def tiles_of_gigabytes() -> object:
    given = [constant("x", np.ones(4, np.float32)), constant("n", np.array([10**10]))]
    return model([node("Tile", ["x", "n"], ["y"])], [], ["y"], given)


@case("limit")
def padding_of_gigabytes() -> object:
    given = [constant("x", np.ones(4, np.float32)), constant("n", np.array([0, 10**10]))]
    return model([node("Pad", ["x", "n"], ["y"])], [], ["y"], given)


@case("limit")
def image_of_gigabytes() -> object:
    given = [constant("x", np.ones((1, 1, 2, 2), np.float32)), constant("n", np.array([1, 1, 10**6, 10**6]))]
    return model([node("Resize", ["x", "", "", "n"], ["y"])], [], ["y"], given)


@case("more than 50 turns")
def endless_loop() -> object:
    body = graph(
        [node("Identity", ["c"], ["d"]), node("Identity", ["a"], ["b"])],
        [value("i", [], INT64), value("c", [], 9), "a"],
        [value("d", [], 9), "b"],
    )
    given = [constant("n", np.int64(2**62)), constant("go", np.array(True)), constant("x", np.ones(1, np.float32))]
    return model([node("Loop", ["n", "go", "x"], ["y"], body=body)], [], ["y"], given)


@case("form a circle")
def tree_that_comes_back() -> object:
    tree = node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", nodes_treeids=[0, 0], nodes_nodeids=[0, 1],
        nodes_featureids=[0, 0], nodes_modes=["BRANCH_LEQ", "BRANCH_LEQ"], nodes_values=[0.0, 0.0],
        nodes_truenodeids=[1, 0], nodes_falsenodeids=[1, 0], target_treeids=[0], target_nodeids=[0], target_ids=[0],
        target_weights=[1.0], n_targets=1,
    )  # fmt: skip
    made = model([tree], ["x"], ["y"], **{"ai.onnx.ml": 3})
    made.graph.initializer.append(constant("x", np.ones((1, 1), np.float32)))
    return made


@case("unknown attribute 'beta'")
def attribute_that_nobody_knows() -> object:
    made = model([node("Elu", ["x"], ["y"], beta=1.0)], ["x"], ["y"])
    made.graph.initializer.append(constant("x", np.ones(1, np.float32)))
    return made


@case("expected 2 to 2 inputs")
def too_few_inputs() -> object:
    return model([node("MatMul", ["x"], ["y"])], [], ["y"], [constant("x", np.ones((1, 1), np.float32))])


@case("node 0 .MatMul.")
def shapes_that_do_not_fit() -> object:
    given = [constant("a", np.ones((2, 3), np.float32)), constant("b", np.ones((2, 3), np.float32))]
    return model([node("MatMul", ["a", "b"], ["y"])], [], ["y"], given)


@case("no operator 'Nonsense'")
def operator_that_nobody_knows() -> object:
    return model([node("Nonsense", ["x"], ["y"])], [], ["y"], [constant("x", np.ones(1, np.float32))])


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, expected = CASES[name]
    with pytest.raises(OnnxError, match=expected):
        tessera_onnx.load(make(), limits=Limits(loop_turns=50, unrolled=10))()


# --- data beside the file ---

OUTSIDE = {
    "parent": ("../secret.bin", "inside the model's folder"),
    "parent_further_down": ("a/../../secret.bin", "inside the model's folder"),
    "absolute": ("/etc/passwd", "inside the model's folder"),
    "windows_drive": ("C:\\secret.bin", "relative path|inside"),
    "nothing": ("", "inside the model's folder"),
    "link": ("link.bin", "cannot be opened"),
    "folder_that_is_a_link": ("linked/secret.bin", "cannot be opened"),
    "hard_link": ("hard.bin", "several names"),
    "pipe": ("pipe", "no regular file"),
    "folder": ("a", "no regular file"),
    "missing": ("missing.bin", "cannot be opened"),
    "too_short": ("short.bin", "has 4 bytes"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.bin").write_bytes(b"12345678")
    inner = tmp_path / "model"
    (inner / "a").mkdir(parents=True)
    (inner / "link.bin").symlink_to(tmp_path / "secret.bin")
    (inner / "linked").symlink_to(tmp_path)
    os.link(tmp_path / "secret.bin", inner / "hard.bin")
    os.mkfifo(inner / "pipe")
    (inner / "short.bin").write_bytes(b"1234")
    (inner / "good.bin").write_bytes(np.array([0, 1, 2], np.float32).tobytes())
    return inner


def external(location: str, **entries: str):
    made = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    for key, text in {"location": location, **entries}.items():
        made.external_data.add(key=key, value=text)
    return with_tensor(made)


@pytest.mark.parametrize("name", OUTSIDE)
def test_external_data_stays_inside(name: str, folder: Path) -> None:
    location, expected = OUTSIDE[name]
    onnx.save(external(location), folder / "m.onnx")
    with pytest.raises(OnnxError, match=expected):
        tessera_onnx.load(folder / "m.onnx")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"offset": "-4"}, "number of bytes"),
        ({"offset": "9" * 30}, "number of bytes"),
        ({"offset": "8"}, "expected 16 or more"),
        ({"offset": str(2**62)}, "or more"),
        ({"length": "4"}, "expected 8 bytes"),
    ],
)
def test_external_sizes_are_checked(entries: dict, expected: str, folder: Path) -> None:
    with pytest.raises(OnnxError, match=expected):
        tessera_onnx.load(external("good.bin", **entries), folder=folder)


def test_external_data_is_read(folder: Path) -> None:
    onnx.save(external("good.bin", offset="4"), folder / "m.onnx")
    assert tessera_onnx.load(folder / "m.onnx")().tolist() == [1, 2]


def test_bytes_have_no_folder() -> None:
    with pytest.raises(OnnxError, match="has no folder"):
        tessera_onnx.load(external("good.bin").SerializeToString())


def test_a_file_may_not_be_too_long(tmp_path: Path) -> None:
    onnx.save(relu(), tmp_path / "m.onnx")
    with pytest.raises(OnnxError, match="the limit is 10"):
        tessera_onnx.load(tmp_path / "m.onnx", limits=Limits(file_bytes=10))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OnnxError, match="expected a file"):
        tessera_onnx.load(tmp_path)


# --- files with bytes changed ---


def survive(seeds: range, folder: Path) -> None:
    attempt = mutations.onnx(folder)
    said = {seed: attempt(seed) for seed in seeds}
    assert {seed: told for seed, told in said.items() if told.startswith("fault")} == {}


def test_changed_bytes_end_in_an_error_or_an_answer(tmp_path: Path) -> None:
    survive(range(300), tmp_path)


@pytest.mark.sweep
def test_many_changed_files(tmp_path: Path) -> None:
    survive(range(20_000), tmp_path)
