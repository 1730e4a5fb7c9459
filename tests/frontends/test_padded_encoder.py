"""`nn.TransformerEncoder` in inference leaves at padded places what eager leaves there."""

from __future__ import annotations

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
