"""Linear layers that read the same tensor are one product, over weights that are held once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, model
from torch import Tensor, nn

from tessera.serve import huggingface
from tessera.serve.engine import Engine
from tessera.serve.huggingface import HuggingFace
from tessera.serve.joined import Part, join, watched

PROMPTS = [[5, 6, 7], [3] * 9, [9, 8]]
BESIDE = {
    "llama": [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]],
    "phi": [["q_proj", "k_proj", "v_proj", "fc1"]],  # attention and the rest read one norm
    "mixtral": [["q_proj", "k_proj", "v_proj"]],
    "gpt2": [],
}


@pytest.mark.parametrize("name", BESIDE)
def test_who_reads_the_same_is_found(name: str) -> None:
    groups = [[layer.rpartition(".")[2] for layer in group] for group in HuggingFace(model(name))._beside]
    assert groups == BESIDE[name] * (len(groups) // max(1, len(BESIDE[name])))
    assert bool(groups) == bool(BESIDE[name])


def test_weights_are_held_once_and_the_given_model_is_the_same(tmp_path: Path) -> None:
    given = model("llama")
    before = {name: (p, p.detach().clone()) for name, p in given.named_parameters()}
    x = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        logits = given(x).logits
    paged = HuggingFace(given)
    wide = paged.joined(torch.device("cuda"))
    assert wide is not paged and not any(isinstance(m, Part) for m in (*given.modules(), *paged.modules()))
    after = dict(given.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is p and torch.equal(p, value) for name, (p, value) in before.items())
    with torch.no_grad():
        assert torch.equal(given(x).logits, logits)
    held = {p.untyped_storage().data_ptr() for p in (*given.parameters(), *wide.parameters())}
    assert sum(p.nbytes for p in given.parameters()) == sum(
        storage.nbytes()
        for storage in {p.untyped_storage().data_ptr(): p.untyped_storage() for p in given.parameters()}.values()
    ) and held == {p.untyped_storage().data_ptr() for p in given.parameters()}
    given.save_pretrained(tmp_path)
    again = type(given).from_pretrained(tmp_path)
    assert all(torch.equal(p, before[name][1]) for name, p in again.named_parameters())


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(huggingface, "pays", lambda device: True)


def test_a_cpu_leaves_weights_where_they_are() -> None:
    given = model("llama")
    before = [p.data_ptr() for p in given.parameters()]
    engine = Engine(given, memory=2**20, block_size=4, budget=64)
    assert engine._programs._wide is engine.model
    assert [p.data_ptr() for p in given.parameters()] == before


def test_weights_that_change_are_seen(joins: None) -> None:
    given = model("llama")
    engine = Engine(given, memory=2**20, block_size=4, budget=64)
    with torch.no_grad():
        for p in given.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
        wanted = [
            given.generate(torch.tensor([p]), max_new_tokens=4, do_sample=False)[0, len(p) :].tolist() for p in PROMPTS
        ]
    assert [a.tokens for a in engine.generate(PROMPTS, max_tokens=4, temperature=0, ignore_eos=True)] == wanted


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_program_multiplies_once(deterministic: bool, joins: None) -> None:
    engine = Engine(model("llama"), memory=2**20, block_size=4, budget=64, deterministic=deterministic)
    told = "tessera.invariant_linear(" if deterministic else "aten.linear("
    layers = len(engine.model.layers())
    assert str(engine.programs["mixed"].stages[-1].trace).count(told) == 4 * layers + 1


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("name", [*FAMILIES[:1], *(pytest.param(n, marks=pytest.mark.sweep) for n in FAMILIES[1:])])
def test_answers_are_those_of_the_model(name: str, quantize: str | None, joins: None) -> None:
    given = model(name)
    wide, plain = (
        Engine(given, memory=2**20, block_size=4, budget=64, quantize=quantize, compiled=compiled)
        for compiled in (True, False)
    )
    assert (wide._programs._wide is wide.model) == (quantize is not None or name in ("gpt2", "neox"))
    answers = [e.generate(PROMPTS, max_tokens=6, temperature=0, ignore_eos=True) for e in (wide, plain)]
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]


class Reads(nn.Module):
    """Layers that read the same tensor, and why they stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.twice = (nn.Linear(4, n) for n in (3, 5, 4, 4))
        self.plain, self.finer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4).double()
        self.tied, self.hooked = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other = nn.Embedding(4, 4)
        self.other.weight = self.tied.weight
        self.hooked.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.a(x), self.b(x)], -1)
        z = y[:, :4] * 1
        y = self.c(z)
        z.add_(1)
        y = y + self.twice(z)
        z = y * 2
        y = self.plain(z) + self.twice(z) + self.finer(y.double())
        z = y.float()
        return self.tied(z) + self.hooked(z)


def test_layers_that_may_not_be_joined() -> None:
    layers, x = Reads(), torch.randn(2, 4)
    wanted = layers(x)
    with watched(layers) as groups:
        layers(x)
    assert groups == [["a", "b"]]
    assert join(layers, groups) and isinstance(layers.a, Part)
    torch.testing.assert_close(layers(x), wanted)
    assert not join(layers, groups)
