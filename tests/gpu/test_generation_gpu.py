"""Generation with models of transformers on a GPU: tokens close to eager's, few graphs, replayed where asked for."""

from __future__ import annotations

import pytest
import torch

import tessera

transformers = pytest.importorskip("transformers")

from generation import CONFIGS, model_of  # noqa: E402

pytestmark = pytest.mark.gpu
EXECUTORS = ["rows", "attention", "sdpa", "tile", "aten"]
STATIC = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def logits(model: torch.nn.Module, prompt: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    given = {**STATIC, "return_dict_in_generate": True, "output_logits": True, **more}
    made = model.generate(prompt, **given)
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_static_caches(name: str, cuda_graph: bool) -> None:
    dtype = torch.float32 if name == "mixtral" else torch.bfloat16  # rounding decides between experts of like weight
    model = model_of(name).cuda().to(dtype)
    fast = tessera.jit(model, executors=EXECUTORS, strict=True, cuda_graph=cuda_graph)
    for seed in range(3):  # another text, another cache
        prompt = torch.randint(2, 64, (1, 5), generator=torch.Generator().manual_seed(seed)).cuda()
        wanted, scores = logits(model, prompt, disable_compile=True)
        found, close = logits(fast, prompt)
        same = int((wanted == found)[0].long().cumprod(0).sum()) - prompt.shape[1]  # tokens before the first tie
        torch.testing.assert_close(close[: same + 1], scores[: same + 1], rtol=0.05, atol=0.1)
        assert same > 2
    told = tessera.explain(fast)
    assert not told.breaks and not told.eager and len(told.graphs) <= (3 if name == "gemma3" else 2)
    if cuda_graph and name != "mixtral":
        assert "captured" in told.graphs[1].cuda_graph


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_operators_over_few_rows_are_used(name: str) -> None:
    model = model_of(name).cuda().bfloat16()
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    logits(fast, torch.randint(2, 64, (1, 5)).cuda())
    step = fast.__tessera__.compilations()[1].account.programs[-1].trace
    found = [str(eqn.op).removesuffix(".default") for eqn in step.equations]
    assert found.count("rows.cached_attention") == 2 and found.count("rows.rows_linear") == 4 * 2 + 1
