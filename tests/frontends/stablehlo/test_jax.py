"""Programs that JAX wrote: `from_jax` gives what JAX gives, for every size that was exported as a symbol."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

import tessera  # noqa: E402
from tessera.frontends.stablehlo.capture import Imported  # noqa: E402
from tessera.frontends.stablehlo.parse import parse  # noqa: E402

jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles each program for one run
jnp = jax.numpy


def normal(*shape: int) -> object:
    """NumPy draws: JAX would compile a program for every shape, some of them while tests are collected."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))


def tensors(tree: object) -> object:
    return jax.tree_util.tree_map(lambda a: torch.from_numpy(np.array(a)), tree)


def described(tree: object) -> object:
    return jax.tree_util.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def check(f: Callable, fn: Callable, *args: object, eager: bool = False) -> None:
    given, wanted = map(jax.tree_util.tree_leaves, (f(*tensors(args)), tensors(jax.jit(fn)(*args))))
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    assert bool(tessera.explain(f).eager) == eager


def mlp(params: list, x: object) -> object:
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


LAYERS = [(normal(16, 32), normal(32)), (normal(32, 8), normal(8))]


def test_mlp_of_any_number_of_rows() -> None:
    (rows,) = jax.export.symbolic_shape("rows")
    f = tessera.from_jax(mlp, described(LAYERS), jax.ShapeDtypeStruct((rows, 16), jnp.float32))
    for count in (4, 9):
        check(f, mlp, LAYERS, normal(count, 16))
    assert len(tessera.explain(f).graphs) == 1
    captured = str(tessera.stages(f)["captured"])
    assert captured.count("aten.linear") == 2 and captured.count("aten.gelu") == 1


def attention(q: object, k: object, v: object) -> object:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)


def test_attention_is_found_again() -> None:
    q = normal(2, 4, 16, 8)
    f = tessera.from_jax(attention, q, q, q)
    check(f, attention, q, q + 1, q * 2)
    assert "scaled_dot_product_attention" in str(tessera.stages(f)["captured"])


def convnet(params: list, x: object) -> object:
    names = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, params[0], (1, 1), "SAME", dimension_numbers=names))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.lax.conv_general_dilated(x, params[1], (2, 2), "SAME", dimension_numbers=names)
    return x.mean((1, 2)) @ params[2]


def test_convnet_of_any_batch() -> None:
    params = [normal(3, 3, 3, 4), normal(3, 3, 4, 8), normal(8, 10)]
    (rows,) = jax.export.symbolic_shape("rows")
    f = tessera.from_jax(convnet, described(params), jax.ShapeDtypeStruct((rows, 8, 8, 3), jnp.float32))
    check(f, convnet, params, normal(2, 8, 8, 3))


def lstm(params: list, xs: object) -> tuple:
    def step(carry: tuple, x: object) -> tuple:
        h, c = carry
        i, f, g, o = jnp.split(x @ params[0] + h @ params[1], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((xs.shape[1], 8))
    return jax.lax.scan(step, (zero, zero), xs)


def test_lstm_scan_of_any_batch() -> None:
    params = [normal(4, 32), normal(8, 32)]
    (rows,) = jax.export.symbolic_shape("rows")
    f = tessera.from_jax(lstm, described(params), jax.ShapeDtypeStruct((20, rows, 4), jnp.float32))
    check(f, lstm, params, normal(20, 3, 4))
    assert "while_loop" in str(tessera.stages(f)["captured"])


def adam(params: list, m: list, v: list, count: object, x: object, y: object) -> tuple:
    def loss(params: list) -> object:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(mlp(params, x)), y[:, None], 1))

    value, grads = jax.value_and_grad(loss)(params)
    tree_map = jax.tree_util.tree_map
    m = tree_map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    params = tree_map(
        lambda p, m, v: p - 1e-2 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8), params, m, v
    )
    return value, params, m, v


def test_optimizer_step() -> None:
    first, second = (jax.tree_util.tree_map(lambda p, n=n: p**n, LAYERS) for n in (1, 2))
    args = (LAYERS, first, second, jnp.float32(1.0), normal(6, 16), jnp.arange(6))
    check(tessera.from_jax(adam, *args), adam, *args)


def test_random_bits_are_those_of_jax() -> None:
    def draw(seed: object) -> tuple:
        key = jax.random.PRNGKey(seed)
        return jax.random.bits(key, (5,)), jax.random.uniform(key, (3,))

    f = tessera.from_jax(draw, jnp.int32(3))
    bits, numbers = f(torch.tensor(3, dtype=torch.int32))
    wanted, floats = jax.jit(draw)(3)
    assert bits.tolist() == wanted.tolist() and numbers.tolist() == floats.tolist()


