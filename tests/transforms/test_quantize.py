"""Layers in fewer bits: which are changed, what flows through them, what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import tessera
from tessera.ops.quantized import KINDS
from tessera.transforms.quantize import QuantizedLinear
from tessera.util.errors import InputError, OptionError

CASES = [(kind, torch.bfloat16) for kind in KINDS]
CASES += [("int8", torch.float16), ("int4", torch.float64), ("fp8", torch.float32)]
LIMIT = {"int8": 0.01, "int4": 0.2, "fp8": 0.05}


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.bfloat16) for kind in KINDS),
        ("int8", torch.float16),
        ("int4", torch.float64),
        ("fp8", torch.float32),
    ],
)
def test_dtypes_and_odd_heights(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 3, bias=False)).to(dtype).eval()
    x = torch.randn(5, 128, dtype=dtype)
    before = model(x)
    told = tessera.quantize(model, kind)
    assert list(told.errors) == ["0", "2"] and max(told.errors.values()) < LIMIT[kind]
    with torch.no_grad():
        after, compiled = model(x), tessera.jit(model, strict=True)(x)
    assert after.dtype == compiled.dtype == dtype and off(after, before) < 2 * LIMIT[kind]
    assert off(compiled, after) < (1e-4 if dtype.itemsize >= 4 else 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through(kind: str) -> None:
    """To layers before a stored one, in eager and compiled, and by `tessera.grad`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 4))
    wanted, x = copy.deepcopy(model), torch.randn(5, 8)
    tessera.quantize(model, kind, skip=["0"])
    wanted[2].weight.data = torch.ops.tessera.widened(model[2].weight, model[2].scale, kind)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    wanted(x).square().sum().backward()
    for run in (model, tessera.jit(model, strict=True)):
        run(x).square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad, wanted[0].weight.grad)
        model[0].weight.grad = None
    of_x = torch.func.grad(lambda x: wanted(x).square().sum())(x)
    torch.testing.assert_close(tessera.grad(lambda x: model(x).square().sum())(x), of_x)
    _, moved = tessera.jvp(model, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(moved, torch.func.jvp(wanted, (x,), (torch.ones_like(x),))[1])
    torch.testing.assert_close(tessera.vmap(model)(x), wanted(x))


def test_a_layer_in_two_places_stays_one() -> None:
    layer = nn.Linear(128, 128)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    told = tessera.quantize(model, "int8")
    assert isinstance(model[0], QuantizedLinear) and model[0] is model[2] and list(told.errors) == ["0"]
    other = nn.Sequential(layer, nn.Tanh(), layer)
    assert tessera.quantize(other, "int8", skip=["2"]).left == {"0": "asked for"} and other[0] is layer


def test_what_stays_and_why() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(9, 128), nn.Linear(128, 9)
            self.head.weight = self.tokens.weight
            self.none = nn.Linear(128, 0)
            self.narrow, self.block = nn.Linear(60, 4), nn.TransformerEncoderLayer(128, 2, 128)

    told = tessera.quantize(Tied(), "int4")
    assert not told.errors and "another module" in told.left["head"] and "multiple of 128" in told.left["narrow"]
    assert told.left["none"] == "it has no weights"
    assert "reads the weights" in told.left["block.linear1"]
    assert str(told).startswith("int4: no linear layer was changed\n  head stayed as it is")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str) -> None:
    first, second = (nn.Sequential(nn.Linear(128, 24)) for _ in range(2))
    for model in (first, second):
        tessera.quantize(model, kind)
    x, file = torch.randn(2, 128), io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert torch.equal(second(x), first(x)) and torch.equal(copy.deepcopy(first)(x), first(x))


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_leaves_what_is_stored(kind: str) -> None:
    """A model that is converted afterwards computes in the new dtype, with the weights and the error it had."""
    model = nn.Sequential(nn.Linear(128, 24)).eval()
    tessera.quantize(model, kind)
    weight, scale, wide = model[0].weight, model[0].scale, torch.randn(2, 128, dtype=torch.float64)
    before = model(wide.float())
    for dtype, near in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-3)):
        model.to(dtype)
        assert model[0].weight.dtype == weight.dtype and torch.equal(model[0].scale, scale)
        assert model[0].bias.dtype == model(wide.to(dtype)).dtype == dtype
        assert off(model(wide.to(dtype)), before) < near
    assert model.to("meta")[0].scale.device.type == "meta"


def test_a_compiled_model_sees_it() -> None:
    model, x = nn.Sequential(nn.Linear(128, 24)), torch.randn(2, 128)
    fast = tessera.jit(model, strict=True)
    with torch.no_grad():
        before = fast(x)
        tessera.quantize(fast, "int4")
        torch.testing.assert_close(fast(x), model(x))
        assert off(fast(x), before) > 0.01


def test_errors_name_what_is_valid() -> None:
    with pytest.raises(OptionError, match="among int8, int4, fp8, got 'int3'"):
        tessera.quantize(nn.Sequential(nn.Linear(128, 4)), "int3")
    with pytest.raises(OptionError, match="called 'head'; there are 0"):
        tessera.quantize(nn.Sequential(nn.Linear(128, 4)), "int8", skip=["head"])
    with pytest.raises(OptionError, match="put it into a module"):
        tessera.quantize(nn.Linear(128, 4), "int8")
    with pytest.raises(OptionError, match="got Tensor"):
        tessera.quantize(torch.ones(2), "int8")  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(128, 4))
    tessera.quantize(model, "fp8")
    with pytest.raises(InputError, match="activations of 16 bits or more, got torch.float8_e4m3fn"):
        model(torch.randn(2, 128).to(torch.float8_e4m3fn))
