"""Linear layers that multiply in 8 bits: their values and gradients, and which layers stay as they are."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fp8_reference import Layer8
from torch import nn
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.just_in_time.compiled import compiled_state
from tessera.ops import fp8_linear
from tessera.util.errors import OptionError

BF16 = torch.bfloat16
TILE = ["tile", "aten"]


def recipe(**options) -> tessera.FP8:
    return tessera.FP8(**{"skip": (), "smallest": 16, **options})


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with tessera.override(verify=True):
        yield


def compiled(model, precision, executors=("aten",), **options):
    return tessera.jit(model, executors=list(executors), strict=True, precision=precision, **options)


def gradients(model, *args):
    """Its result, and the gradients of the parameters and of the first argument."""
    x = args[0].detach().requires_grad_(args[0].is_floating_point())
    for p in model.parameters():
        p.grad = None
    y = model(x, *args[1:])
    (y.float() * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return y.detach(), {**found, "x": x.grad}


def account(fast):
    return compiled_state(fast).compilations()[-1].account


def stage(fast, title):
    return dict(account(fast).stages)[title]


def count(trace, name: str) -> int:
    return sum(eqn.opname == name or getattr(eqn.op, "name", "") == name for eqn in trace.equations)


def close(found, wanted):
    """Within two roundings to 16 bits of what the largest numbers are."""
    scale = float(wanted.float().abs().max())
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=2**-8 * scale)


class Gated(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Three(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.last(F.gelu(self.middle(F.gelu(self.first(x)))))


# --- values ---


@pytest.mark.parametrize("executors", [["aten"], TILE], ids=["aten", "tile"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype, bias", [(BF16, True), (torch.float16, False)])
def test_values_and_gradients(scaling, dtype, bias, executors):
    layer = nn.Linear(48, 32, bias=bias).to(dtype)
    model, plain = nn.Sequential(layer), nn.Sequential(Layer8(copy.deepcopy(layer), scaling))
    x = (torch.randn(2, 16, 48) * 10 ** torch.randn(2, 16, 1)).to(dtype)
    if dtype is torch.float16:
        x = x.clamp(-20, 20)
    fast = compiled(model, recipe(scaling=scaling), executors)
    (y, grads), (wanted, expected) = gradients(fast, x), gradients(plain, x)
    close(y, wanted)
    for name, grad in expected.items():
        assert grads[name].dtype is dtype and grads[name].isfinite().all()
        close(grads[name], grad)
    dtypes = [eqn.inputs()[0].dtype for eqn in stage(fast, "vjp").equations if eqn.opname == "_scaled_mm"]
    gradient = torch.float8_e5m2 if scaling == "tensor" else torch.float8_e4m3fn
    if fp8_linear.multiplies("cpu", gradient, scaling == "row"):
        assert dtypes == [torch.float8_e4m3fn, gradient, gradient]


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_where_the_library_cannot_the_products_are_written_out(scaling, monkeypatch):
    x, model = torch.randn(32, 32, dtype=BF16), Gated().to(BF16)
    y, grads = gradients(compiled(model, recipe(scaling=scaling)), x)
    monkeypatch.setattr(fp8_linear, "multiplies", lambda *_: False)
    fast = compiled(model, recipe(scaling=scaling))
    other, others = gradients(fast, x)
    assert count(stage(fast, "vjp"), "_scaled_mm") == 0 and count(stage(fast, "vjp"), "mm") == 9
    close(other, y)
    for name, grad in grads.items():
        close(others[name], grad)


@pytest.mark.parametrize("executors", [["aten"], TILE], ids=["aten", "tile"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_block_follows_16_bits(scaling, executors):
    model, x = Gated().to(BF16), torch.randn(2, 32, 32, dtype=BF16)
    y, grads = gradients(compiled(model, recipe(scaling=scaling), executors), x)
    wanted, expected = gradients(model, x)
    assert (y - wanted).norm() < 0.04 * wanted.norm()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() < 0.12 * grad.norm(), name


def test_delayed_scales_are_those_of_earlier_steps():
    layer = nn.Linear(32, 32).to(BF16)
    plain = Layer8(copy.deepcopy(layer))
    fast = compiled(nn.Sequential(layer), recipe(history="delayed", length=2))
    history: list[list[torch.Tensor]] = []
    for i in range(4):
        x = torch.randn(32, 32, dtype=BF16) * 4.0 ** (-i if i < 3 else 3)  # the last step is beyond what was seen
        recent = [torch.stack(tops).amax() for tops in zip(*history[-2:], strict=True)]
        of = (448.0, 448.0, 57344.0)
        plain.scales = tuple(t / n for t, n in zip(recent, of, strict=True)) if recent else (torch.ones(()),) * 3
        (y, grads), (wanted, expected) = gradients(fast, x), gradients(nn.Sequential(plain), x)
        close(y, wanted)
        for a, b in zip(grads.values(), expected.values(), strict=True):
            close(a, b)
        g = torch.linspace(-1, 2, y.numel()).to(BF16)
        history.append([v.float().abs().amax() for v in (x, layer.weight.detach(), g)])
    (held,) = compiled_state(fast).backend.options.histories.held.values()
    torch.testing.assert_close(held[0], torch.stack(history[-1]))
    torch.testing.assert_close(held[1], torch.stack(history[-2]))


@pytest.mark.parametrize("history", ["current", "delayed"])
def test_infinity_is_seen(history):
    model, x = nn.Sequential(nn.Linear(32, 32)).to(BF16), torch.randn(32, 32, dtype=BF16)
    fast = compiled(model, recipe(history=history))
    gradients(fast, x)
    x[3, 5] = torch.inf
    y, grads = gradients(fast, x)
    assert y.isnan().all() and not grads["0.weight"].isfinite().any()
    x[3, 5] = 1.0
    assert gradients(fast, x)[0].isfinite().all()


def test_without_gradients_it_computes_the_same():
    model, x = Gated().to(BF16), torch.randn(32, 32, dtype=BF16)
    fast = compiled(model, recipe())
    y, _ = gradients(fast, x)
    with torch.no_grad():
        close(fast(x), y)
    trace = stage(fast, "fp8_products")
    assert count(trace, "fp8_linear") == 0
    assert len(account(fast).fp8.multiplied) == 3


# --- what is rounded, and how often ---


def test_layers_that_read_the_same_share_it():
    model, x = Gated().to(BF16), torch.randn(32, 32, dtype=BF16)
    for history in ("current", "delayed"):
        fast = compiled(model, recipe(history=history))
        gradients(fast, x)
        forward = stage(fast, "forward")
        rounded = [e for e in forward.equations if e.opname == "_to_copy" and e.out.dtype.itemsize == 1]
        assert len(rounded) == 2 + 3  # the norm's result, the gated product, and three weights


def test_rounded_numbers_are_kept_for_backward_turned():
    model, x = Gated().to(BF16), torch.randn(32, 32, dtype=BF16)
    fast = compiled(model, recipe(), TILE)
    gradients(fast, x)
    backward = stage(fast, "backward")
    kept = [v for v in backward.inputs if v.dtype is torch.float8_e4m3fn]
    assert len(kept) == 5
    casts = [e for e in backward.equations if e.opname == "_to_copy" and e.out.dtype.itemsize == 1]
    assert {e.out.dtype for e in casts} == {torch.float8_e5m2} and len(casts) == 3


def test_one_kernel_writes_rows_and_columns():
    model, x = Gated().to(BF16), torch.randn(32, 32, dtype=BF16)
    fast = compiled(model, recipe(), TILE)
    gradients(fast, x)
    fused = [claim.operators for claim in account(fast).claims if claim.executor == "tile"]
    assert any("aten.silu" in ops and "aten.amax" in ops for ops in fused)
    assert sum("aten.clone" in ops and "aten._to_copy" in ops for ops in fused) == 5 + 3
    assert not any("aten.clone" in ops and "aten.amax" in ops for ops in fused)


def test_a_weight_that_two_layers_share_is_rounded_once():
    model = Three().to(BF16)
    model.last.weight = model.middle.weight
    fast = compiled(model, recipe())
    x = torch.randn(32, 32, dtype=BF16)
    y, grads = gradients(fast, x)
    forward = stage(fast, "forward")
    rounded = [e for e in forward.equations if e.opname == "_to_copy" and e.out.dtype.itemsize == 1]
    assert len(rounded) == 3 + 2
    _, expected = gradients(model, x)
    assert (grads["middle.weight"] - expected["middle.weight"]).norm() < 0.12 * expected["middle.weight"].norm()


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_gradients_that_nobody_wants_are_not_computed(frozen):
    layer = nn.Linear(32, 32, bias=False).to(BF16)
    x = torch.randn(32, 32, dtype=BF16)
    layer.weight.requires_grad_(frozen != "weight")
    x.requires_grad_(frozen != "input")
    fast = compiled(nn.Sequential(layer), recipe())
    fast(x).float().square().sum().backward()
    trace = stage(fast, "vjp")
    assert count(trace, "_scaled_mm") + count(trace, "mm") == 2 and count(trace, "clone") == (
        1 if frozen == "weight" else 2
    )
    assert (layer.weight.grad is None) == (frozen == "weight") and (x.grad is None) == (frozen == "input")


def test_a_checkpoint_rounds_weights_once():
    model = Gated().to(BF16)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    x = torch.randn(32, 32, dtype=BF16)
    fast = compiled(Checkpointed(), recipe())
    y, grads = gradients(fast, x)
    wanted, expected = gradients(compiled(model, recipe()), x)
    close(y, wanted)
    close(grads["inner.up.weight"], expected["up.weight"])
    weights = {v for v in stage(fast, "backward").inputs if v.name.endswith("weight")}
    assert not any(v in weights for e in stage(fast, "backward").equations if e.opname == "abs" for v in e.inputs())


# --- which layers ---


def test_the_ends_stay():
    fast = compiled(Three().to(BF16), tessera.FP8(smallest=16))
    gradients(fast, torch.randn(32, 32, dtype=BF16))
    (graph,) = tessera.explain(fast).graphs
    how = "current scales of tensors, e4m3, gradients e5m2"
    assert graph.fp8 == (f"multiplied in 8 bits ({how}): middle", "not first: first layer", "not last: last layer")
    assert "fp8: not last: last layer" in str(tessera.explain(fast))


@pytest.mark.parametrize(
    "width, rows, dtype, options, reason",
    [
        (40, 32, BF16, {}, "40 inputs are no multiple of 16"),
        (32, 17, BF16, {}, "17 rows are no multiple of 16"),
        (32, 16, BF16, {}, "over 16 rows reading the weights is all the work"),
        (32, 32, torch.float32, {}, "its numbers are f32, not of 16 bits"),
        (32, 32, BF16, {"smallest": 64}, "too small: 32 × 32, below 64"),
        (32, 32, BF16, {"skip": ("mid*",)}, "skip names it"),
    ],
)
def test_layers_that_stay_say_why(width, rows, dtype, options, reason):
    model, x = Three(width).to(dtype), torch.randn(rows, width, dtype=dtype)
    fast = compiled(model, recipe(**options))
    y, grads = gradients(fast, x)
    assert dict(account(fast).fp8.left)["middle"] == reason
    if options.get("skip") is None:
        assert "fp8_layers" not in dict(account(fast).stages)
        wanted, expected = gradients(model, x)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(grads["middle.weight"], expected["middle.weight"])


def test_the_loss_takes_the_last_layer_along(monkeypatch):
    monkeypatch.setattr("tessera.passes.patterns.linear_loss.LARGE", 1)
    model = Three().to(BF16)
    fast = compiled(lambda x, t: F.cross_entropy(model(x), t), tessera.FP8(smallest=16), TILE)
    fast(torch.randn(32, 32, dtype=BF16), torch.randint(32, (32,))).backward()
    assert len(account(fast).fp8.multiplied) == 1
    assert [why for _, why in account(fast).fp8.left] == ["first layer", "last layer"]


def test_sizes_that_change():
    model = Three().to(BF16)
    fast = compiled(model, recipe(), dynamic=True)
    for rows in (24, 40):
        x = torch.randn(rows, 32, dtype=BF16)
        torch.testing.assert_close(gradients(fast, x)[0], gradients(model, x)[0])
    (reason,) = {why for _, why in account(fast).fp8.left}
    assert reason.endswith("rows are no multiple of 16, as far as is known")


def test_sizes_that_change_by_multiples():
    model = Three().to(BF16)
    fast = compiled(model, recipe())
    for batch in (2, 3, 5):
        x = torch.randn(batch, 16, 32, dtype=BF16)
        (y, grads), (wanted, expected) = gradients(fast, x), gradients(model, x)
        assert (y - wanted).norm() < 0.06 * wanted.norm()
        assert (grads["last.weight"] - expected["last.weight"]).norm() < 0.12 * expected["last.weight"].norm()
    assert len(account(fast).fp8.multiplied) == 3


class Turned(nn.Module):
    """Layers whose weight lies as (inputs, outputs)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(32, 48) / 6), nn.Parameter(torch.randn(48, 32) / 6))
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x):
        h = torch.addmm(self.bias, x.tanh().flatten(0, -2), self.a)
        return F.gelu(h).view(*x.shape[:-1], -1) @ self.b


