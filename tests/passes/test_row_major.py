"""Activations that norms read across memory are copied once; values, gradients and layouts stay eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import tessera
from tessera.passes.patterns import row_major

BATCH, WIDTH, SIDE, LAYERS = 2, 16, 6, 3
NORM = torch.ops.aten.layer_norm.default


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Patches(nn.Module):
    """A convolution before a transformer, as in vision and speech: its channels lie before its places."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.place = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, SIDE * SIDE, WIDTH))
        self.layers, self.options = nn.ModuleList(Layer() for _ in range(LAYERS)), options

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.place
        first = x
        for layer in self.layers:
            if self.options.get("look"):
                with torch.no_grad():  # a reader without gradients comes first
                    first = F.layer_norm(x, [WIDTH]) if layer is self.layers[0] else first
            x = layer(x)
        return (x, first, x.transpose(1, 2).flatten(1)) if self.options.get("many") else x


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_major, "LARGE", 1)
    monkeypatch.setattr(row_major, "DEVICES", ("cpu",))


def agree(ours: Tensor, eager: Tensor) -> None:
    assert_close(ours, eager)
    assert ours.stride() == eager.stride() and ours.requires_grad == eager.requires_grad


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("options", [{}, {"many": True}, {"many": True, "look": True}])
def test_norms_read_rows(options, train):
    model, image = Patches(**options), torch.randn(BATCH, 3, 2 * SIDE, 2 * SIDE)
    fast = tessera.jit(model)
    with torch.set_grad_enabled(train):
        ours, eager = fast(image), model(image)
    pairs = [(ours, eager)] if isinstance(ours, Tensor) else list(zip(ours, eager, strict=True))
    for a, b in pairs:
        agree(a, b)
    if train:
        for out in (ours, eager):
            sum(x.sin().sum() for x in ([out] if isinstance(out, Tensor) else out)).backward()
            gradients = [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
            if out is ours:
                expected = gradients
        for a, b in zip(expected, gradients, strict=True):
            assert_close(a, b)
    trace = tessera.stages(fast)["row_major"].trace
    norms = [eqn for eqn in trace.equations if eqn.op is NORM]
    assert len(norms) >= LAYERS and all(eqn.args[0].tensor.stride[-1] == 1 for eqn in norms)
    copies = [e for e in trace.equations if e.opname == "clone"]
    assert len(copies) <= 2  # one; and what leaves the program lies as before


def test_an_activation_with_one_reader_stays():
    fast = tessera.jit(lambda x: F.layer_norm(x.transpose(1, 2), [WIDTH]))
    x = torch.randn(2, WIDTH, 8)
    agree(fast(x), F.layer_norm(x.transpose(1, 2), [WIDTH]))
    assert "row_major" not in [stage.name for stage in tessera.stages(fast)]


def test_a_view_that_the_copy_does_not_allow_reads_the_old_layout():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.transpose(1, 2) + 1
        return F.layer_norm(rows, [WIDTH]), rows.transpose(1, 2).view(2, -1) * 2

    x = torch.randn(2, WIDTH, 8)
    for a, b in zip(tessera.jit(fn)(x), fn(x), strict=True):
        agree(a, b)
