"""Pipelines train as one process on the whole batch does, alone and beside other axes, in float64 to 1e-11; and as
accumulation in one process does, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from models import GPT, LENGTH, WIDTH, Llama, Pictures, picture_batches, picture_loss, token_batches, token_loss
from pipe_steps import Ranks, pipelined_step
from steps import OPTIMIZERS, Trained, pretended, train_whole
from torch import Tensor

import tessera
from tessera.distributed.weights import local_of
from tessera.transforms.pipelined.named_schedules import WORDS
from tessera.util.errors import OptionError

STEPS = 2
MODELS = {"gpt": GPT, "llama": Llama}


@cache
def model_of(name: str) -> tuple:
    torch.manual_seed(0)
    return MODELS[name](2).double(), token_loss, token_batches(STEPS, 8)


@cache
def whole(name: str, optimizer: str, clip: float | None) -> Trained:
    return train_whole(*model_of(name), optimizer, clip)


def check(
    name: str, axes: dict, plan: object, optimizer: str = "adam", clip: float | None = None, **options: object
) -> None:
    model, loss, batches = model_of(name)
    options = {"microbatches": 2, **options}
    step, compilation = pipelined_step(model, loss, batches[0], axes, plan, optimizer, clip, **options)
    mine, want = Ranks(model, step, compilation).trained(batches), whole(name, optimizer, clip)
    assert mine.held.keys() == want.held.keys()
    pairs = [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]
    for got, x in pairs:
        assert (got - x).norm() <= 1e-11 * x.norm() + 1e-14


@pytest.mark.parametrize(("model", "word"), [*(("gpt", word) for word in WORDS), ("llama", "dualpipe")])
def test_alone(model: str, word: str) -> None:
    check(model, {"pp": 2}, word)


def test_clipped_with_sgd() -> None:
    """The norm is that of the gradients of all stages."""
    check("gpt", {"dp": 2, "pp": 2}, {"dp": "zero1", "pp": "1f1b"}, "sgd", clip=0.5)


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "cheap"}, {"memory_budget": 2000}], ids=str)
def test_what_backward_recomputes(options: dict) -> None:
    check("llama", {"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "zero-bubble"}, **options)


# --- bit for bit ----------------------------------------------------------------------------------


class Dropping(GPT):
    """Its activations are dropped at random on both stages."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = F.dropout(block(x), 0.25)
        return self.head(self.norm(x))


class Frozen(Llama):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for name, p in self.named_parameters():
            p.requires_grad_("gate" in name or "head" in name)


