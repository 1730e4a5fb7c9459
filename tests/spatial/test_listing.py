"""The grammar of listings and `.spatial` files: round trips, and what is said of text that is none."""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tessera.spatial.listing import load, parse, print_listing, save
from tessera.spatial.listing.container import pack, unpack
from tessera.spatial.listing.expression import read_tree
from tessera.spatial.listing.text import tree_text
from tessera.util.errors import ListingError

sys.path.insert(0, str(Path(__file__).parent))

from listings import CASES, cache, mlp_on_one  # noqa: E402

TEXT = print_listing(mlp_on_one().program.listing)


@pytest.mark.parametrize("case", [*CASES.values(), cache], ids=lambda case: case.__name__)
def test_a_listing_prints_and_reads_back(case):
    listing = case().program.listing
    text = print_listing(listing)
    assert parse(text) == listing
    assert print_listing(parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "a + b - (c - d)", "neg(a) * 3", "where(a < b, -1e-05, inf)", "(a < b) < c", "a / (b * c) / d", "a - -2",
        "exp(a - max(a)) * (a[0:4, :] + b^T)", "maximum(a, 0.0) >= b", "a[3, 0:8:2]",
    ],
)  # fmt: skip
def test_an_expression_prints_and_reads_back(text):
    assert tree_text(read_tree(text)) == text


def test_a_tensor_of_one_element_may_have_any_stride():
    data = {"one": torch.full((), 3.0).expand(1), "last": torch.arange(4.0)[3::4], "none": torch.empty(0, 3)}
    assert all(unpack(pack(data))[name].equal(value) for name, value in data.items())


def test_a_file_that_ends_anywhere_is_cut_off():
    for length in range(TEXT.index("\n\ncore"), TEXT.rindex("end "), 7):
        with pytest.raises(ListingError, match="cut off"):
            parse(TEXT[:length])


@pytest.mark.parametrize(
    "old, new, line, said",
    [
        ("tessera spatial listing 1", "tessera spatial listing 2", 1, "expected `tessera spatial listing 1`"),
        ("machine toy ", "machine toy", 2, "SHA-256"),
        ("end 548\n", "", None, "cut off"),
        ("end 548", "end 548\ncore 0,1", None, "nothing after `end`"),
        ("gelu(a + b)", "gelo(a + b)", None, "did you mean gelu"),
        ("gelu(a + b)", "gelu(a + )", None, "expected an expression"),
        ("gelu(a + b)", "gelu(a, b)", None, "expected 1 operands of gelu; got 2"),
        ("gelu(a + b)", "(" * 99 + "a" + ")" * 99, None, "more than 60 brackets"),
        ("gelu(a + b)", "+".join("a" * 900), None, "more than 200 functions over each other"),
        ("gelu(a + b)", "9" * 5000, None, "expected an expression"),
        ("float32[16, 16]", f"float32[{'9' * 5000}]", None, "at most 8 sizes"),
        ("@64 ", "@٦٤ ", None, "columns two spaces apart"),
        ("\nend ", "\nend 548\n  @0  vector  a = b  1  sram.r0 sram.w0\nend ", None, "instructions between"),
        ("x · w1", "x * w1", None, "expected `y = x · w`"),
        ("float32[16, 16]", "flaot32[16, 16]", None, "did you mean float32"),
        ("float32[32, 16]", "float32[32, 0]", None, "each 1 or more"),
        ("float32[16, 16]", "float32[1, 1, 1, 1, 1, 1, 1, 1, 1]", None, "at most 8 sizes"),
        ("matrix  a", "matrlx  a", None, "expected a unit out of matrix"),
        ("sram.w0  ", "sram.q0  ", None, "expected ports"),
        ("always = b", "always", None, "after `always`"),
        ("host.x", "hose.x", None, "expected `recv v from host.name"),
        ("@64 ", "@-64 ", None, "columns two spaces apart"),
        ("w2[0:32, 0:16]", "w2[32:32, 0:16]", None, "a slice that holds something"),
        ("core 0,0", "corr 0,0", None, "expected `input`, `output`"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(old, new, line, said):
    assert old in TEXT
    with pytest.raises(ListingError, match=r"^line \d+: expected|^line \d+: ") as caught:
        parse(TEXT.replace(old, new, 1))
    assert said in str(caught.value)
    assert line is None or str(caught.value).startswith(f"line {line}:")


def test_hostile_text_costs_one_line():
    for text in ("", "\n" * 100, TEXT + "x" * 30_000, TEXT.replace("@64 ", "@" + "9" * 400 + " "), "\0" * 1000):
        with pytest.raises(ListingError) as caught:
            parse(text)
        assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_tensors_pack_and_unpack():
    data = {
        "a": torch.randn(3, 4),
        "b": torch.arange(5),
        "c": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "d": torch.tensor(1.5),
    }
    again = unpack(pack(data))
    assert again.keys() == data.keys()
    for name, tensor in data.items():
        assert again[name].dtype == tensor.dtype and again[name].shape == tensor.shape
        assert torch.equal(again[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def _header(header: object) -> bytes:
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + b"\0" * 16


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff" * 8, struct.pack("<Q", 1 << 60) + b"{}", _header([]), _header({"a": {}}), b"\x02\0\0\0\0\0\0\0[[",
        _header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 16]}}),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}),
        _header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}),
        _header({"a": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}),
    ],
)  # fmt: skip
def test_wrong_data_is_refused(content):
    with pytest.raises(ListingError, match="expected"):
        unpack(content)


def test_wrong_archives_are_refused(tmp_path):
    path = tmp_path / "a.spatial"
    with pytest.raises(ListingError, match="no such file"):
        load(path)
    path.write_bytes(b"PK nonsense")
    with pytest.raises(ListingError, match=r"expected a \.spatial file"):
        load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("listing.txt", TEXT)
    with pytest.raises(ListingError, match=r"machine\.toml is missing"):
        load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("listing.txt", "x" * 1_000_000)
    with pytest.raises(ListingError, match="without compression"):
        load(path)


def test_the_same_program_is_the_same_file(tmp_path):
    for name in ("a", "b"):
        save(mlp_on_one().program, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    cut = (tmp_path / "a").read_bytes()
    with pytest.raises(ListingError):
        (tmp_path / "c").write_bytes(cut[: len(cut) // 2])
        load(tmp_path / "c")
    assert zipfile.ZipFile(io.BytesIO(cut)).namelist() == ["listing.txt", "machine.toml", "data.safetensors"]
