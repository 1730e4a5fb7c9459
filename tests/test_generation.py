"""`generate` of transformers under `jit`: eager's tokens, few graphs, caches written where they are."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType

transformers = pytest.importorskip("transformers")

from generation import NAMES, model_of  # noqa: E402

PROMPT = torch.tensor([[5, 9, 33, 2, 17]])
GREEDY = {"max_new_tokens": 12, "do_sample": False}
STATIC = {**GREEDY, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NAMES)
def test_static_caches(name: str) -> None:
    """A graph for the prompt and one for a token; where a window fills up, one more for the tokens after that."""
    model = model_of(name)
    fast = tessera.jit(model, strict=True)
    wanted = model.generate(PROMPT, **STATIC)
    assert len(set(wanted[0].tolist())) > 4
    assert torch.equal(fast.generate(PROMPT, **STATIC), wanted)
    told = tessera.explain(fast)
    assert not told.breaks and len(told.graphs) == (3 if name == "gemma3" else 2)
    assert torch.equal(fast.generate(PROMPT, **STATIC), wanted)
    assert len(tessera.explain(fast).graphs) == len(told.graphs)  # nothing new for another cache of that size
    assert_only_written_in_place(fast.__tessera__.compilations()[1].account.programs[-1].trace)


def assert_only_written_in_place(step: Trace) -> None:
    """Caches are written where they stand, and nothing else is made that is as they are."""
    caches = [v for v in step.inputs if v.name.endswith(("_keys", "_values"))]
    shapes = {v.shape for v in caches}
    written = [eqn for eqn in step.equations if getattr(eqn.op, "_opname", "") == "index_copy_"]
    assert len(caches) == 4 and {eqn.args[0] for eqn in written} == set(caches)
    made = [v.type for eqn in step.equations if eqn not in written for v in eqn.results()]
    assert not [t for t in made if isinstance(t, TensorType) and t.shape in shapes]
    copied = [eqn for eqn in step.equations if getattr(eqn.op, "_opname", "") == "copy_"]
    assert all(eqn.args[0].shape not in shapes for eqn in copied)


def test_growing_caches() -> None:
    """Their length becomes a symbol."""
    model = model_of("llama")
    fast = tessera.jit(model, strict=True)
    assert torch.equal(fast.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
    assert len(tessera.explain(fast).graphs) == 3


@pytest.mark.parametrize("way", ["model", "forward", "inner"])
def test_models_that_compile_their_call_themselves(way: str) -> None:
    """On GPUs transformers hands its call to torch.compile where the cache is static: what is compiled stays ours."""
    model = model_of("llama")
    wanted = model.generate(PROMPT, **STATIC)
    config = transformers.CompileConfig(backend="refuses")  # would raise where it is used
    config._compile_all_devices = True
    if way == "model":
        fast = user = tessera.jit(model, strict=True)
    elif way == "forward":
        user, fast = model, tessera.jit(model.forward, strict=True)
        model.forward = fast
    else:
        user, fast = model, tessera.jit(model.model, strict=True)
        model.model = fast
    how = {"disable_compile": True} if way == "inner" else {"compile_config": config}
    assert torch.equal(user.generate(PROMPT, **STATIC, **how), wanted)
    assert len(tessera.explain(fast).graphs) == 2


def test_plain_models_are_left_alone() -> None:
    model, used = model_of("llama"), []
    tessera.jit(model)  # not the one that generates
    config = transformers.CompileConfig(backend=lambda graph, inputs: used.append(graph) or graph.forward, mode=None)
    config._compile_all_devices = True
    model.generate(PROMPT, **STATIC, compile_config=config)
    assert used


def test_prompts_of_several_lengths_and_rows() -> None:
    """Padding on the left, sampling off, another prompt: sizes become symbols, results stay eager's."""
    model = model_of("llama")
    fast = tessera.jit(model, strict=True)
    for length in (4, 7, 9):
        prompt = torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(prompt)
        mask[0, :2] = 0
        given = {"attention_mask": mask, "max_length": 20, "cache_implementation": "static", "do_sample": False}
        assert torch.equal(fast.generate(prompt, **given), model.generate(prompt, **given))
    assert len(tessera.explain(fast).graphs) <= 4
