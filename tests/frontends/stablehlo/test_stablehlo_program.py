"""`tessera.stablehlo.load`: what it takes, what it gives, what `stages` and `explain` say, sizes left open, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("jaxlib")

import tessera  # noqa: E402
from tessera.frontends.stablehlo.bindings import bindings, context  # noqa: E402
from tessera.frontends.stablehlo.registry import CUSTOM_CALLS  # noqa: E402
from tessera.util.errors import InputError  # noqa: E402

LAYER = """module @layer {
  func.func public @main(%x: tensor<?x8xf32>, %w: tensor<8x4xf32>, %b: tensor<4xf32>) -> tensor<?x4xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<?x8xf32>, tensor<8x4xf32>) -> tensor<?x4xf32>
    %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x8xf32>) -> tensor<i32>
    %r = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %c = stablehlo.constant dense<4> : tensor<1xi32>
    %s = stablehlo.concatenate %r, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %1 = stablehlo.dynamic_broadcast_in_dim %b, %s, dims = [1] : (tensor<4xf32>, tensor<2xi32>) -> tensor<?x4xf32>
    %2 = stablehlo.add %0, %1 : tensor<?x4xf32>
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %3 = stablehlo.dynamic_broadcast_in_dim %z, %s, dims = [] : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
    %4 = stablehlo.maximum %2, %3 : tensor<?x4xf32>
    return %4 : tensor<?x4xf32>
  }
}"""  # noqa: E501


def given(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 8), torch.randn(8, 4), torch.randn(4)


def expected(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w + b)


def test_text_bytes_bytecode_and_a_path(tmp_path: Path) -> None:
    made = context()
    with made:
        module = bindings().ir.Module.parse(LAYER)
        hlo = bindings().stablehlo
        bytecode = hlo.serialize_portable_artifact(module, hlo.get_minimum_version())
    path = tmp_path / "layer.mlirbc"
    path.write_bytes(bytecode)
    args = given(3)
    for source in (LAYER, LAYER.encode(), bytecode, path, str(path)):
        torch.testing.assert_close(tessera.stablehlo.load(source)(*args), expected(*args))


def test_one_program_serves_all_sizes() -> None:
    f = tessera.stablehlo.load(LAYER)
    for rows in (3, 5, 2, 40):
        args = given(rows)
        torch.testing.assert_close(f(*args), expected(*args))
    assert len(tessera.explain(f).graphs) == 1
    captured = str(tessera.stages(f)["captured"])
    assert "aten.linear" in captured and "aten.relu" in captured


def test_other_layouts_and_gradients() -> None:
    f = tessera.stablehlo.load(LAYER)
    x, w, b = given(6)
    strided = torch.randn(8, 6).t()
    torch.testing.assert_close(f(strided, w, b), expected(strided, w, b))
    w.requires_grad_()
    f(x, w, b).sum().backward()
    again = w.detach().requires_grad_()
    expected(x, again, b).sum().backward()
    torch.testing.assert_close(w.grad, again.grad)
    pulled = tessera.grad(lambda w: f(x, w, b).sum())(w.detach())
    torch.testing.assert_close(pulled, again.grad)


def test_arguments_are_checked() -> None:
    f = tessera.stablehlo.load(LAYER)
    x, w, b = given(3)
    with pytest.raises(InputError, match="expected 3 arguments, got 2"):
        f(x, w)
    with pytest.raises(InputError, match=r"argument 1: expected tensor<8x4xf32>, got torch.float32 \(8, 5\)"):
        f(x, torch.randn(8, 5), b)
    with pytest.raises(InputError, match="argument 2: expected tensor<4xf32>, got torch.float64"):
        f(x, w, b.double())
    with pytest.raises(InputError, match="no file"):
        tessera.stablehlo.load("nowhere.mlir")


def test_an_assertion_about_sizes_is_one_of_the_program() -> None:
    f = tessera.stablehlo.load("""func.func public @main(%x: tensor<?xf32>) -> tensor<?xf32> {
      %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %k = stablehlo.constant dense<4> : tensor<i32>
      %p = stablehlo.compare GE, %n, %k, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%p, %n) {has_side_effect = true, error_message = "too short"}
        : (tensor<i1>, tensor<i32>) -> ()
      %0 = stablehlo.add %x, %x : tensor<?xf32>
      return %0 : tensor<?xf32> }""")
    assert f(torch.ones(5)).tolist() == [2.0] * 5
    with pytest.raises(Exception, match="too short"):
        f(torch.ones(3))


def test_a_size_that_a_value_decides_is_interpreted() -> None:
    f = tessera.stablehlo.load("""func.func public @main(%n: tensor<1xi32>) -> tensor<?xi32> {
      %0 = stablehlo.dynamic_iota %n, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
      return %0 : tensor<?xi32> }""")
    assert f(torch.tensor([3], dtype=torch.int32)).tolist() == [0, 1, 2]
    assert f(torch.tensor([5], dtype=torch.int32)).tolist() == [0, 1, 2, 3, 4]
    (graph,) = tessera.explain(f).eager
    assert "interpreted" in graph.eager_reason and "only a run tells" in graph.eager_reason


def test_a_custom_call_of_ones_own() -> None:
    @tessera.stablehlo.register("test_triple")
    def triple(site, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN001
        return x * site["factor"]

    f = tessera.stablehlo.load("""func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = stablehlo.custom_call @test_triple(%x) {factor = 3.0 : f32} : (tensor<2xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32> }""")
    assert f(torch.tensor([1.0, 2.0])).tolist() == [3.0, 6.0]


CALL = """func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %0 = stablehlo.custom_call @test_given(%x) : (tensor<3xf32>) -> tensor<3xf32>
  return %0 : tensor<3xf32>
}"""


@pytest.mark.parametrize(
    ("fn", "got"),
    [
        (lambda x: x[:2], r"torch.float32 \(2,\)"),
        (lambda x: x[None], r"torch.float32 \(1, 3\)"),
        (lambda x: x.double(), r"torch.float64 \(3,\)"),
        (lambda x: None, "a NoneType"),
        (lambda x: (x, x), "a tuple"),
    ],
)
def test_a_custom_call_gives_what_the_program_says(fn, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CUSTOM_CALLS, "test_given", lambda site, x: fn(x))
    message = f"custom_call @test_given at line 2: expected tensor<3xf32>, got {got}"
    with pytest.raises(InputError, match=message):
        tessera.stablehlo.load(CALL)(torch.ones(3))


def test_a_program_that_takes_a_token() -> None:
    program = tessera.stablehlo.load("""func.func public @main(%t: !stablehlo.token) -> tensor<3xf32> {
      %0:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<3xf32>, !stablehlo.token)
      return %0#0 : tensor<3xf32>
    }""")
    with pytest.raises(InputError, match="argument 0: expected a program of tensors, got one that takes a token"):
        program(torch.ones(3))


OPEN = {
    "add": """func.func public @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
      %0 = stablehlo.add %x, %y : tensor<?xf32>
      return %0 : tensor<?xf32>
    }""",
    "select": """func.func public @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
      %p = stablehlo.compare GT, %x, %x : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xi1>
      %0 = stablehlo.select %p, %x, %y : tensor<?xi1>, tensor<?xf32>
      return %0 : tensor<?xf32>
    }""",
    "dot_general": """func.func public @main(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
      %0 = stablehlo.dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [] x []
        : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xf32>
      return %0 : tensor<?xf32>
    }""",
}


@pytest.mark.parametrize("name", OPEN)
def test_sizes_that_differ_are_not_repeated(name: str) -> None:
    run = tessera.stablehlo.load(OPEN[name])
    for n in (3, 5, 1):
        assert run(torch.ones(n), torch.ones(n)).shape == (n,)
    for sizes in ((3, 1), (1, 3), (1, 4)):
        with pytest.raises(InputError, match=f"stablehlo.{name} at line .*: expected operands of one shape, got sizes"):
            run(*map(torch.ones, sizes))
    with pytest.raises(InputError):
        run(torch.ones(3), torch.ones(4))


def test_branches_and_loops_are_equations() -> None:
    f = tessera.stablehlo.load("""func.func public @main(%x: tensor<f32>) -> (tensor<f32>, tensor<f32>) {
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %l = stablehlo.constant dense<100.0> : tensor<f32>
      %p = stablehlo.compare GT, %x, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
      %0 = "stablehlo.if"(%p) ({ %r = stablehlo.sqrt %x : tensor<f32>
        stablehlo.return %r : tensor<f32> }, { stablehlo.return %z : tensor<f32> }) : (tensor<i1>) -> tensor<f32>
      %1 = stablehlo.while(%c = %x) : tensor<f32>
        cond { %t = stablehlo.compare LT, %c, %l : (tensor<f32>, tensor<f32>) -> tensor<i1>
               stablehlo.return %t : tensor<i1> }
        do { %n = stablehlo.add %c, %l : tensor<f32>
             stablehlo.return %n : tensor<f32> }
      return %0, %1 : tensor<f32>, tensor<f32> }""")
    assert [v.item() for v in f(torch.tensor(9.0))] == [3.0, 109.0]
    assert [v.item() for v in f(torch.tensor(-9.0))] == [0.0, 191.0]
    captured = str(tessera.stages(f)["captured"])
    assert "cond" in captured and "while_loop" in captured


def test_unsigned_arguments_and_results_have_their_own_dtypes() -> None:
    f = tessera.stablehlo.load("""func.func public @main(%x: tensor<2xui32>) -> tensor<2xui32> {
      %0 = stablehlo.multiply %x, %x : tensor<2xui32>
      return %0 : tensor<2xui32> }""")
    out = f(torch.tensor([70000, 3], dtype=torch.uint32))
    assert out.dtype == torch.uint32 and out.tolist() == [70000**2 % 2**32, 9]


def test_a_loop_in_a_call_of_constants() -> None:
    """All that the call takes is known; its loop, of too many turns to write out, is recorded all the same."""
    program = tessera.stablehlo.load("""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {
        %c = stablehlo.constant dense<1.5> : tensor<f32>
        %0 = func.call @doubled(%c) : (tensor<f32>) -> tensor<f32>
        %1 = stablehlo.add %x, %0 : tensor<f32>
        return %1 : tensor<f32>
      }
      func.func private @doubled(%a: tensor<f32>) -> tensor<f32> {
        %most = stablehlo.constant dense<1.0e+06> : tensor<f32>
        %0 = stablehlo.while(%b = %a) : tensor<f32>
        cond {
          %p = stablehlo.compare LT, %b, %most : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        } do {
          %1 = stablehlo.add %b, %b : tensor<f32>
          stablehlo.return %1 : tensor<f32>
        }
        %2 = stablehlo.negate %0 : tensor<f32>
        return %2 : tensor<f32>
      }
    """)
    out = program(torch.tensor(1.0))
    assert type(out) is torch.Tensor and out.item() == 1 - 1.5 * 2**20


@pytest.mark.parametrize(("kind", "nan"), [("f16", "0x7E00"), ("f32", "0x7FC00000"), ("f64", "0x7FF8000000000000")])
def test_jaxs_sort_is_compiled(kind: str, nan: str) -> None:
    """Its comparison has constants of its own, which are looked at while the program is recorded."""
    side = """%z{0} = stablehlo.constant dense<0.0> : tensor<KIND>
        %is{0} = stablehlo.compare EQ, %{0}, %z{0}, FLOAT : (tensor<KIND>, tensor<KIND>) -> tensor<i1>
        %s{0} = stablehlo.select %is{0}, %z{0}, %{0} : tensor<i1>, tensor<KIND>
        %no{0} = stablehlo.compare NE, %{0}, %{0}, FLOAT : (tensor<KIND>, tensor<KIND>) -> tensor<i1>
        %n{0} = stablehlo.constant dense<NAN> : tensor<KIND>
        %t{0} = stablehlo.select %no{0}, %n{0}, %s{0} : tensor<i1>, tensor<KIND>"""
    text = (
        """func.func public @main(%x: tensor<2x5xKIND>) -> tensor<2x5xKIND> {
      %0 = "stablehlo.sort"(%x) <{dimension = 1 : i64}> ({
        ^bb0(%a: tensor<KIND>, %b: tensor<KIND>):
        A
        B
        %r = stablehlo.compare LT, %ta, %tb, TOTALORDER : (tensor<KIND>, tensor<KIND>) -> tensor<i1>
        stablehlo.return %r : tensor<i1> }) : (tensor<2x5xKIND>) -> tensor<2x5xKIND>
      return %0 : tensor<2x5xKIND> }""".replace("        A\n", side.format("a") + "\n")
        .replace("        B\n", side.format("b") + "\n")
        .replace("KIND", kind)
        .replace("NAN", nan)
    )
    x = torch.tensor([[2.0, float("nan"), -1, 0, 5], [-0.0, 3, 0, -7, 1]])
    x = x.to({"f16": torch.half, "f32": torch.float, "f64": torch.double}[kind])
    f = tessera.stablehlo.load(text)
    assert torch.equal(f(x).nan_to_num(99), x.sort(-1)[0].nan_to_num(99))
    assert not tessera.explain(f).eager