def test_products_by_a_parameter_are_layers():
    model, x = Turned().to(BF16), torch.randn(2, 16, 32, dtype=BF16)
    fast = compiled(model, recipe())
    y, grads = gradients(fast, x)
    assert len(account(fast).fp8.multiplied) == 2
    wanted, expected = gradients(model, x)
    assert (y - wanted).norm() < 0.06 * wanted.norm()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() < 0.12 * grad.norm(), name
        assert grads[name].stride() == grad.stride()


def test_attention_stays():
    def f(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    fast = compiled(f, recipe())
    q, k, v = (torch.randn(2, 32, 32, dtype=BF16, requires_grad=True) for _ in range(3))
    fast(q, k, v).sum().backward()
    assert not account(fast).fp8.multiplied and not account(fast).fp8.left


def test_under_autocast():
    model, x = Three(), torch.randn(32, 32)
    fast = compiled(model, recipe())
    with torch.autocast("cpu", BF16):
        y, grads = gradients(fast, x)
        wanted, expected = gradients(model, x)
    assert len(account(fast).fp8.multiplied) == 3
    assert y.dtype is BF16 and (y - wanted).norm() < 0.1 * wanted.norm()
    for name, grad in expected.items():
        assert grads[name].dtype is torch.float32 and (grads[name] - grad).norm() < 0.15 * grad.norm(), name


def test_gradients_of_gradients_are_those_of_the_layers_as_written():
    model, x = Three().to(BF16), torch.randn(32, 32, dtype=BF16, requires_grad=True)
    fast = compiled(model, recipe())

    def penalty(call):
        (dx,) = torch.autograd.grad(call(x).float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.float().square().sum(), model.middle.weight)[0]

    with tessera.override(verify=False):
        found, wanted = penalty(fast), penalty(model)
    assert (found - wanted).norm() < 0.15 * wanted.norm()


def test_nothing_asks_the_device():
    model, x = Gated().to(BF16), torch.randn(32, 32, dtype=BF16)
    for options in ({}, {"history": "delayed"}, {"scaling": "row"}):
        fast = compiled(model, recipe(**options), TILE)
        gradients(fast, x)
        for program in account(fast).programs:
            names = {eqn.opname for eqn in program.trace.equations}
            assert not names & {"item", "_local_scalar_dense", "nonzero", "equal"}


# --- options ---


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: tessera.jit(Three(), precision="int8"),
            "precision: expected None, 'fp8' or tessera.FP8.…., got 'int8'",
        ),
        (lambda: tessera.FP8(scaling="block"), "scaling: expected 'tensor' or 'row', got 'block'"),
        (lambda: tessera.FP8(history="old"), "history: expected 'current' or 'delayed', got 'old'"),
        (lambda: tessera.FP8(scaling="row", history="delayed"), "expected scaling='tensor', got 'row'"),
        (lambda: tessera.FP8(length=0), "length: expected a number, at least 1, got 0"),
        (lambda: tessera.FP8(skip="first"), "skip: expected a list of names, got 'first'"),
    ],
)
def test_options_that_mean_nothing(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_as_a_backend_of_torch_compile():
    model, x = Three().to(BF16), torch.randn(32, 32, dtype=BF16)
    fast = torch.compile(
        model, backend="tessera", options={"precision": recipe(), "executors": ["aten"], "strict": True}
    )
    y, _ = gradients(fast, x)
    close(y, gradients(compiled(model, recipe()), x)[0])


def test_a_reproducer_asks_for_the_same(tmp_path):
    fast = compiled(Three().to(BF16), recipe())
    gradients(fast, torch.randn(32, 32, dtype=BF16))
    text = Path(tessera.reproduce(fast, str(tmp_path / "repro.py"), minimise=False)).read_text()
    assert "precision=FP8(scaling='tensor', history='current'" in text and "import FP8, example, show" in text
