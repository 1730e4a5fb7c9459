"""The public transforms against torch.func, alone and nested in every order."""

from __future__ import annotations

import warnings
from collections import namedtuple

import pytest
import torch
import torch.func as tf
from torch.testing import assert_close

import tessera
from tessera.func import api as t
from tessera.util.config import override
from tessera.util.errors import CaptureError, InputError, RuleError


def scalar(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum() + (x**3).mean()


def vector(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * x.sum() + x.roll(1)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


COMPOSITIONS = {
    "grad": lambda m, x, rows: m.grad(scalar)(x),
    "grad(grad)": lambda m, x, rows: m.grad(lambda x: (m.grad(scalar)(x) ** 2).sum())(x),
    "grad(grad(grad))": lambda m, x, rows: m.grad(m.grad(m.grad(lambda a: a**5 + a.sin())))(x[0]),
    "vmap(grad)": lambda m, x, rows: m.vmap(m.grad(scalar))(rows),
    "grad(vmap)": lambda m, x, rows: m.grad(lambda r: m.vmap(scalar)(r).sum())(rows),
    "vmap(vmap)": lambda m, x, rows: m.vmap(m.vmap(torch.sin))(rows),
    "vmap(vmap) crossed": lambda m, x, rows: m.vmap(m.vmap(torch.dot, (None, 0)), (0, None))(rows, rows),
    "vmap(jacrev)": lambda m, x, rows: m.vmap(m.jacrev(vector))(rows),
    "vmap(hessian)": lambda m, x, rows: m.vmap(m.hessian(scalar))(rows),
    "hessian": lambda m, x, rows: m.hessian(scalar)(x),
    "jacfwd(jacrev)": lambda m, x, rows: m.jacfwd(m.jacrev(vector))(x),
    "jacrev(jacfwd)": lambda m, x, rows: m.jacrev(m.jacfwd(vector))(x),
    "jacrev(jacrev)": lambda m, x, rows: m.jacrev(m.jacrev(vector))(x),
    "jvp(grad)": lambda m, x, rows: m.jvp(m.grad(scalar), (x,), (rows[0],)),
    "grad(jvp)": lambda m, x, rows: m.grad(lambda x: m.jvp(scalar, (x,), (rows[0],))[1])(x),
    "vjp(jvp)": lambda m, x, rows: m.vjp(lambda x: m.jvp(vector, (x,), (rows[0],))[1], x)[1](rows[1]),
    "jvp(vjp)": lambda m, x, rows: m.jvp(lambda x: m.vjp(vector, x)[1](rows[1])[0], (x,), (rows[0],)),
    "jvp(jvp)": lambda m, x, rows: m.jvp(lambda x: m.jvp(vector, (x,), (rows[0],))[1], (x,), (rows[1],)),
    "vmap(jvp)": lambda m, x, rows: m.vmap(lambda r: m.jvp(vector, (x,), (r,))[1])(rows),
    "vmap(vjp)": lambda m, x, rows: m.vmap(m.vjp(vector, x)[1])(rows),
    "jvp(vmap)": lambda m, x, rows: m.jvp(m.vmap(vector), (rows,), (rows.cos(),)),
    "linearize": lambda m, x, rows: m.linearize(vector, x)[1](rows[0]),
    "vmap(linearize)": lambda m, x, rows: m.vmap(m.linearize(vector, x)[1])(rows),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_match_torch_func(name: str, x: torch.Tensor, rows: torch.Tensor) -> None:
    with override(strict=True):  # no way out through torch.func
        got = COMPOSITIONS[name](t, x, rows)
    assert_close(got, COMPOSITIONS[name](tf, x, rows))


def test_perturbations_are_not_confused() -> None:
    three = torch.tensor(3.0)
    inner = t.grad(lambda x: x * t.grad(lambda y: x * y)(torch.tensor(1.0)))
    assert_close(inner(three), torch.tensor(6.0))
    assert_close(t.grad(lambda x: t.grad(lambda y: x * y * y)(x) * x)(three), torch.tensor(54.0))
    tangent = t.jvp(
        lambda x: t.jvp(lambda y: x * y, (torch.tensor(2.0),), (torch.ones(()),))[1], (three,), (torch.ones(()),)
    )
    assert_close(tangent, (three, torch.ones(())))


def test_argnums_aux_and_structures(x: torch.Tensor) -> None:
    Pair = namedtuple("Pair", "a b")

    def f(p: Pair, d: dict, k: float, *, s: torch.Tensor) -> tuple:
        out = (p.a * d["w"] * k).sum() + (p.b * s).sum()
        return out, {"n": p.a + 1}

    args = (Pair(x, x.cos()), {"w": x.sin()}, 2.0)
    for argnums in (0, 1, (0, 1), -2):
        got = t.grad(f, argnums, has_aux=True)(*args, s=x)
        assert_close(got, tf.grad(f, argnums, has_aux=True)(*args, s=x))
    value, grads = t.value_and_grad(f, 1, has_aux=True)(*args, s=x)
    assert_close(value, f(*args, s=x))
    assert_close(grads, {"w": x * 2.0})
    assert t.grad(lambda a: (a.sum(), "text"), has_aux=True)(x)[1] == "text"
    assert_close(t.grad_and_value(scalar)(x), tf.grad_and_value(scalar)(x))


def test_vjp_is_computed_once_and_pulled_often(x: torch.Tensor) -> None:
    calls = []

    def f(a: torch.Tensor, b: torch.Tensor) -> dict:
        calls.append(1)
        y = a * b
        return {"y": y, "again": y, "z": b.sum()}

    out, pull = t.vjp(f, x, x.sin())
    ref, ref_pull = tf.vjp(f, x, x.sin())
    assert_close(out, ref)
    for k in (1.0, 2.0):
        cts = {"y": x * k, "again": x, "z": torch.tensor(k)}
        assert_close(pull(cts), ref_pull(cts))
    assert len(calls) == 2
    single = t.vjp(torch.sin, x)[1](x)
    assert isinstance(single, tuple)
    assert_close(single, (x.cos() * x,))


def test_unused_inputs_get_zeros(x: torch.Tensor) -> None:
    assert_close(t.grad(lambda a, b: a.sum(), (0, 1))(x, x), (torch.ones(4), torch.zeros(4)))
    assert_close(t.jvp(lambda a: torch.ones(3), (x,), (x,)), (torch.ones(3), torch.zeros(3)))
    assert_close(t.jacrev(lambda a: torch.ones(3))(x), torch.zeros(3, 4))
    assert_close(t.jacfwd(lambda a: torch.ones(3))(x), torch.zeros(3, 4))


def test_jacobians_of_structures(x: torch.Tensor) -> None:
    def f(a: torch.Tensor, b: dict) -> tuple:
        return a.sum() * b["w"], {"m": torch.outer(a, a)}

    args = (x, {"w": torch.arange(6.0).reshape(2, 3)})
    for argnums in (0, 1, (0, 1)):
        assert_close(t.jacrev(f, argnums)(*args), tf.jacrev(f, argnums)(*args))
        assert_close(t.jacfwd(f, argnums)(*args), tf.jacfwd(f, argnums)(*args))
    for size in (1, 3, 100):
        assert_close(t.jacrev(vector, chunk_size=size)(x), tf.jacrev(vector)(x))
    assert_close(
        t.jacrev(lambda a: (a * 2, a + 1), has_aux=True)(x), tf.jacrev(lambda a: (a * 2, a + 1), has_aux=True)(x)
    )


def test_vmap_dimensions(rows: torch.Tensor) -> None:
    deep = torch.randn(2, 3, 4)

    def f(a: torch.Tensor, d: dict) -> dict:
        return {"s": a * d["w"], "c": (a.sum(), d["k"])}

    args = (deep, {"w": rows, "k": 3.0})
    cases = [
        ((1, {"w": 0, "k": None}), {"s": -1, "c": (0, None)}),
        ((-2, {"w": 0, "k": None}), {"s": 1, "c": (0, None)}),
    ]
    for in_dims, out_dims in cases:
        got = t.vmap(f, in_dims, out_dims)(*args)
        want = torch.stack([deep[:, i] * rows[i] for i in range(3)], out_dims["s"])
        assert_close(got["s"], want)
        assert got["c"][1] == 3.0
    assert_close(t.vmap(vector, chunk_size=2)(rows), tf.vmap(vector)(rows))
    assert_close(t.vmap(lambda a: torch.ones(2))(rows), torch.ones(3, 2))
    assert_close(t.vmap(lambda a, *, k: a * k)(rows, k=rows[0]), rows * rows[0])


def test_vmap_randomness(rows: torch.Tensor) -> None:
    def noisy(a: torch.Tensor) -> torch.Tensor:
        return a * 0 + torch.rand(4)

    with pytest.raises(InputError, match="randomness"):
        t.vmap(noisy)(rows)
    different = t.vmap(noisy, randomness="different")(rows)
    assert not torch.equal(different[0], different[1])
    same = t.vmap(noisy, randomness="same")(rows)
    assert torch.equal(same[0], same[1])
    drop = t.vmap(lambda a: torch.dropout(a, 0.5, True), randomness="different")(torch.ones(3, 64))
    assert not torch.equal(drop[0], drop[1])


def test_writes(rows: torch.Tensor) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        a[0] = 7.0
        return (a * b).sum()

    ours, theirs = rows.clone(), rows.clone()
    assert_close(t.vmap(f)(ours, rows), tf.vmap(f)(theirs, rows))
    assert_close(ours, theirs)
    assert_close(t.grad(f, 1)(ours := rows[0].clone(), rows[1]), tf.grad(f, 1)(theirs := rows[0].clone(), rows[1]))
    assert_close(ours, theirs)
    with pytest.raises(InputError, match="writes into an argument"):
        t.grad(f, 0)(rows[0].clone(), rows[1])
    with pytest.raises(InputError, match="not batched"):
        t.vmap(lambda a, b: b.add_(a).sum(), (0, None))(rows, torch.zeros(4))
    shared = rows.clone()
    assert_close(t.vmap(f)(shared, shared), tf.vmap(f)(theirs := rows.clone(), theirs))
    inner = t.grad(lambda a: t.vmap(lambda r: (r.clone().mul_(2) ** 2).sum())(a).sum())(rows)
    assert_close(inner, 8 * rows)


def test_no_grad_and_detach(x: torch.Tensor) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            c = a * a
        b = a * 1
        with torch.no_grad():
            b.mul_(3)
        d = a * 1
        d.detach().mul_(5)
        return (c + a.detach() * a + b + d).sum()

    assert_close(t.grad(f)(x), tf.grad(f)(x))
    assert_close(t.jvp(f, (x,), (x.cos(),)), tf.jvp(f, (x,), (x.cos(),)))
    assert_close(t.grad(lambda a: t.vmap(f)(a[None]).sum())(x), tf.grad(f)(x))
    with torch.no_grad():
        assert_close(t.grad(scalar)(x), tf.grad(scalar)(x))
        assert_close(t.hessian(scalar)(x), tf.hessian(scalar)(x))

    def outer(m: object, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            g = m.grad(scalar)(a)  # type: ignore[attr-defined]
        return (g * a).sum()

    assert_close(t.grad(lambda a: outer(t, a))(x), tf.grad(lambda a: outer(tf, a))(x))


def test_eager_autograd_sees_through(x: torch.Tensor) -> None:
    def by(m: object) -> torch.Tensor:
        w = x.cos().requires_grad_(True)
        m.grad(lambda a: (a * w).sin().sum())(x).sum().backward()  # type: ignore[attr-defined]
        m.vmap(lambda a: a * w)(torch.ones(2, 4)).sum().backward()  # type: ignore[attr-defined]
        m.jvp(lambda a: a * w, (x,), (x,))[1].sum().backward()  # type: ignore[attr-defined]
        return w.grad  # type: ignore[return-value]

    assert_close(by(t), by(tf))


def test_inside_torch_func_and_around_it(x: torch.Tensor, rows: torch.Tensor) -> None:
    assert_close(tf.grad(lambda a: (t.grad(scalar)(a) ** 2).sum())(x), COMPOSITIONS["grad(grad)"](tf, x, rows))
    assert_close(t.grad(lambda a: (tf.grad(scalar)(a) ** 2).sum())(x), COMPOSITIONS["grad(grad)"](tf, x, rows))
    assert_close(tf.vmap(t.hessian(scalar))(rows), tf.vmap(tf.hessian(scalar))(rows))
    assert_close(t.vmap(tf.grad(scalar))(rows), tf.vmap(tf.grad(scalar))(rows))
    assert_close(
        t.grad(lambda a: tf.jvp(scalar, (a,), (x,))[1])(x), tf.grad(lambda a: tf.jvp(scalar, (a,), (x,))[1])(x)
    )


def test_complex(x: torch.Tensor) -> None:
    z = torch.complex(x, x.cos())

    def f(z: torch.Tensor) -> torch.Tensor:
        return (z * z.conj() * z.real).real.sum() + torch.fft.fft(z).abs().sum()

    assert_close(t.grad(f)(z), tf.grad(f)(z))
    out, pull = t.vjp(lambda z: z * z + z.conj(), z)
    assert_close(pull(z), tf.vjp(lambda z: z * z + z.conj(), z)[1](z))
    assert_close(t.jvp(lambda z: z * z.conj(), (z,), (z + 1,)), tf.jvp(lambda z: z * z.conj(), (z,), (z + 1,)))


def test_modules_and_functional_call(rows: torch.Tensor) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1))
    params = {k: v.detach() for k, v in net.named_parameters()}

    def loss(p: dict, r: torch.Tensor) -> torch.Tensor:
        return tf.functional_call(net, p, (r,)).pow(2).sum()

    assert_close(t.grad(loss)(params, rows), tf.grad(loss)(params, rows))
    per_example = t.vmap(t.grad(loss), (None, 0))(params, rows)
    assert_close(per_example, tf.vmap(tf.grad(loss), (None, 0))(params, rows), rtol=1e-4, atol=1e-5)
    assert_close(t.grad(lambda r: net(r).sum())(rows), tf.grad(lambda r: net(r).sum())(rows))


def test_autocast_is_part_of_the_program(rows: torch.Tensor) -> None:
    net = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        got = t.grad(lambda r: net(r).float().sum())(rows)
        assert_close(got, tf.grad(lambda r: net(r).float().sum())(rows))
        assert t.vmap(net)(rows).dtype == torch.bfloat16


def test_errors_say_what_was_expected(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="one real scalar, got f32"):
        t.grad(vector)(x)
    with pytest.raises(InputError, match="argnums=3"):
        t.grad(scalar, 3)(x)
    with pytest.raises(InputError, match="floating-point"):
        t.grad(scalar)(torch.arange(3))
    with pytest.raises(InputError, match=r"cotangent of type f32\[4\], got f32\[3\]"):
        t.vjp(vector, x)[1](torch.ones(3))
    with pytest.raises(InputError, match="structure"):
        t.jvp(vector, (x,), (x, x))
    with pytest.raises(InputError, match="same size"):
        t.vmap(torch.dot)(x, torch.ones(3))
    with pytest.raises(InputError, match="in_dims"):
        t.vmap(torch.dot, (0,))(x, x)
    with pytest.raises(InputError, match="dimensions"):
        t.vmap(torch.sin, 1)(x)


def test_asking_for_a_value_names_the_line(x: torch.Tensor) -> None:
    def branches(a: torch.Tensor) -> torch.Tensor:
        return a.sum() if a.sum() > 0 else -a.sum()

    line = rf"test_transform_api.py:{branches.__code__.co_firstlineno + 1}.*torch.cond"
    with override(strict=True), pytest.raises(CaptureError, match=line):
        t.grad(branches)(x)
    with pytest.raises(CaptureError, match=line):
        t.vmap(branches)(x.expand(2, 4))
    with pytest.warns(UserWarning, match=line):
        assert_close(t.grad(branches)(x), tf.grad(branches)(x))


def test_what_cannot_be_traced_runs_through_torch_func(x: torch.Tensor) -> None:
    var = x.abs() + 0.1

    def f(a: torch.Tensor) -> torch.Tensor:  # PyTorch's own Python looks at values here
        return torch.nn.functional.gaussian_nll_loss(a, x.sin(), var)

    with pytest.warns(UserWarning, match=r"test_transform_api.py:\d+: the program asks .* torch.where"):
        assert_close(t.grad(f)(x), tf.grad(f)(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        t.grad(f)(x)  # told once
    assert_close(t.grad(lambda a: (a * a.max().item()).sum())(x), x.max().expand(4))
    mask = x > 0
    assert_close(t.grad(lambda a: a[mask].pow(2).sum())(x), torch.where(mask, 2 * x, 0.0))
    with override(strict=True), pytest.raises(CaptureError):
        t.grad(f)(x)


def test_a_tensor_that_leaks_out_of_a_trace_is_named(x: torch.Tensor) -> None:
    kept = []
    t.grad(lambda a: (kept.append(a * 2), a.sum())[1])(x)
    with override(strict=True), pytest.raises(CaptureError, match="another traced function"):
        t.grad(lambda a: (a * kept[0]).sum())(x)


def test_second_derivatives_of_formulas_that_differ(x: torch.Tensor) -> None:
    a = torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) + 4 * torch.eye(4)

    def second(m: object, f: object) -> torch.Tensor:
        return m.grad(lambda a: (m.grad(f)(a) ** 2).sum())(a)  # type: ignore[attr-defined]

    for f in (
        lambda a: torch.linalg.solve(a, x).pow(2).sum(),
        torch.logdet,
        lambda a: torch.nn.functional.silu(a).sum(),
    ):
        assert_close(second(t, f), second(tf, f), rtol=1e-3, atol=1e-4)


def test_hessian_of_kernels_that_do_not_broadcast(x: torch.Tensor) -> None:
    norm, gelu = torch.nn.LayerNorm(4), torch.nn.functional.gelu

    def f(x: torch.Tensor) -> torch.Tensor:
        return norm(gelu(norm(gelu(x)))).pow(3).sum()

    assert_close(t.hessian(f)(x), tf.hessian(f)(x), rtol=1e-4, atol=1e-4)
    assert_close(t.vmap(lambda ct: t.vjp(gelu, x)[1](ct)[0])(x[None]), tf.vjp(gelu, x)[1](x)[0][None])


@pytest.mark.parametrize("compiler", ["eager", "tessera"])
def test_under_torch_dynamo(compiler: str, rows: torch.Tensor) -> None:
    def step(r: torch.Tensor) -> tuple:
        return t.grad(scalar)(r[0]), t.vmap(vector)(r), t.vjp(vector, r[0])[1](r[1]), t.hessian(scalar)(r[0])

    torch._dynamo.reset()
    assert_close(
        torch.compile(step, backend=tessera.backend if compiler == "tessera" else compiler, fullgraph=True)(rows),
        step(rows),
    )


def test_while_loop_refuses_reverse_mode(x: torch.Tensor) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return t.while_loop(lambda a: a.sum() < 10, lambda a: (a + 1,), (a,))[0].sum()

    with pytest.raises(RuleError, match="scan"):
        t.grad(f)(x)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "vjp", "jacrev", "hessian"])
def test_saved_tensor_hooks_are_refused_by_reverse_mode(name):
    """What a transform keeps is not what autograd saves; torch.func refuses them too. Forward mode keeps nothing."""

    def hooked(x):
        with torch.autograd.graph.save_on_cpu():
            return x.sin().sum()

    def call(func, x):
        return tessera.vjp(func, x) if name == "vjp" else getattr(tessera, name)(func)(x)

    x = torch.randn(3)
    for strict in (False, True):
        with override(strict=strict), pytest.raises(RuntimeError, match="saved tensor hooks"):
            call(hooked, x)
        refused = pytest.raises(RuntimeError, match="saved tensor hooks")
        with override(strict=strict), refused, torch.autograd.graph.save_on_cpu():
            call(lambda x: x.sin().sum(), x)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(tessera.jvp(hooked, (x,), (x,))[1], (x.cos() * x).sum())
