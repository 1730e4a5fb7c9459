"""Every plan trains as one process on the whole batch does, in float64 to 1e-11, and sends the bytes it should."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from models import GPT, Llama, MoE, Pictures, picture_batches, picture_loss, token_batches, token_loss
from steps import Trained, compiled_step, program_of, train_ranks, train_whole

from tessera.ir.dist import bytes_sent, exchange_of
from tessera.ir.trace import Trace
from tessera.ir.verify import verify

STEPS = 2
MODELS = {
    "gpt": (GPT, token_loss, token_batches),
    "llama": (Llama, token_loss, token_batches),
    "moe": (MoE, token_loss, token_batches),
    "pictures": (Pictures, picture_loss, picture_batches),
}


@cache
def model_of(name: str, *layers: int) -> tuple:
    make, loss, batches = MODELS[name]
    torch.manual_seed(0)
    return make(*layers).double(), loss, batches(STEPS)


def small(name: str) -> tuple:
    """One layer trains wrongly where two would."""
    return model_of(name) if name == "pictures" else model_of(name, 1)


@cache
def whole(name: str, optimizer: str, clip: float | None) -> Trained:
    return train_whole(*small(name), optimizer, clip)


def program(name: str, axes: dict, plan: object, **options: object) -> Trace:
    """A step before small exchanges are joined, which changes no bytes."""
    model, loss, batches = model_of(name)
    compilation = compiled_step(model, loss, batches[0], axes, plan, "adam", None, **options)[1]
    titles, stages = zip(*compilation.account.stages, strict=True)
    apart = stages[next(i for i, title in enumerate(titles) if title.endswith("bucket")) - 1]
    assert sum(map(bytes_sent, apart.equations)) == sum(map(bytes_sent, program_of(compilation).equations))
    return apart


def check(
    name: str, axes: dict, plan: object, optimizer: str = "adam", clip: float | None = None, **options: object
) -> None:
    model, loss, batches = small(name)
    step, compilation = compiled_step(model, loss, batches[0], axes, plan, optimizer, clip, **options)
    verify(program_of(compilation))
    mine, want = train_ranks(model, step, compilation, batches), whole(name, optimizer, clip)
    assert mine.held.keys() == want.held.keys()
    pairs = [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]
    for got, x in pairs:
        got, x = got.double(), x.double()
        assert (got - x).norm() <= 1e-11 * x.norm() + 1e-14


ALONE = ("ddp", "zero1", "zero2", "zero3", "tensor", "sequence", "async-tp")


@pytest.mark.parametrize("model", ["gpt", "llama", "pictures"])
@pytest.mark.parametrize("plan", ALONE)
def test_alone(model: str, plan: str) -> None:
    if model == "pictures" and plan in ("tensor", "sequence", "async-tp"):
        pytest.skip("convolutions are not cut by columns")
    check(model, {"dp": 2}, plan)


PAIRS = (
    ({"rep": 2, "dp": 2}, {"rep": "hsdp", "dp": "zero3"}),
    ({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tensor"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "sequence"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
    ({"dp": 4, "tp": 4}, {"dp": "zero3", "tp": "sequence"}),
    ({"rep": 2, "dp": 2, "tp": 2}, {"rep": "hsdp", "dp": "zero3", "tp": "sequence"}),
)


@pytest.mark.parametrize(("axes", "plan"), PAIRS, ids=lambda x: "-".join(map(str, x.values())))
def test_together(axes: dict, plan: dict) -> None:
    check("gpt", axes, plan)


IN_PIECES = (
    ({"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "async-tp"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero2", "tp": "async-tp"}),
    ({"dp": 2, "tp": 4}, {"dp": "zero3", "tp": "async-tp"}),
    ({"rep": 2, "dp": 2, "tp": 2}, {"rep": "hsdp", "dp": "zero3", "tp": "async-tp"}),
)


@pytest.mark.parametrize(("axes", "plan"), IN_PIECES, ids=lambda x: "-".join(map(str, x.values())))
def test_products_in_pieces(axes: dict, plan: dict) -> None:
    check("llama", axes, plan)


@pytest.mark.parametrize("plan", ["ddp", "zero3", "sequence"])
def test_clipped_with_sgd(plan: str) -> None:
    """The norm is that of all gradients of the whole batch."""
    check("gpt", {"dp": 2}, plan, "sgd", clip=0.5)


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "cheap"}, {"memory_budget": 2000}], ids=str)
def test_what_backward_recomputes(options: dict) -> None:
    check("llama", {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "sequence"}, **options)


def sent(program: Trace, axis: str) -> float:
    return sum(bytes_sent(e) for e in program.equations if axis in e.args)


def bytes_of(name: str) -> int:
    return sum(p.nbytes for p in model_of(name)[0].parameters())


@pytest.mark.parametrize(
    ("plan", "recompute", "times"),
    [("ddp", "auto", 2), ("zero1", "auto", 2), ("zero2", "auto", 2), ("zero3", "none", 2), ("zero3", "auto", 3)],
)
def test_bytes_of_data_parallel_plans(plan: str, recompute: str, times: int) -> None:
    """Weights that were gathered are kept, or gathered again for backward. Of tables of words, which come first,
    backward needs nothing."""
    local = program("llama", {"dp": 2}, plan, recompute=recompute)
    scalars = [e for e in local.equations if exchange_of(e) == ("all_reduce", ("dp",)) and not e.out.shape]
    loss, table = sum(map(bytes_sent, scalars)), model_of("llama")[0].words.weight.nbytes
    again = table if times == 3 else 0
    assert sent(local, "dp") - loss == (times * bytes_of("llama") - again) / 2


ACTIVATION = 4 * 8 * 16 * 8  # bytes of a batch of 4 x 8 tokens of width 16 in float64


def by_name(program: Trace, axis: str, size: int) -> dict[str, float]:
    """Bytes of collectives on activations of this size, by what they do."""
    sums: dict[str, float] = {}
    for e in program.equations:
        if axis in e.args and bytes_sent(e) and max(e.out.nbytes(), e.args[0].nbytes()) == size:
            name, _ = exchange_of(e)
            sums[name] = sums.get(name, 0.0) + bytes_sent(e)
    return sums


def test_bytes_of_tensor_parallel_blocks() -> None:
    """Four sums of an activation a block. Beside the two blocks there are one more for the table of words and one for
    the gradient that comes back from the head, which are cut as well."""
    local = program("llama", {"tp": 2}, "tensor")
    assert by_name(local, "tp", ACTIVATION) == {"all_reduce": (4 * 2 + 2) * 2 * ACTIVATION / 2}


def test_bytes_of_sequence_parallel_blocks() -> None:
    """Each of the four sums is scattered, and gathered where a weight is cut by columns or a gradient comes back."""
    local = program("llama", {"tp": 2}, "sequence")
    half = (4 * 2 + 2) * ACTIVATION / 2
    assert by_name(local, "tp", ACTIVATION) == {"reduce_scatter": half, "all_gather": half}


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_bytes_of_async_blocks_are_those_of_sequence_parallel_ones(recompute: str) -> None:
    """Exchanges beside products are permutes, a chunk to each of the other ranks; those of the table of words stay."""
    whole, pieces = (program("llama", {"tp": 4}, word, recompute=recompute) for word in ("sequence", "async-tp"))
    assert sum(map(bytes_sent, pieces.equations)) == sum(map(bytes_sent, whole.equations))
    names = [exchange_of(e)[0] for e in pieces.equations if bytes_sent(e) and e.out.nbytes() == ACTIVATION / 4]
    assert names.count("permute") == 3 * (2 * (4 * 2 + 2) - 2) and names.count("reduce_scatter") == 1


@pytest.mark.parametrize("optimizer", ["rmsprop", "adadelta", "adamax", "radam"])
def test_other_optimizers(optimizer: str) -> None:
    check("gpt", {"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}, optimizer, clip=0.5)
