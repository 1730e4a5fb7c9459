"""What a newcomer gets wrong is answered with what was expected and what to try."""

from __future__ import annotations

import pytest
import torch
from planted import plant

import tessera
from tessera.util.errors import CaptureError, InputError, OptionError

X = torch.randn(2, 4)


def test_a_class_in_place_of_a_module() -> None:
    with pytest.raises(OptionError, match=r"got the class Linear: make one first, such as Linear\(…\)"):
        tessera.jit(torch.nn.Linear)


def test_executors_as_text() -> None:
    fast = tessera.jit(torch.sin, executors="sdpa,aten", frontend="functional")
    torch.testing.assert_close(fast(X), X.sin())
    with pytest.raises(OptionError, match="unknown executor 'tiel'"):
        tessera.jit(torch.sin, executors="tiel,aten")


def test_an_operator_that_is_not_there() -> None:
    with pytest.raises(OptionError, match=r"PyTorch has no operator 'aten\.gelo'"):
        tessera.register_executor("misspelt", {"aten.gelo": torch.nn.functional.gelu})


def test_an_if_on_a_value_names_its_line() -> None:
    fast = tessera.jit(lambda x: x if x.sum() > 0 else -x, frontend="functional")
    with pytest.raises(CaptureError, match=r"test_messages\.py:\d+: the program asks for the value of a tensor"):
        fast(X)


def test_nothing_to_edit_or_show() -> None:
    fast = tessera.jit(torch.sin)
    for look in (tessera.stages, lambda fast: tessera.edit(fast, "nowhere.py")):
        with pytest.raises(InputError, match="nothing is compiled yet; call the function first"):
            look(fast)


def test_stages_of_a_function_that_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trace: tessera.Trace) -> tessera.Trace:
        raise ValueError("a pass of mine")

    plant(monkeypatch, broken)
    fast = tessera.jit(lambda x: x.sin() + 1)
    with pytest.warns(UserWarning, match="could not compile"):
        fast(X)
    with pytest.raises(InputError, match="there are no stages: .* runs eagerly: ValueError: a pass of mine"):
        tessera.stages(fast)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), r"one floating-point number, got torch\.float32 of shape \(2, 4\); reduce it"),
        (lambda model, x: model(x).sum().item(), "expected the loss to be a tensor, got float"),
        (lambda model, x: x.sum(), "the loss depends on no parameter that requires grad"),
    ],
)
def test_what_is_no_loss(loss: object, message: str) -> None:
    model = torch.nn.Linear(4, 4)
    step = tessera.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        step(X)
