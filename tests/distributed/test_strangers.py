"""Models that do what models do in the wild: each trains on a mesh as one process on the whole batch does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from all_ranks import assert_equal, train_mesh
from models import GPT, VOCABULARY, Attention, Llama, token_batches, token_loss
from steps import pretended, train_whole
from strategies import plan_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tessera
from tessera.util.errors import CaptureError


class Normed(nn.Module):
    """Its matrices are made of lengths and directions, by a kernel that looks at no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.up, self.head = weight_norm(nn.Linear(8, 16)), weight_norm(nn.Linear(16, VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.relu(self.up(self.words(ids))))


class Adapted(nn.Module):
    """A frozen layer and two thin matrices, whose gradients lie transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, layer.in_features) / 4)
        self.b = nn.Parameter(torch.randn(layer.out_features, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.a.T) @ self.b.T


def adapted() -> Llama:
    model = Llama(1).requires_grad_(False)
    for name in ("q", "v", "down"):
        setattr(model.blocks[0], name, Adapted(getattr(model.blocks[0], name)))
    return model


class Moving(nn.Module):
    """It binds its buffer anew in every call, and hangs a loss of its own on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.more = x.square().mean()
        return self.head(x - self.mean)


def with_more(model: Moving, ids: Tensor, labels: Tensor) -> Tensor:
    return token_loss(model, ids, labels) + 0.1 * model.more


def reaching_in(model: GPT, ids: Tensor, labels: Tensor) -> Tensor:
    """It calls modules of the model, multiplies by its weights, and decays them."""
    x = F.linear(model.norm(model.blocks[0](model.words(ids))), model.words.weight)
    decay = sum(p.square().sum() for p in model.parameters()) + model.places.weight.sum()
    return F.cross_entropy(x.flatten(0, 1), labels.flatten()) + 1e-3 * decay


class Single(nn.Module):
    """Experts of two layers without a gate; each token goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 4), nn.Linear(8, VOCABULARY)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 8) / 4), nn.Parameter(torch.randn(4, 8, 12) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.words(ids).flatten(0, 1)
        weights, choice = self.router(tokens).softmax(-1).topk(1)
        out = tessera.experts(tokens, choice, weights, self.up, self.down, activation="gelu")
        return self.head(tokens + out).view(*ids.shape, -1)


class Waves(nn.Module):
    """Its weights for frequencies are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.mix = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.complex128) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        spectrum = torch.einsum("bik,iok->bok", torch.fft.rfft(x.transpose(1, 2))[..., :4], self.mix)
        return self.head(x + torch.fft.irfft(spectrum, n=ids.shape[1]).transpose(1, 2))


class Repeated(nn.Module):
    """One layer stands in several places, under several names; so does the table of words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.words, self.first, self.rest = nn.Embedding(VOCABULARY, 16), layer, nn.ModuleList([layer, layer])
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.words(ids))
        for layer in self.rest:
            x = layer(x)
        return self.head(x)


class Bounded(nn.Module):
    """Its forward writes weights: rows that grow too long, and whatever is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(VOCABULARY, 16, max_norm=1.0), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return self.head(F.relu(self.up(self.words(ids))))


CASES = {
    "weights that forward writes": (Bounded, token_loss),
    "a layer in several places": (Repeated, token_loss),
    "complex weights": (Waves, token_loss),
    "weight norm": (Normed, token_loss),
    "adapters": (adapted, token_loss),
    "moving mean": (Moving, with_more),
    "reaching in": (lambda: GPT(1), reaching_in),
}


@pytest.mark.parametrize("words", [("zero3",), ("zero1", "tensor")], ids="·".join)
@pytest.mark.parametrize("name", CASES)
def test_trains_alike(name: str, words: tuple[str, ...]) -> None:
    make, loss = CASES[name]
    torch.manual_seed(0)
    model, batches, plan = make().double(), token_batches(2), plan_of(words)
    mine = train_mesh(model, loss, batches, dict.fromkeys(plan, 2), plan)
    assert_equal(mine, train_whole(model, loss, batches, "adam", None))


