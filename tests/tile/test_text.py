"""Tile kernels as text: printing, parsing, errors, the command line, and the page of the dialect."""

from __future__ import annotations

import io
import math

import pytest
from kernels import cases
from tile_kernels import softmax

from tessera.tile import document
from tessera.tile.dialect.build import KernelBuilder, bf16, f16, f32, f64, module
from tessera.tile.dialect.text import TileTextError, kernels, parse, to_text
from tessera.tile.rewrites.pipeline import PASSES
from tessera.tools import cli

CASES = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_text_parses_back(name: str) -> None:
    before = module(CASES[name].kernel.clone())
    after = parse(to_text(before))
    assert after.is_structurally_equivalent(before)
    assert to_text(after) == to_text(before)


@pytest.mark.parametrize("element", [f16, bf16, f32, f64])
@pytest.mark.parametrize("number", [0.1, 1 / 3, -0.0, 1e-7, 60000.0, math.inf, -math.inf, math.nan])
def test_numbers_survive_printing(number: float, element) -> None:
    k = KernelBuilder("number")
    k.store(k.constant(number, element), k.buffer(element), 0)
    before = module(k.finish())
    (a, _), (b, _) = (list(kernels(m)[0].block.ops) for m in (before, parse(to_text(before))))
    a, b = a.value.value.data, b.value.value.data
    assert (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))


def test_an_error_shows_its_line_and_a_caret() -> None:
    text = to_text(module(softmax())).replace('"tile.cast"', '"tile.cost"').replace("%5", "%5_", 1)
    with pytest.raises(TileTextError) as error:
        parse(text, "softmax.mlir")
    assert "softmax.mlir:" in str(error.value) and "^" in str(error.value)


def test_what_does_not_verify_is_refused() -> None:
    text = to_text(module(softmax())).replace('index<"r + i * m">, mode', 'index<"r + q * m">, mode')
    with pytest.raises(TileTextError, match=r"\['q'\] in 'r \+ q \* m'; known are \['i', 'm', 'n', 'r'\]"):
        parse(text)


WRONG = [  # what is changed in the text of a softmax, into what, and the complaint
    ('kind = "sum"', 'kind = "avg"', "expected one of sum, prod, max, min, any, all, argmax, argmin, got avg"),
    ('fn = "exp"', 'fn = "expp"', "no function 'expp'; there are add, sub"),
    ('fn = "exp"', 'fn = "add"', "add takes 2 arguments, got 1"),
    ('<"r + i * m">', '<"r + i ** m">', r"expected an index expression of names, numbers, .* got 'i \*\* m'"),
    ('<"r + i * m">', '<"r + i *">', r"expected an index expression of names, numbers, .* got 'r \+ i \*'"),
    ('#tile.index<"m">>]', '#tile.index<"k">>]', r"the size of axis r: \['k'\] in 'k'; known are \['m', 'n'\]"),
    ('axis = "r"', 'axis = "i"', "leaves"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), WRONG)
def test_the_verifier_names_what_is_wrong(old: str, new: str, complaint: str) -> None:
    text = to_text(module(softmax()))
    assert old in text, text
    with pytest.raises(TileTextError, match=complaint):
        parse(text.replace(old, new, 1))


def test_numbers_masks_and_scans_are_verified() -> None:
    k = KernelBuilder("running")
    i = k.axis("i", 8)
    x, y = k.buffer(f32), k.buffer(f32)
    k.load(y, i)  # nobody reads it
    value = k.scan("sum", k.load(x, i), "i")
    k.store(k.apply("select", k.apply("gt", value, k.constant(1.5, f32)), value, k.constant(0, f32)), y, i)
    text = to_text(module(k.finish()))
    for old, new, complaint in (
        ('kind = "sum"', 'kind = "mean"', "tile.scan: expected one of sum, prod, max, min, got mean"),
        ("value = 1.500000e+00 : f32", "value = 1.500000e+00 : f64", "tile.constant: expected"),
        ('fn = "gt"', 'fn = "maximum"', "maximum gives f32 here"),
        ('axis = "i"', 'axis = "j"', "gives just that type"),
        ('-> !tile.value<f32, ["i"]>', "-> !tile.value<f32, []>", r"is made along \['i'\] too"),
    ):
        assert old in text, text
        with pytest.raises(TileTextError, match=complaint):
            parse(text.replace(old, new, 1))


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(TileTextError, match="expected tile kernels, got an empty text"):
        parse(" \n", "none.mlir")


def test_other_operations_are_refused() -> None:
    with pytest.raises(TileTextError, match="expected a module of tile.kernel, got builtin.module"):
        parse("builtin.module { builtin.module {} }")


# --- the command line ---


def test_tile_opt_runs_passes(tmp_path, capsys) -> None:
    k = KernelBuilder("one")
    i = k.axis("i", 4)
    x = k.buffer(f32)
    k.store(k.apply("mul", k.load(x, i), k.constant(1.0, f32)), x, i)
    file = tmp_path / "one.mlir"
    file.write_text(to_text(module(k.finish())))
    assert cli.main(["tile-opt", str(file)]) == 0
    out = capsys.readouterr().out
    assert "tile.apply" not in out and "tile.constant" not in out
    assert len(kernels(parse(out))) == 1
    assert cli.main(["tile-opt", "--passes", "cse,dce", str(file)]) == 0
    assert "tile.constant" in capsys.readouterr().out


def test_tile_opt_reads_standard_input(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(to_text(module(softmax()))))
    assert cli.main(["tile-opt", "--passes", "", "-"]) == 0
    assert parse(capsys.readouterr().out).is_structurally_equivalent(module(softmax()))


def test_tile_opt_reports_errors(tmp_path, capsys) -> None:
    file = tmp_path / "bad.mlir"
    file.write_text('builtin.module { "tile.kernel"( }')
    assert cli.main(["tile-opt", str(file)]) == 2
    assert f"{file}:1:" in capsys.readouterr().err
    file.write_text(to_text(module(softmax())))
    assert cli.main(["tile-opt", "--passes", "licm", str(file)]) == 2
    assert "expected one of the passes" in capsys.readouterr().err
    assert cli.main(["tile-opt", str(tmp_path / "absent.mlir")]) == 2


def test_tile_opt_lists_passes(capsys) -> None:
    assert cli.main(["tile-opt", "--list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == list(PASSES)


# --- the page ---


def test_page_is_true() -> None:
    assert document.PAGE.read_text() == document.page(), "write it again with: python -m tessera.tile.document"
