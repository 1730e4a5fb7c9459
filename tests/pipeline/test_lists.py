"""Pipelines as data: what is listed is what happens, in that order, and a row more is a stage more."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from planted import own_pipelines, plant
from torch import Tensor

import tessera
from tessera.executors.base import in_order
from tessera.inspection.programs import state_of
from tessera.pipeline.lists import PIPELINES, editable, insert, remove
from tessera.pipeline.stage import Stage, expanded
from tessera.pipeline.table import PAGE, page, table
from tessera.tools import cli
from tessera.util.errors import OptionError

EXECUTORS = ["tile", "aten"]


def titles(kind: str) -> list[str]:
    return [stage.title for stage in expanded(PIPELINES[kind], in_order(EXECUTORS))]


def model(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm((x @ w).relu(), (8,)).sum()


def trained() -> Callable:
    fast = tessera.jit(model, executors=EXECUTORS)
    fast(torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)).backward()
    return fast


def called() -> Callable:
    fast = tessera.jit(model, executors=EXECUTORS)
    fast(torch.randn(4, 8), torch.randn(8, 8))
    return fast


def stepped() -> Callable:
    net = torch.nn.Linear(3, 1)
    step = tessera.train_step(net, lambda m, x: m(x).mean(), torch.optim.SGD(net.parameters()), executors=EXECUTORS)
    step(torch.ones(2, 3))
    return step


@pytest.mark.parametrize(("kind", "run"), [("inference", called), ("training", trained), ("step", stepped)])
def test_stages_are_those_of_the_list(kind: str, run: Callable) -> None:
    (compilation,) = state_of(run()).compilations()
    shown = [title for title, _ in compilation.account.stages]
    listed = ["captured", *titles(kind)]
    assert [title for title in listed if title in shown] == shown
    assert len(set(listed)) == len(listed)
    quiet = {stage.title for stage in expanded(PIPELINES[kind], in_order(EXECUTORS)) if stage.quiet or stage.when}
    assert set(listed) - set(shown) <= quiet


def test_a_loss_without_gradients_goes_on_as_inference() -> None:
    fast = tessera.jit(lambda x, w: (x * 2, w.detach() + 1), executors=EXECUTORS)
    fast(torch.ones(3), torch.ones(3, requires_grad=True))
    (compilation,) = state_of(fast).compilations()
    shown = [title for title, _ in compilation.account.stages]
    assert "vjp" not in shown and "inference dce" in shown and compilation.account.joint is None


def test_a_row_is_a_stage_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plant(monkeypatch, lambda trace: seen.append(len(trace.equations)) or trace)
    for run, stage in ((called, "dce"), (trained, "dce"), (stepped, "dce")):
        names = [title for title, _ in state_of(run()).compilations()[0].account.stages]
        assert names[names.index("planted") + 1] == stage
    assert len(seen) == 3


def test_rows_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own_pipelines(monkeypatch)
    with pytest.raises(OptionError, match="no pipeline has a stage called 'nowhere'"):
        insert(Stage("mine", lambda trace: trace, "a test"), before="nowhere")
    with pytest.raises(OptionError, match="no pipeline has a stage called 'nowhere'"):
        remove("nowhere")
    with pytest.raises(OptionError, match="no pipeline called 'nowhere'; there are inference"):
        table("nowhere")
    remove("cse")
    assert "cse" not in titles("training") and "joint cse" in titles("training")


def test_what_can_be_edited_is_listed() -> None:
    cleaning = ("inline", "canonicalise", "attention_mask", "fold", "cse", "dce")
    assert editable() == ("captured", *cleaning, "forward", "backward")


def test_the_page_shows_the_list_as_it_is() -> None:
    text = PAGE.read_text()
    assert table("training") in text, "python -m tessera.pipeline.table writes it again"
    assert page(text) == text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipeline", "inference", "--executors", "aten"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.splitlines()[0].startswith("stage") and "inference canonicalise" in printed and "random" not in printed
    )
    assert cli.main(["pipeline", "step", "--json"]) == 0
    assert [row["stage"] for row in json.loads(capsys.readouterr().out)][-1] == "step lay_out"