@pytest.mark.parametrize("options", [{"optimizer": "sgd"}, {"clip": 0.3}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("words", [("zero2",), ("zero3", "1f1b")], ids="·".join)
@pytest.mark.parametrize("make", [Waves, Bounded])
@pytest.mark.filterwarnings("ignore:.*over a pipeline aten.embedding_renorm")
def test_with_options(make: type, words: tuple[str, ...], options: dict) -> None:
    torch.manual_seed(0)
    model, batches, plan = make().double(), token_batches(4), plan_of(words)
    mine = train_mesh(model, token_loss, batches, dict.fromkeys(plan, 2), plan, **options)
    how = options.get("optimizer", "adam"), options.get("clip"), options.get("accumulate", 1)
    assert_equal(mine, train_whole(model, token_loss, batches, *how))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder, which compares the mask that it is given with a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.layers(x, x, tgt_mask=mask, src_key_padding_mask=ids == 0))


class Averaging(nn.Module):
    """Its statistics are means over all batches so far, by a count that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, 16), nn.BatchNorm1d(16, momentum=None)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.words(ids).transpose(1, 2)).transpose(1, 2))


class Listening(nn.Module):
    """What comes first has channels where others have the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.ears, self.words = nn.Conv1d(6, 16, 3, stride=2, padding=1), nn.Embedding(VOCABULARY, 16)
        self.own, self.cross = Attention(16, 4, True), Attention(16, 4, False)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, sound: Tensor, ids: Tensor) -> Tensor:
        heard, x = F.gelu(self.ears(sound)).transpose(1, 2), self.words(ids)
        x = x + self.own(x, x)
        return self.head(x + self.cross(x, heard))


def heard_loss(model: Listening, sound: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(sound, ids).flatten(0, 1), labels.flatten())


MORE = {
    "a mask that is looked at": (Translator, {"dp": "zero3", "tp": "sequence"}, 2),
    "a mask in a ring": (Translator, {"cp": "ring"}, 2),
    "means over all batches": (Averaging, {"dp": "zero2", "tp": "tensor"}, 2),
    "experts without a gate": (Single, {"dp": "zero3", "ep": "experts"}, 2),
    "parts of a zigzag too small to cut": (lambda: Llama(1), {"cp": "ring", "tp": "sequence"}, 4),
}


@pytest.mark.parametrize("name", MORE)
def test_more_train_alike(name: str) -> None:
    make, plan, ranks = MORE[name]
    torch.manual_seed(0)
    model, batches = make().double(), token_batches(2)
    mine = train_mesh(model, token_loss, batches, {axis: ranks if axis == "tp" else 2 for axis in plan}, plan)
    assert_equal(mine, train_whole(model, token_loss, batches, "adam", None))


@pytest.mark.parametrize("word", ["ring", "ulysses"])
def test_the_sequence_is_what_attention_sees(word: str) -> None:
    torch.manual_seed(0)
    model = Listening().double()
    batches = [[torch.randn(4, 6, 16, dtype=torch.float64), *batch] for batch in token_batches(2)]
    mine = train_mesh(model, heard_loss, batches, {"cp": 4}, {"cp": word})
    assert_equal(mine, train_whole(model, heard_loss, batches, "adam", None))


def call_once(model: nn.Module) -> None:
    with pretended({"dp": 1}) as mesh:
        tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")(torch.zeros(2, 3, dtype=torch.long))


def test_nothing_of_a_trace_stays_on_the_model() -> None:
    model = Moving()
    call_once(model)
    assert not hasattr(model, "more")
    copy.deepcopy(model.mean)


def test_a_tensor_that_is_no_buffer_is_not_bound_anew() -> None:
    class Counting(Moving):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(())

        def forward(self, ids: Tensor) -> Tensor:
            self.seen = self.seen + ids.sum()
            return super().forward(ids)

    with pytest.raises(CaptureError, match=r"Counting.seen: .* expected a buffer: register_buffer"):
        call_once(Counting())


def test_a_buffer_keeps_its_size() -> None:
    class Growing(Moving):
        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            self.mean = torch.cat([self.mean, self.mean])
            return out

    with pytest.raises(CaptureError, match=r"mean: expected .* a buffer of \[16\] .* got \[32\]"):
        call_once(Growing())
