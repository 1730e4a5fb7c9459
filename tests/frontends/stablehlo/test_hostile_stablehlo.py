"""Files that mean harm, or are broken: each ends in one clear error, soon and without much memory."""

from __future__ import annotations

import random
import resource
import time
from pathlib import Path

import mutations
import pytest
import torch

pytest.importorskip("jaxlib")

from tessera.frontends.stablehlo.bindings import bindings, context  # noqa: E402
from tessera.frontends.stablehlo.parse import parse  # noqa: E402
from tessera.stablehlo import load  # noqa: E402
from tessera.util.errors import TesseraError  # noqa: E402


def main(body: str, takes: str = "%a: tensor<f32>", gives: str = "tensor<f32>") -> str:
    return f"func.func public @main({takes}) -> {gives} {{ {body} }}"


def nested(depth: int) -> str:
    inner = "%r = stablehlo.add %a, %a : tensor<f32>"
    for _ in range(depth):
        inner = f"""%r = "stablehlo.if"(%p) ({{ {inner}
          stablehlo.return %r : tensor<f32> }}, {{ stablehlo.return %a : tensor<f32> }})
          : (tensor<i1>) -> tensor<f32>"""
    return main(f"{inner} return %r : tensor<f32>", "%a: tensor<f32>, %p: tensor<i1>")


def chain(length: int) -> str:
    parts = [
        f"func.func private @f{i}(%a: tensor<f32>) -> tensor<f32> {{ "
        f"%0 = func.call @f{i + 1}(%a) : (tensor<f32>) -> tensor<f32> return %0 : tensor<f32> }}"
        for i in range(length)
    ]
    parts.append(f"func.func private @f{length}(%a: tensor<f32>) -> tensor<f32> {{ return %a : tensor<f32> }}")
    start = main("%0 = func.call @f0(%a) : (tensor<f32>) -> tensor<f32> return %0 : tensor<f32>")
    return "\n".join([start, *parts])


def doubled(length: int) -> str:
    """Functions each of which calls the next one twice."""
    call = "func.call @f{} (%{}) : (tensor<f32>) -> tensor<f32>"
    parts = [
        f"func.func private @f{i}(%a: tensor<f32>) -> tensor<f32> {{ %0 = {call.format(i + 1, 'a')} "
        f"%1 = {call.format(i + 1, '0')} return %1 : tensor<f32> }}"
        for i in range(length)
    ]
    parts.append(f"func.func private @f{length}(%a: tensor<f32>) -> tensor<f32> {{ return %a : tensor<f32> }}")
    return "\n".join([main(f"%0 = {call.format(0, 'a')} return %0 : tensor<f32>"), *parts])


def custom(target: str, attributes: str, body: str = "%0 = stablehlo.add %a, %b : tensor<f32>", sizes: int = 5) -> str:
    """A call that JAX writes for open sizes, and a function `r` that it may call."""
    operands = ", ".join(["%x", "%z"] + ["%w"] * sizes)
    types = ", ".join(["tensor<4xf32>", "tensor<f32>"] + ["tensor<2xi32>"] * sizes)
    return f"""func.func @r(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {{ {body} return %0 : tensor<f32> }}
      func.func public @main(%x: tensor<4xf32>) -> tensor<?xf32> {{
        %z = stablehlo.constant dense<0.0> : tensor<f32>
        %w = stablehlo.constant dense<2147483647> : tensor<2xi32>
        %0 = stablehlo.custom_call @{target}({operands}) {{{attributes}}} : ({types}) -> tensor<?xf32>
        return %0 : tensor<?xf32> }}"""