class Skipping(GPT):
    """The last stage reads what the first one made."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


KINDS = {
    "tied": (lambda: GPT(2), token_loss, token_batches),
    "dropout": (lambda: Dropping(2), token_loss, token_batches),
    "frozen": (lambda: Frozen(2), token_loss, token_batches),
    "skip": (lambda: Skipping(4), token_loss, token_batches),
    "batch norm": (Pictures, picture_loss, picture_batches),
}


def accumulated(model: torch.nn.Module, loss: Callable, batches: list, count: int, on_mesh: bool) -> dict:
    """Microbatch by microbatch, in one process; weights and buffers afterwards. On a mesh of one rank,
    random numbers are drawn, and cotangents that meet are added, as on any other."""
    model = copy.deepcopy(model)
    with pretended({"dp": 1}) as mesh:
        options = {"mesh": mesh, "plan": "ddp"} if on_mesh else {}
        step = tessera.train_step(
            model, loss, OPTIMIZERS["adam"](model.parameters()), accumulate=count, clip_norm=0.5, executors="aten",
            **options,
        )  # fmt: skip
        torch.manual_seed(3)
        for batch in batches:
            for part in zip(*(x.chunk(count) for x in batch), strict=True):
                step(*part)
    return {name: local_of(x.detach()) for name, x in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(("kind", "word"), [*zip(KINDS, WORDS, strict=True), ("tied", "dualpipe")])
def test_a_pipeline_is_accumulation_bit_for_bit(kind: str, word: str) -> None:
    make, loss, batches_of = KINDS[kind]
    torch.manual_seed(0)
    model, batches = make().double(), batches_of(2, 8)
    step, compilation = pipelined_step(model, loss, batches[0], {"pp": 2}, word, clip=0.5, microbatches=4)
    ranks = Ranks(model, step, compilation)
    torch.manual_seed(3)
    mine, want = ranks.trained(batches).held, accumulated(model, loss, batches, 4, kind in ("dropout", "skip"))
    assert all(torch.equal(mine[name], x) for name, x in want.items())


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ({"pp": ("1f1b", ["block.1"])}, {}, "pp: no module is called 'block.1'; near are blocks.1"),
        ({"pp": ("1f1b", ["blocks.0", "blocks.1"])}, {}, "expected 1 modules that begin a stage, .* got 2"),
        ({"pp": "1f2b"}, {}, "did you mean '1f1b'"),
        ("1f1b", {"microbatches": 1}, "expected 2 microbatches or more for 2 stages, got 1: .* 50% of the time"),
        ("1f1b", {"microbatches": 3}, "expected a number that divides the 8 rows of a batch, got 3"),
        ("1f1b", {"microbatches": 0}, "microbatches: expected a number, at least 1"),
        ("interleaved", {"microbatches": 5}, "microbatches that 2 ranks divide, got 5"),
        ("1f1b", {"offload": "host"}, "offload: expected 'none' beside a pipeline"),
        ("zero3", {"microbatches": 2}, "expected a plan with a pipeline"),
    ],
)
def test_plans_that_cannot_be(plan: object, options: dict, says: str) -> None:
    model, loss, batches = model_of("gpt")
    with pytest.raises(OptionError, match=says):
        pipelined_step(model, loss, batches[0], {"pp": 2}, plan, **options)


def test_fewer_rows_than_stages() -> None:
    model, loss, _ = model_of("gpt")
    with pytest.raises(OptionError, match="cut into 4 parts or more, .* got 2 rows, .* nothing for 60% of the time"):
        pipelined_step(model, loss, token_batches(1, 2)[0], {"pp": 4}, "1f1b")


def test_more_stages_than_work() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match="expected at most . stages, as many as there is work for, got 8"):
        pipelined_step(model, lambda m, x: m(x).sum(), [torch.ones(8, 4)], {"pp": 8}, "gpipe")


def test_a_stage_without_weights() -> None:
    """Its rank has nothing to update, and takes part in clipping all the same."""

    def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        for _ in range(8):
            y = y.square().cos()
        return y.mean()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
    batch = [torch.ones(8, 4, dtype=torch.float64)]
    step, compilation = pipelined_step(model, loss, batch, {"pp": 2}, "gpipe", clip=0.5)
    assert {weight.owner for weight in compilation.pipeline.held.values()} == {0}
    mine, want = Ranks(model, step, compilation).trained([batch]), train_whole(model, loss, [batch], "adam", 0.5)
    assert all((mine.held[n] - x).norm() <= 1e-11 for n, x in want.held.items())


def test_results_that_have_no_rows() -> None:
    def loss(model: torch.nn.Module, x: Tensor) -> tuple:
        y = model(x)
        return y.sum(), y.sum(0)

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(OptionError, match="expected results that have its rows, or one floating-point number"):
        pipelined_step(model, loss, [torch.ones(8, 4)], {"pp": 2}, "gpipe")


def test_a_table_that_a_person_edited() -> None:
    table = "rank 0  F0 F1 .  .  .  B0 =  B1 =\nrank 1  .  F0 F1 B0 =  B1 =\n"
    check("llama", {"pp": 2}, {"pp": table})


def test_explain_shows_the_pipeline() -> None:
    model, loss, batches = model_of("gpt")
    plan = {"pp": ("1f1b", ["blocks.1"])}
    step, _ = pipelined_step(model, loss, batches[0], {"pp": 2}, plan, microbatches=4)
    told = str(tessera.explain(step))
    assert "rank 1  .  F0 B0 =  F1 B1 =" in told and "ranks do nothing for 20% of the time" in told
    assert "stage 0 on rank 0: words.weight to blocks.0.down.bias" in told
    assert "words.weight is on the ranks 0, 1; rank 0 updates it" in told


# --- what crosses ---------------------------------------------------------------------------------


def test_an_activation_crosses_each_way() -> None:
    """A boundary and a microbatch, one way and back; a rank of the data axis has its rows."""
    model, loss, batches = model_of("llama")
    axes, plan = {"dp": 2, "pp": 2}, {"dp": "zero3", "pp": "1f1b"}
    _, compilation = pipelined_step(model, loss, batches[0], axes, plan, microbatches=4)
    size = 1 * LENGTH * WIDTH * 8
    between = {way: sum(v.nbytes() for v in values) for way, values in compilation.pipeline.stages.sends.items()}
    assert between == {("F", 0, 1): size, ("B", 1, 0): size}
