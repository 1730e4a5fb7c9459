"""Every hostile file ends in one clear error that names the file and the part of it, soon and in little memory."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import hostile
import mutations
import pytest
import torch
from hostile import Parts

import tessera
from tessera.artifact.container import HEAD, MAGIC, PAGE
from tessera.util.errors import ArtifactError

CORPUS: dict[str, tuple[Callable[[Parts, Path], Path], str]] = {}


def case(expected: str) -> Callable:
    """`expected`: a pattern that the message has."""

    def note(make: Callable[[Parts, Path], Path]) -> Callable:
        CORPUS[make.__name__] = make, expected
        return make

    return note


def changed(expected: str, change: Callable[[Parts], None], name: str) -> None:
    """A case whose parts are changed and written with right hashes."""

    def make(parts: Parts, path: Path) -> Path:
        change(parts)
        return parts.write(path)

    CORPUS[name] = make, expected


# --- the container ---


@case("expected 4096 bytes")
def empty_file(parts: Parts, path: Path) -> Path:
    path.write_bytes(b"")
    return path


@case("begins with")
def another_kind_of_file(parts: Parts, path: Path) -> Path:
    path.write_bytes(b"PK\x03\x04" + bytes(PAGE))
    return path


@case("cut off|at the end of")
def truncated(parts: Parts, path: Path) -> Path:
    parts.write(path)
    path.write_bytes(path.read_bytes()[:-100])
    return path


@case("at the end of")
def bytes_behind_the_manifest(parts: Parts, path: Path) -> Path:
    parts.write(path)
    path.write_bytes(path.read_bytes() + b"more")
    return path


@case("format version 1, got 99")
def newer_version(parts: Parts, path: Path) -> Path:
    data = bytearray(parts.write(path).read_bytes())
    struct.pack_into("<I", data, 8, 99)
    path.write_bytes(data)
    return path


@case("at most 32 signatures")
def four_billion_signatures(parts: Parts, path: Path) -> Path:
    data = bytearray(parts.write(path).read_bytes())
    struct.pack_into("<I", data, 12, 0xFFFFFFFF)
    path.write_bytes(data)
    return path


@case("zeros behind the signatures")
def bytes_hidden_in_page_0(parts: Parts, path: Path) -> Path:
    data = bytearray(parts.write(path).read_bytes())
    data[PAGE - 1] = 1
    path.write_bytes(data)
    return path


@case("at the end of")
def manifest_offset_overflows(parts: Parts, path: Path) -> Path:
    path.write_bytes(HEAD.pack(MAGIC, 1, 0, 2**64 - PAGE, 2 * PAGE, bytes(32), bytes(32)).ljust(PAGE, b"\0"))
    return path


@case("manifest: its SHA-256")
def manifest_of_another_hash(parts: Parts, path: Path) -> Path:
    data = parts.write(path).read_bytes()
    path.write_bytes(data.replace(b'"made_by"', b'"made_BY"'))
    return path


@case("expected JSON")
def manifest_is_no_json(parts: Parts, path: Path) -> Path:
    return hostile.raw(path, b"", b"\xff{")


@case("nested more than 64 deep")
def manifest_nested_deep(parts: Parts, path: Path) -> Path:
    return hostile.raw(path, b"", b"[" * 400_000)


@case("a number of 1000000 digits")
def manifest_with_a_long_number(parts: Parts, path: Path) -> Path:
    return hostile.raw(path, b"", b'{"n":' + b"9" * 1_000_000 + b"}")


@case("at most 500000 values")
def manifest_of_many_values(parts: Parts, path: Path) -> Path:
    return hostile.raw(path, b"", b"[" + b"0," * 510_000 + b"0]")


@case("every name once")
def manifest_names_a_field_twice(parts: Parts, path: Path) -> Path:
    return hostile.raw(path, b"", b'{"members":[],"members":[]}')


def rows(change: Callable[[list], object]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        def listed(members: list) -> list:
            change(members)
            return members

        parts.listed = listed

    return apply


changed("listed twice", rows(lambda m: m.__setitem__(1, [m[0][0], *m[1][1:]])), "member_listed_twice")
changed("expected at", rows(lambda m: m[1].__setitem__(1, m[0][1])), "members_overlap")
changed("expected at", rows(lambda m: m[0].__setitem__(2, 2**63)), "member_size_overflows")
changed("expected at", rows(lambda m: m[0].__setitem__(1, -PAGE)), "member_before_the_file")
changed("expected a plain name", rows(lambda m: m[0].__setitem__(0, "../../etc/passwd")), "member_name_climbs")
changed("expected a plain name", rows(lambda m: m[0].__setitem__(0, "/etc/passwd")), "member_name_is_absolute")
changed("expected a name, an offset", rows(lambda m: m[0].__setitem__(1, "4096")), "member_offset_is_text")
changed("its SHA-256 is not", rows(lambda m: [row.__setitem__(3, "0" * 64) for row in m]), "members_of_other_hashes")
changed("expected the manifest at", rows(lambda m: m.pop()), "bytes_between_members")
changed("a list of at most", rows(lambda m: m.extend([m[0]] * 20_000)), "twenty_thousand_members")


# --- the manifest ---


def manifest(change: Callable[[dict], object]) -> Callable[[Parts], None]:
    return lambda parts: (change(parts.manifest), None)[1]


def entry(change: Callable[[dict], object]) -> Callable[[Parts], None]:
    return lambda parts: (change(parts.manifest["entries"]["main"]), None)[1]


def nest(depth: int) -> list:
    structure: list = ["leaf"]
    for _ in range(depth):
        structure = ["tuple", [structure]]
    return structure


changed("expected entries", manifest(lambda m: m.__setitem__("entries", [])), "no_entries")
changed("expected targets", manifest(lambda m: m.__setitem__("targets", 3)), "targets_are_a_number")
changed("which is not listed", manifest(lambda m: m.__setitem__("weights", "none")), "weights_that_are_not_there")
changed("expected cpu or cuda", manifest(lambda m: m.__setitem__("device", "file:///")), "another_device")
changed("expected a structure", entry(lambda e: e.__setitem__("out", nest(25))), "structure_nested_deep")
changed("expected the names", entry(lambda e: e.__setitem__("parameters", ["x=print()"])), "parameter_is_code")
changed("names of weights", entry(lambda e: e.__setitem__("held", ["nothing"])), "weight_that_is_not_there")
changed("which is not listed", entry(lambda e: e.__setitem__("programs", {"portable": ["gone", "gone"]})), "no_program")
changed("the least and the most", entry(lambda e: e.__setitem__("sizes", {"s0; import os": [1, 2]})), "symbol_is_code")
changed(
    "expected an argument|which the program does not have",
    entry(lambda e: e["inputs"][0].__setitem__("shape", [["size", "__import__"], 16])),
    "size_is_code",
)
changed("this program|these arguments", entry(lambda e: e["held"].pop()), "too_few_weights")


# --- weights ---


def header(text: object, data: bytes = b"") -> Callable[[Parts], None]:
    encoded = text if isinstance(text, bytes) else json.dumps(text).encode()
    return lambda parts: parts.members.__setitem__("weights.safetensors", hostile.weights(encoded, data))


def row(**changes: object) -> dict:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


changed("a header of", lambda p: p.members.__setitem__("weights.safetensors", b"\xff" * 64), "header_beyond_the_member")
changed("offsets that fit", header(row(data_offsets=[0, 1 << 40])), "tensor_beyond_the_member")
changed("offsets that fit", header(row(shape=[1 << 61, 1 << 61]), bytes(8)), "tensor_of_2_to_the_122_elements")
changed("offsets that fit", header(row(data_offsets=[8, 0]), bytes(8)), "tensor_that_ends_before_it_begins")
changed("offsets that fit", header(row(dtype="PICKLE"), bytes(8)), "dtype_that_does_not_exist")
changed(
    "do not overlap",
    header({"x": row()["x"], "y": {**row()["x"], "data_offsets": [4, 12]}}, bytes(12)),
    "tensors_overlap",
)


def shortened(parts: Parts) -> None:
    """A weight of fewer elements than kernels go through; what is left of it is a tensor of its own."""
    data = parts.members["weights.safetensors"]
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    name = parts.manifest["entries"]["main"]["held"][0]
    begin, end = header[name]["data_offsets"]
    header[name] |= {"shape": [1], "data_offsets": [begin, begin + 4]}
    header["rest"] = {"dtype": "U8", "shape": [end - begin - 4], "data_offsets": [begin + 4, end]}
    parts.members["weights.safetensors"] = hostile.weights(json.dumps(header).encode(), data[8 + length :])


changed(r"held: expected \w+ as f32\[.*got torch.float32 \[1\]", shortened, "weight_shorter_than_its_program_says")


def view(value: object) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        name = parts.manifest["entries"]["main"]["held"][0]
        parts.manifest["views"] = {name: value}

    return apply


changed("a view that fits", view(["float32", [1 << 39], [1 << 39]]), "view_beyond_its_bytes")
changed("a view that fits", view(["load", [1], [1]]), "view_of_no_dtype")


# --- programs ---


def program(change: Callable[[dict], object]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        data = parts.program()
        change(data)
        parts.put(data)

    return apply


def tables(change: Callable[[dict], object]) -> Callable[[Parts], None]:
    return program(lambda p: change(p["tables"]))


def equation(data: dict) -> list:
    return data["traces"][-1]["equations"][0]


def rename(data: dict, name: str) -> None:
    data["values"][0][0] = name


def add_operator(data: dict, row: object) -> None:
    data["ops"].append(row)
    equation(data)[0] = len(data["ops"]) - 1


def make_check(data: dict, text: str) -> None:
    add_operator(data, ["special", "check"])
    equation(data)[1:4] = [[text, "no"], [], []]
    data["traces"][-1]["equations"] = data["traces"][-1]["equations"][:1]
    data["traces"][-1]["outputs"] = []


def cycle(data: dict) -> None:
    number = len(data["traces"]) - 1
    add_operator(data, ["special", "call"])
    equation(data)[1] = [["trace", number]]


changed("tables of version", program(lambda p: p.__setitem__("version", 99)), "tables_of_another_version")
changed("the number of a program", program(lambda p: p.__setitem__("program", -1)), "program_number_below_zero")
changed("expected how results", program(lambda p: p.__setitem__("layout", "x")), "layout_is_text")
changed(
    "layout: expected a number|expected",
    program(lambda p: p["layout"].__setitem__("write_back", [["0].__class__", 0]])),
    "layout_is_code",
)
changed("constants that are among", program(lambda p: p.__setitem__("constants", ["gone"])), "constant_that_is_gone")
changed("a name that a variable", tables(lambda t: rename(t, "x = __import__('os')")), "value_name_is_code")
changed("a name that a variable", tables(lambda t: rename(t, "torch")), "value_name_hides_torch")
changed("a name that a variable", tables(lambda t: rename(t, "lambda")), "value_name_is_a_keyword")
changed("not defined yet", tables(lambda t: rename(t, t["values"][1][0])), "two_values_of_one_name")
changed("a number in the table", tables(lambda t: t["traces"][-1]["inputs"].append(10**9)), "value_number_beyond")
changed("a value that is defined before", tables(lambda t: equation(t)[1].append(["v", 10**6])), "undefined_value")
changed("not defined yet", tables(lambda t: equation(t)[3].append(t["traces"][-1]["inputs"][0])), "value_defined_twice")
changed("an operator of", tables(lambda t: add_operator(t, ["op", "os", "system", "default"])), "unknown_namespace")
changed("there is no operator", tables(lambda t: add_operator(t, ["op", "aten", "no_such", "default"])), "no_operator")
changed("touches no files", tables(lambda t: add_operator(t, ["op", "aten", "from_file", "default"])), "reads_a_file")
changed("expected one of", tables(lambda t: add_operator(t, ["special", "launch"])), "unknown_special")
changed("an operator", tables(lambda t: add_operator(t, ["exec", "import os"])), "operator_of_no_kind")
changed("stands before this one", tables(cycle), "program_that_calls_itself")
changed("a keyword", tables(lambda t: equation(t)[2].append(["x=print(1), y", 1])), "keyword_is_code")
changed("condition over sizes", tables(lambda t: make_check(t, "__import__('os').system('true')")), "check_is_code")
changed("condition over sizes", tables(lambda t: make_check(t, "9**9**9**9")), "check_computes_forever")
changed("expected a condition", tables(lambda t: make_check(t, "(" * 900)), "check_nested_deep")
changed("a type", tables(lambda t: t["types"].__setitem__(0, ["tensor"])), "type_without_parts")
changed("a device", tables(lambda t: t["types"][0].__setitem__(4, "cpu'); print('")), "device_is_code")
changed("no tensor can have", tables(lambda t: t["types"][0].__setitem__(2, [10**30])), "size_of_100_bits")
changed(
    "formula of a size|a size computed",
    tables(lambda t: t["types"][0].__setitem__(6, ["size", ["eval", 1]])),
    "size_calls_eval",
)  # noqa: E501
changed(
    "to the power of",
    tables(lambda t: t["types"][0].__setitem__(6, ["size", ["Pow", 9, 10**9]])),
    "size_of_a_giant_power",
)  # noqa: E501
changed(
    "expected a whole number as a size",
    tables(lambda t: t["types"][0].__setitem__(6, ["size", ["IntTrueDiv", 9, 2]])),
    "size_that_is_a_float",
)
changed(
    "expected whole numbers as arguments of Mod",
    tables(lambda t: t["types"][0].__setitem__(6, ["size", ["Mod", 9, 2.5]])),
    "size_by_a_float",
)
changed(
    "no tensor can have",
    tables(lambda t: equation(t)[1].append(["number", ["size", ["Add", float("nan"), 1]]])),
    "number_that_is_none",
)
changed("expected the tables", tables(lambda t: t.pop("ops")), "table_that_is_missing")


# --- kernels ---


def image(change: Callable[[list], object]) -> Callable[[Parts], None]:
    def apply(parts: Parts) -> None:
        (target,) = parts.manifest["targets"].values()
        change(target["images"][0])

    return apply


changed("an image within", image(lambda i: i.__setitem__(2, 1 << 40)), "image_beyond_its_member")
changed("an image within", image(lambda i: i.__setitem__(3, -8)), "image_entry_before_its_code")
changed("an image within", image(lambda i: i.__setitem__(4, [[1 << 40, "exit"]])), "image_slot_beyond_its_code")
changed("an image within", image(lambda i: i.__setitem__(4, [[0, "a\0b"]])), "image_symbol_is_no_name")


@pytest.mark.parametrize("name", CORPUS)
def test_hostile_file(name: str, mlp_file: Path, tmp_path: Path) -> None:
    make, expected = CORPUS[name]
    path = make(Parts.of(mlp_file), tmp_path / "hostile.tess")
    start = time.process_time()
    with pytest.raises(ArtifactError, match=expected) as caught:
        tessera.load(path, compile=False, trust=name.startswith("image"))(torch.randn(8, 16))
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 1000
    assert time.process_time() - start < 5


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 60


def test_parts_put_together_again_are_a_good_file(mlp: torch.nn.Module, mlp_file: Path, tmp_path: Path) -> None:
    path = Parts.of(mlp_file).write(tmp_path / "same.tess")
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(tessera.load(path, trust=True)(x), mlp(x))


def test_not_a_plain_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/null")):
        with pytest.raises(ArtifactError, match=str(path)):
            tessera.load(path)


# --- mutations ---


def survive(kind: str, seeds: range, folder: Path) -> None:
    attempt = mutations.KINDS[kind](folder)
    said = {seed: attempt(seed) for seed in seeds}
    assert {seed: told for seed, told in said.items() if told.startswith("fault")} == {}


@pytest.mark.parametrize("kind", ["artifact", "tables"])
def test_changed_files(kind: str, tmp_path: Path) -> None:
    survive(kind, range(150), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["artifact", "tables"])
def test_many_changed_files(kind: str, tmp_path: Path) -> None:
    survive(kind, range(1000, 7000), tmp_path)


def test_chunks_are_all_files_of_a_run() -> None:
    assert sum(last - first for _, first, last in mutations.chunks(20_000)) == 20_000
    assert {kind for kind, _, _ in mutations.chunks(20_000)} == set(mutations.KINDS)