WINDOW, TOP = "stablehlo.dynamic_reduce_window", "ApproxTopK"
ITSELF = f"%0 = stablehlo.custom_call @{WINDOW}(%a) {{called_computations = [@r]}} : (tensor<f32>) -> tensor<f32>"
HOSTILE = {
    "a window over more than there is": custom(WINDOW, "called_computations = [@r]"),
    "a window of too few sizes": custom(WINDOW, "called_computations = [@r]", sizes=1),
    "a window whose body is nowhere": custom(WINDOW, "called_computations = [@s]"),
    "a window without a body": custom(WINDOW, ""),
    "a window whose body holds it": custom(WINDOW, "called_computations = [@r]", ITSELF),
    "the largest by a number": custom(TOP, "mhlo.backend_config = 3 : i32"),
    "the largest of no dimension": custom(TOP, "mhlo.backend_config = {top_k = 2 : i64}"),
    "fewer than none": custom(TOP, "mhlo.backend_config = {top_k = -2 : i64, reduction_dim = 0 : i64}"),
    "functions that call others twice, and so on": doubled(60),
    "an attribute of gigabytes": main(
        "%0 = stablehlo.abs %a {x = dense<0> : tensor<1000000000xi64>} : tensor<f32> return %0 : tensor<f32>"
    ),
    "nothing": "",
    "no function": "module {}",
    "bytes that are no text": b"\xff\xfe\x00\x01" * 20,
    "bytecode cut off": b"ML\xefR\x06",
    "bytecode of zeros": b"ML\xefR" + bytes(200),
    "brackets without end": "func.func @main() { " + "(" * 100_000,
    "types nested deep": "func.func @main(%a: " + "tuple<" * 5_000 + "f32" + ">" * 5_000 + ") { return }",
    "regions nested deep": nested(70),
    "a function that calls itself": main(
        "%0 = func.call @main(%a) : (tensor<f32>) -> tensor<f32> return %0 : tensor<f32>"
    ),
    "functions that call each other": """func.func public @main(%a: tensor<f32>) -> tensor<f32> {
        %0 = func.call @g(%a) : (tensor<f32>) -> tensor<f32>
        return %0 : tensor<f32> }
      func.func private @g(%a: tensor<f32>) -> tensor<f32> {
        %0 = func.call @main(%a) : (tensor<f32>) -> tensor<f32>
        return %0 : tensor<f32> }""",
    "calls nested deep": chain(250),
    "a call of nobody": main("%0 = func.call @nobody(%a) : (tensor<f32>) -> tensor<f32> return %0 : tensor<f32>"),
    "a value that is not there": main("%0 = stablehlo.add %a, %b : tensor<f32> return %0 : tensor<f32>"),
    "a value defined twice": main(
        "%0 = stablehlo.add %a, %a : tensor<f32> %0 = stablehlo.add %a, %a : tensor<f32> return %0 : tensor<f32>"
    ),
    "a constant of terabytes": main(
        "%0 = stablehlo.constant dense<1.0> : tensor<1000000x1000000xf32> %1 = stablehlo.abs %a : tensor<f32> "
        "return %1 : tensor<f32>"
    ),
    "an iota of terabytes": main("%0 = stablehlo.iota dim = 0 : tensor<4000000000000xi64> return %a : tensor<f32>"),
    "a size beyond 64 bits": main(
        "%0 = stablehlo.iota dim = 0 : tensor<99999999999999999999999xi64> return %a : tensor<f32>"
    ),
    "sizes whose product overflows": main(
        "%0 = stablehlo.iota dim = 0 : tensor<4294967296x4294967296x4294967296xi8> return %a : tensor<f32>"
    ),
    "a constant of the wrong length": main(
        "%0 = stablehlo.constant dense<[1.0, 2.0]> : tensor<3xf32> return %a : tensor<f32>"
    ),
    "a slice out of bounds": main(
        "%0 = stablehlo.slice %a [5:9] : (tensor<4xf32>) -> tensor<4xf32> return %0 : tensor<4xf32>",
        "%a: tensor<4xf32>", "tensor<4xf32>",
    ),
    "an unknown dialect": main('%0 = "python.exec"() {code = "import os"} : () -> tensor<f32> return %0 : tensor<f32>'),
    "an unknown custom call": main(
        "%0 = stablehlo.custom_call @os.system(%a) : (tensor<f32>) -> tensor<f32> return %0 : tensor<f32>"
    ),
    "an infeed": """func.func public @main(%a: tensor<f32>) -> tensor<f32> {
        %t = stablehlo.create_token : !stablehlo.token
        %0:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<f32>, !stablehlo.token)
        return %0#0 : tensor<f32> }""",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_ends_in_one_error(name: str) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source = HOSTILE[name]
    with pytest.raises(TesseraError) as error:
        program = load(source.encode() if isinstance(source, str) else source)
        program(torch.tensor(1.0))
    assert str(error.value).strip()
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024


def test_a_limit_can_be_raised() -> None:
    text = main("%0 = stablehlo.iota dim = 0 : tensor<100000000xi64> return %a : tensor<f32>")
    with pytest.raises(TesseraError, match="limit="):
        parse(text)
    assert parse(text, limit=10**9).main.name == "main"


def test_changed_text_ends_in_an_error_or_an_answer(tmp_path: Path) -> None:
    """A character or two changed: MLIR refuses it, we do, or it is a program."""
    attempt = mutations.mlir(tmp_path)
    said = {seed: attempt(seed) for seed in range(40)}
    assert {seed: told for seed, told in said.items() if told.startswith("fault")} == {}


@pytest.mark.parametrize("seed", [2, 14, 22])
def test_damaged_bytecode_is_refused(seed: int) -> None:
    """Bytes changed at random: whatever MLIR's reader does with them, this process goes on."""
    with context():
        hlo = bindings().stablehlo
        module = bindings().ir.Module.parse(mutations.MLIR)
        data = bytearray(hlo.serialize_portable_artifact(module, hlo.get_minimum_version()))
    draw = random.Random(seed)
    for _ in range(4):
        data[draw.randrange(4, len(data))] = draw.randrange(256)
    with pytest.raises(TesseraError):
        load(bytes(data))
