"""Decode steps of few sequences have programs of their own, whose linear layers are kernels over few rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tessera.artifact.container import Container
from tessera.ops.rows import limits
from tessera.serve.engine import Engine
from tessera.serve.programs import KEPT

LAYERS = 1
PROMPTS = [[5, 6, 7], [9] * 20, [3, 1, 4, 1, 5], *([i, 2 * i] for i in range(2, 18))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16().eval()


def test_few_sequences_have_kernels_of_their_own(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for the CPU: the operators' meaning runs in their place."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    torch._dynamo.reset()
    engine = Engine(model, memory="4MB", check=True)
    plain = Engine(model, memory="4MB", compiled=False)
    for name, program in engine.programs.items():
        operators = [str(eqn.op) for eqn in program.stages[-1].trace.equations]
        of_rows = sum("rows.rows_linear" in op for op in operators)
        linears = sum("aten.linear" in op for op in operators)
        # query, key and value with their norm; out and what is added; gate and up; down; and the head, once
        assert (of_rows, linears) == ((0, 7 * LAYERS + 1) if name in KEPT else (4 * LAYERS + 1, 0))
    ran, compute = [], engine._programs._compute
    monkeypatch.setattr(
        engine._programs, "_compute", lambda *args: ran.append((args[0], len(args[1][0]))) or compute(*args)
    )
    for count in (1, 2, 16, 19):
        # All are to take the same tokens, so that a rounding changes no text: their probabilities are compared.
        told = [e.generate(PROMPTS[:count], max_tokens=3, allowed=(7,), logprobs=0) for e in (engine, plain)]
        found, wanted = (torch.tensor([[x.value for x in a.logprobs] for a in answers]) for answers in told)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.06)
    by_name = {name: {rows for other, rows in ran if other == name} for name in engine.programs}
    assert by_name["one"] == {1} and by_name["few"] == {2, 16} and by_name["decode"] == {19}
    assert all(len(program.call.__tessera__.compilations()) == 1 for program in engine.programs.values())  # type: ignore[attr-defined]


def test_elsewhere_there_are_two_programs(model: LlamaForCausalLM) -> None:
    assert tuple(Engine(model, memory="4MB", compiled=False).programs) == KEPT


def test_a_file_has_them_too(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are read again without compiling."""
    plain = Engine(model, memory="4MB", compiled=False)
    monkeypatch.setattr(limits, "runs", lambda device: True)
    plain.export(tmp_path / "with.tess")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("tessera.pipeline.compilation.Compilation.__init__", never)
    engine = Engine(tmp_path / "with.tess", memory="4MB", check=True)
    assert set(engine.programs) == {*KEPT, "one", "few"}
    with Container.open(tmp_path / "with.tess") as file:
        names = [name for name in file.members if name.startswith("texts/") and "portable" not in name]
        found = {name.split("/")[1]: bytes(file.read(name)).decode().count("rows_linear(") for name in names}
    assert found == {"mixed": 0, "decode": 0, "one": 4 * LAYERS + 1, "few": 4 * LAYERS + 1}
    ran, compute = [], engine._programs._compute
    monkeypatch.setattr(
        engine._programs, "_compute", lambda *args: ran.append((args[0], len(args[1][0]))) or compute(*args)
    )
    for count in (1, 5, 19):
        told = [e.generate(PROMPTS[:count], max_tokens=3, allowed=(7,), logprobs=0) for e in (engine, plain)]
        found, wanted = (torch.tensor([[x.value for x in a.logprobs] for a in answers]) for answers in told)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.06)
    assert {pair for pair in ran if pair[0] != "mixed"} == {("one", 1), ("few", 5), ("decode", 19)}
