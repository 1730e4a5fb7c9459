"""`nn.TransformerEncoder` in inference leaves at padded places what eager leaves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tessera

BEHIND = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
BETWEEN = [[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
EVERYWHERE = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def encoder(norm: bool = False, **options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None).eval()


def compare(model: nn.Module, mask: Tensor) -> Tensor:
    x = torch.randn(3, 5, 8)
    want, got = model(x, src_key_padding_mask=mask), tessera.jit(model)(x, src_key_padding_mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return got


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows", [BEHIND, BETWEEN, EVERYWHERE], ids=["behind", "between", "everywhere"])
def test_padded_places(rows: list, norm: bool) -> None:
    model, padded = encoder(norm), torch.tensor(rows).bool()
    with torch.no_grad():
        if norm:
            nn.init.uniform_(model.norm.bias)  # type: ignore[union-attr, arg-type]
        compare(model, padded)


def test_a_mask_to_add() -> None:
    with torch.no_grad():
        compare(encoder(), torch.zeros(3, 5).masked_fill(torch.tensor(BEHIND).bool(), float("-inf")))


def test_with_gradients_nothing_is_nested() -> None:
    got = compare(encoder(), torch.tensor(BEHIND).bool())
    assert got[0, 3].abs().sum() > 0
    with torch.inference_mode():
        assert compare(encoder(), torch.tensor(BEHIND).bool())[0, 3].abs().sum() == 0


def test_layers_that_cannot_nest() -> None:
    with torch.no_grad(), pytest.warns(UserWarning, match="enable_nested_tensor"):
        compare(encoder(norm_first=True), torch.tensor(BEHIND).bool())


def test_a_model_around_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(norm=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = torch.arange(x.shape[1]) >= lengths[:, None]
            return self.encoder(x, src_key_padding_mask=mask).mean(1)

    model, fast = Model().eval(), tessera.jit(Model().eval())
    x = torch.randn(3, 5, 8)
    for lengths in (torch.tensor([3, 5, 1]), torch.tensor([5, 5, 5]), torch.tensor([2, 0, 4])):
        with torch.no_grad():
            torch.testing.assert_close(fast(x, lengths), model(x, lengths), rtol=1e-4, atol=1e-5)


class Padded(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.model(x, src_key_padding_mask=mask)


SIZES = {name: {0: "batch", 1: "length"} for name in ("x", "mask")}


@pytest.mark.parametrize("rows", [BEHIND, BETWEEN, EVERYWHERE], ids=["behind", "between", "everywhere"])
@pytest.mark.parametrize("fast", [True, False])
def test_what_leaves(rows: list, fast: bool, tmp_path: Path) -> None:
    """Eager asks for the fast path when it is captured, not when it runs elsewhere."""
    model, mask, x = Padded(encoder(norm=True)), torch.tensor(rows).bool(), torch.randn(3, 5, 8)
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        tessera.export(model, (torch.randn(2, 4, 8), torch.zeros(2, 4).bool()), tmp_path / "m.tess", dynamic=SIZES)
        assert torch.backends.mha.get_fastpath_enabled() == fast
        with torch.no_grad():
            want, got = model(x, mask), tessera.load(tmp_path / "m.tess")(x, mask)
        assert type(model.model).forward is nn.TransformerEncoder.forward
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    if fast:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:  # a row of which nothing is left is no number, then
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("layers", [True, False])
def test_an_encoder_leaves_as_onnx(masked: bool, layers: bool) -> None:
    onnx = pytest.importorskip("onnx")
    inner = encoder() if layers else encoder().layers[0]
    mask, x = torch.tensor(BEHIND).bool(), torch.randn(3, 5, 8)
    model, given = (Padded(inner), (x, mask)) if masked else (inner, (x,))
    dynamic = SIZES if masked else {"src": SIZES["x"]}
    written = tessera.onnx.export(model, given, dynamic=dynamic, check=False)
    onnx.checker.check_model(written)
    with torch.no_grad():
        got = tessera.onnx.load(written, compile=False)(*given)
        torch.testing.assert_close(got, model(*given), rtol=1e-4, atol=1e-5)
