"""Sharding rules: operators cut along every dimension give what they give whole, and linear ones pass summands on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sweep import named, operators, tried

from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir import interp
from tessera.ir.dist import is_collective
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.verify import verify
from tessera.ops.factors.lookup import factors_of
from tessera.ops.factors.views import matched
from tessera.passes.decompose.random import compute_random
from tessera.transforms.shard.partition import shard

SOME = (
    "add", "where", "sum", "mean", "amax", "var", "cumsum", "sort", "topk", "nn.functional.linear", "matmul", "addmm",
    "nn.functional.layer_norm", "softmax", "nn.functional.cross_entropy", "nn.functional.embedding",
    "gather", "index_select", "cat", "stack", "unbind", "permute", "reshape", "expand", "flip", "nn.functional.conv2d",
    "nn.functional.pad", "scatter_add", "index_copy", "index_put", "index_add", "squeeze", "nn.functional.mse_loss",
    "linalg.vector_norm", "masked_scatter",
)  # fmt: skip


def fair(outcomes: dict) -> None:
    assert outcomes
    assert not [outcome for outcome in outcomes if outcome.startswith(("wrong", "refused"))]


@pytest.mark.parametrize("name", SOME)
def test_cut_along_every_dimension(name: str) -> None:
    fair(sum((tried(info) for info in named([name])), Counter()))


GRADIENTS = (
    "nn.functional.conv2d", "nn.functional.conv_transpose1d", "nn.functional.linear", "nn.functional.layer_norm",
    "nn.functional.group_norm", "addmm", "nn.functional.embedding", "nn.functional.max_unpool1d", "prod", "index_add",
)  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_cut_along_every_dimension(name: str) -> None:
    fair(sum((tried(info, gradients=True) for info in named([name])), Counter()))


@pytest.mark.sweep
@pytest.mark.parametrize("gradients", [False, True], ids=["results", "gradients"])
@pytest.mark.parametrize("start", range(32))
def test_all_operators(start: int, gradients: bool) -> None:
    for info in operators()[start::32]:
        if outcomes := tried(info, gradients):
            fair(outcomes)


@pytest.mark.parametrize(
    ("before", "after", "left", "right"),
    [
        ((4, 8, 48), (4, 8, 3, 16), [["f0"], ["f1"], ["f2", "f3"]], [["f0"], ["f1"], ["f2"], ["f3"]]),
        ((4, 8, 16), (32, 16), [["f0"], ["f1"], ["f2"]], [["f0", "f1"], ["f2"]]),
        ((6, 4), (2, 12), [["f0", "f1"], ["f2"]], [["f0"], ["f1", "f2"]]),
        ((4, 1, 6), (4, 6), [["f0"], [], ["f1"]], [["f0"], ["f1"]]),
    ],
)
def test_factors_of_a_reshape(before: tuple, after: tuple, left: list, right: list) -> None:
    a, b, _, whole = matched(before, after)
    assert [list(d) for d in a] == left and [list(d) for d in b] == right and not whole


def test_sizes_without_a_common_factor_are_whole() -> None:
    _, _, _, whole = matched((4, 6), (3, 8))
    assert whole


def local(fn, args: list, mesh: Mesh, places: list[str]):
    trace = trace_function(fn, tuple(args)).trace
    given = {v: Placement.parse(text, mesh) for v, text in zip(trace.inputs, places, strict=True)}
    program = shard(trace, mesh, given)
    verify(program.trace)
    parts = in_step.run(program.trace, [in_step.cut(x, given[v]) for x, v in zip(args, trace.inputs, strict=True)])
    want = interp.run(trace, *args)
    for part, v, whole in zip(parts, program.trace.outputs, want, strict=True):
        torch.testing.assert_close(in_step.join(part, v.tensor.placement), whole, rtol=1e-10, atol=1e-12)
    return program


def collectives(program) -> list[str]:
    return [e.op.name for e in program.trace.equations if is_collective(e)]


TP = Mesh.of(tp=2)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def test_columns_then_rows_need_one_sum() -> None:
    program = local(
        lambda x, w, v: torch.relu(x @ w) @ v, [randn(4, 6), randn(6, 8), randn(8, 6)], TP,
        ["[4, 6]", "[6, 8/tp]", "[8/tp, 6]"],
    )  # fmt: skip
    assert collectives(program) == ["all_reduce"]


def test_a_bias_is_added_once() -> None:
    program = local(
        torch.nn.functional.linear, [randn(4, 8), randn(6, 8), randn(6)], TP, ["[4, 8/tp]", "[6, 8/tp]", "[6]"]
    )
    assert collectives(program) == ["once", "all_reduce"]


def test_summands_pass_through_what_is_linear() -> None:
    def fn(x, w):
        return (3 * (x @ w).t()).reshape(-1)

    program = local(fn, [randn(4, 8), randn(8, 6)], TP, ["[4, 8/tp]", "[8/tp, 6]"])
    assert collectives(program) == ["all_reduce"] and is_collective(program.trace.equations[-1])


def test_rows_that_no_axis_divides() -> None:
    """Padding does not count in sums, means, maxima, products and look-ups."""

    def fn(x, w, ids):
        y = torch.log(x.abs()) @ w
        return y.sum(0), y.mean((0, 1)), y.amax(0), y.amin(), y.t() @ y, w[ids].sum(), torch.softmax(y, 1).var(0)

    ids = torch.arange(7) % 3
    three = Mesh.of(x=3)
    local(fn, [randn(7, 4), randn(4, 5), ids], three, ["[7/x, 4]", "[4, 5]", "[7/x]"])
    local(fn, [randn(7, 4), randn(4, 5), ids], three, ["[7, 4/x]", "[4/x, 5]", "[7]"])


def test_a_table_cut_by_rows() -> None:
    def fn(table, ids):
        return torch.nn.functional.embedding(ids, table)

    program = local(fn, [randn(47, 4), torch.tensor([[0, 46, 3], [25, 1, 23]])], TP, ["[47/tp, 4]", "[2, 3]"])
    assert collectives(program) == ["start", "all_reduce"]


def look_up(table, ids):
    return torch.nn.functional.embedding(ids, table)


@pytest.mark.parametrize("wrong", [47, -1, 100])
def test_a_row_that_no_rank_has_is_refused(wrong: int) -> None:
    """As on one device; 47 is a row that padding adds on the last rank."""
    program = local(look_up, [randn(47, 4), torch.tensor([0, 46])], TP, ["[47/tp, 4]", "[2]"]).trace
    tables = in_step.cut(randn(47, 4), program.inputs[0].tensor.placement)
    with pytest.raises(IndexError):
        in_step.run(program, [tables, [torch.tensor([0, wrong])] * 2])


def test_rows_of_other_ranks_are_looked_up_all_over_the_table() -> None:
    """So that the gradients of all of them, which are zeros, are not added to one row."""
    table, ids = randn(64, 4), torch.arange(0, 64, 4)
    program = local(look_up, [table, ids], TP, ["[64/tp, 4]", "[16]"]).trace
    (places,) = [e.args[1] for e in program.equations if "embedding" in str(e.op)]
    tables = in_step.cut(table, program.inputs[0].tensor.placement)
    for found in in_step.run(program.with_(outputs=(places,)), [tables, [ids] * 2])[0]:
        assert found.unique().numel() == 8


def test_what_has_no_rule_is_gathered_and_named() -> None:
    program = local(torch.linalg.inv, [randn(4, 4)], TP, ["[4/tp, 4]"])
    (note,) = program.notes
    assert "inv" in note.operator and note.bytes == 4 * 4 * 8 / 2


@pytest.mark.parametrize(
    "fn",
    [lambda x: torch.linalg.inv_ex(x)[0], lambda x: torch.linalg.cholesky_ex(x)[0], lambda x: torch.fft.fft(x).real],
)
def test_what_has_no_rule_is_tried(fn) -> None:
    """Matrices of a batch are dealt with where they are; along their last dimension they are whole."""
    args = [torch.eye(5, dtype=torch.float64) * 3 + randn(6, 5, 5) * 0.1]
    program = local(fn, args, TP, ["[6/tp, 5, 5]"])
    assert not program.notes and not collectives(program)
    assert local(fn, args, TP, ["[6, 5, 5/tp]"]).notes


def test_rows_that_meet_are_not_cut() -> None:
    """An operator that looks at its neighbours agrees in no chunk."""
    program = local(lambda x: torch.cumprod(x, 0), [randn(6, 4)], TP, ["[6/tp, 4]"])
    assert "all_gather" in collectives(program)
    assert not collectives(local(lambda x: torch.cumprod(x, 0), [randn(6, 4)], TP, ["[6, 4/tp]"]))


def test_values_from_nothing_are_made_in_parts() -> None:
    def fn(x):
        return x * torch.arange(8) + torch.ones(8, dtype=x.dtype)

    program = local(fn, [randn(8)], TP, ["[8/tp]"])
    assert collectives(program) == ["start"]


def test_what_spreads_small_values_is_made_in_parts() -> None:
    """As the gradient of a loss over classes does, which ranks have parts of."""

    def fn(x, labels, scale):
        chosen = labels[:, None] == torch.arange(x.shape[1])
        return x.exp() - chosen.double() * scale[:, None]

    args = [randn(6, 8), torch.tensor([0, 7, 3, 4, 5, 1]), randn(6)]
    program = local(fn, args, Mesh.of(dp=2, tp=2), ["[6/dp, 8/tp]", "[6/dp]", "[6/dp]"])
    assert not any(v.shape == (3, 8) for v in program.trace.values())
    assert collectives(program) == ["start"]


def test_bits_of_dropout_do_not_depend_on_the_mesh() -> None:
    trace = trace_function(lambda x: torch.nn.functional.dropout(x, 0.5), (randn(8, 6),)).trace
    trace = compute_random(trace, lambda device: True, lambda eqn: True)
    torch.manual_seed(3)
    (want,) = interp.run(trace, randn(8, 6))
    for text in ("[8/dp, 6]", "[8/tp/dp, 6]", "[8/dp, 6/tp]"):
        mesh = Mesh.of(dp=2, tp=3)
        placement = Placement.parse(text, mesh)
        program = shard(trace, mesh, {trace.inputs[0]: placement}).trace
        torch.manual_seed(3)
        (parts,) = in_step.run(program, [in_step.cut(randn(8, 6), placement)])
        assert torch.equal(in_step.join(parts, program.outputs[0].tensor.placement), want)


def test_rules_name_every_operand() -> None:
    """A rule speaks of each tensor and each dimension, or the partitioner would not know what it does."""
    trace = trace_function(
        lambda x, w: torch.nn.functional.conv2d(x, w).mean((2, 3)).softmax(-1), (randn(2, 3, 4, 4), randn(5, 3, 2, 2))
    ).trace
    for eqn in trace.equations:
        rule = factors_of(eqn)
        assert rule is not None
        assert [len(d) for d in rule.operands] == [v.ndim for v in eqn.inputs()]