@pytest.mark.parametrize("algorithm", ["three_fry", "philox"])
@pytest.mark.parametrize(("shape", "dtype"), [((7,), "uint32"), ((3, 4), "uint32"), ((5,), "uint64"), ((6,), "uint8")])
def test_generators_give_xlas_bits(algorithm: str, shape: tuple, dtype: str) -> None:
    kind = getattr(jax.lax.RandomAlgorithm, f"RNG_{algorithm.upper()}")
    with jax.enable_x64(True):
        state = jnp.array([0x12345678, 0x9ABCDEF0, 0xFFFFFFFE, 0xFFFFFFFF], jnp.uint32)

        def draw(state: object) -> tuple:
            return jax.lax.rng_bit_generator(state, shape, jnp.dtype(dtype), algorithm=kind)

        exported = jax.export.export(jax.jit(draw))(state)
        new, bits = Imported(parse(exported.mlir_module_serialized)).run(tensors(state))
        wanted_state, wanted = jax.jit(draw)(state)
        assert bits.tolist() == np.array(wanted).tolist()
        assert new.tolist() == np.array(wanted_state).tolist()


def test_linear_algebra() -> None:
    a = normal(4, 4)
    a = a @ a.T + 3 * jnp.eye(4)

    def solve(a: object) -> tuple:
        return jnp.linalg.cholesky(a), jnp.linalg.solve(a, a[0]), jnp.linalg.eigh(a)[0], jnp.linalg.det(a)

    check(tessera.from_jax(solve, a), solve, a)


def test_control_flow() -> None:
    def choose(x: object, i: object) -> tuple:
        turned = jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x)
        grown = jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2 + 1, jnp.abs(x))
        return jax.lax.cond(i > 2, lambda x: x * 2, lambda x: x - 1, x), turned, grown

    f = tessera.from_jax(choose, normal(5), jnp.int32(0))
    for i in (0, 1, 7):
        check(f, choose, normal(5), jnp.int32(i))


OPEN = {
    "halves": lambda x: (x[: x.shape[0] // 2], x[::2]),  # signs of remainders are compared
    "rolled": lambda x: (jnp.roll(x, 1, 0), jnp.repeat(x, 2, 0)),
    "running": lambda x: (jnp.cumsum(x, 0), jax.lax.cummax(x, 0), jax.lax.cumprod(x, 0, reverse=True)),
    "windows": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (2, 1), "SAME"),
    "largest": lambda x: jax.lax.top_k(x.T, x.shape[0] - 1),
    "about the largest": lambda x: (jax.lax.approx_max_k(x, 2), jax.lax.approx_min_k(x, 3)),
    "bits": lambda x: jax.random.bits(jax.random.key(1, impl="rbg"), x.shape, jnp.uint32),
    "where": lambda x: (jnp.argmax(x, 0), jnp.argmin(x, 0), jnp.argmax((x * 9).astype(jnp.int32), 0)),
    "in turn": lambda x: jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(4), x),
    "gradient": lambda x: jax.grad(lambda x: jnp.cumsum(x, 0).sum() * x.mean())(x),
}


@pytest.mark.parametrize("name", OPEN)
def test_one_program_for_all_sizes(name: str) -> None:
    def fn(x: object) -> object:
        return OPEN[name](x)

    f = tessera.from_jax(fn, jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 4"), jnp.float32))
    for rows in (5, 12):
        check(f, fn, normal(rows, 4))
    assert (
        len(tessera.explain(f).graphs) == 1 or name == "windows"
    )  # how wide their padding is depends on the remainder


def test_the_first_of_equal_ones_and_numbers_that_are_none() -> None:
    def fn(x: object) -> tuple:
        return jnp.argmax(x, 1), jnp.argmin(x, 1), jnp.argmax(x)

    rows = [[1.0, 3.0, 3.0], [2.0, math.nan, 5.0], [-math.inf] * 3, [math.inf] * 3, [0.0, -0.0, 0.0]]
    check(tessera.from_jax(fn, normal(5, 3)), fn, jnp.array(rows))


LEAVING = {
    "mlp": (mlp, (LAYERS, normal(4, 16))),
    "attention": (attention, (normal(1, 2, 8, 4),) * 3),
    "convnet": (convnet, ([normal(3, 3, 3, 4), normal(3, 3, 4, 8), normal(8, 10)], normal(2, 8, 8, 3))),
}


@pytest.mark.parametrize("way", ["artifact", "onnx"])
@pytest.mark.parametrize("name", LEAVING)
def test_a_program_of_jax_leaves_as_a_file(name: str, way: str, tmp_path: Path) -> None:
    fn, args = LEAVING[name]
    given, wanted = tensors(args), tensors(jax.jit(fn)(*args))
    f = tessera.from_jax(fn, *args)
    if way == "onnx":
        pytest.importorskip("onnx")
        net = tessera.onnx.load(tessera.onnx.export(f, given), compile=False)
        out = net(*jax.tree_util.tree_leaves(given))
    else:
        tessera.export(f, given, tmp_path / "f.tess")
        out = tessera.load(tmp_path / "f.tess", compile=False)(*given)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=2e-5)


def test_inside_what_is_compiled() -> None:
    f = tessera.from_jax(lambda a: jnp.sin(a) * 2, described(normal(3)))
    x = torch.randn(3)
    for run in (tessera.jit(f), tessera.jit(lambda y: f(y) + 1 - 1)):
        torch.testing.assert_close(run(x), 2 * x.sin())
