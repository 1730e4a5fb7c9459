"""What a forward reads beside the model's own attributes: globals, objects, classes, files. Programs follow."""

from __future__ import annotations

import argparse
import enum
import functools
from collections.abc import Callable, Iterator

import pytest
import python_settings
import torch
from python_settings import raised
from steps import pretended
from test_python_state import twins
from torch import Tensor, nn

import tessera
from tessera.distributed.python_state import PythonState

SHARED, COUNTED = 1.0, 0
TABLE = {"a": [1.0]}


class Mode(enum.Enum):
    PLAIN, DOUBLE = 1, 2


class Settings:
    """A class whose attributes are read off itself."""

    shift = 0.0


class Config:
    bias = 0.0

    def __init__(self) -> None:
        self.scale, self.unread, self.inner = 1.0, 0, argparse.Namespace(factor=1.0)

    @property
    def doubled(self) -> float:
        return self.hidden * 2

    hidden = 0.5


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def surrounded(gain: list) -> Callable:
    return lambda x: x * gain[0]


def helped(x: Tensor) -> Tensor:
    return raised(x) * SHARED * TABLE["a"][0] + Settings.shift


class Base(nn.Module):
    level = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.level


class Reading(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.slotted, self.mode = nn.Linear(4, 4), Config(), Slotted(), Mode.PLAIN
        self.gain, self.listed, self.whole = [1.0], [Config()], 1
        self.act = functools.partial(surrounded(self.gain))

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        y = helped(self.scaled(self.layer(x))) * python_settings.RATE * c.scale * c.inner.factor * c.doubled + c.bias
        y = self.act(y) * self.slotted.gain * self.listed[0].scale * getattr(self, "extra", 1.0)
        ones = torch.ones(4, dtype=torch.int64) * self.whole / (2 if self.mode is Mode.DOUBLE else 1)
        return y * ones.to(y.dtype) + (torch.ones(1, dtype=torch.int64) * self.whole).element_size()


CHANGES: dict[str, Callable[[Reading, pytest.MonkeyPatch], object]] = {
    "a global": lambda m, p: p.setitem(globals(), "SHARED", 2.0),
    "within a global": lambda m, p: TABLE["a"].__setitem__(0, 3.0),
    "another file": lambda m, p: p.setattr(python_settings, "RATE", 2.0),
    "a function's global in another file": lambda m, p: p.setattr(python_settings, "POWER", 3.0),
    "a global function": lambda m, p: p.setitem(globals(), "raised", torch.cos),
    "an object": lambda m, p: setattr(m.config, "scale", 2.0),
    "an object of an object": lambda m, p: setattr(m.config.inner, "factor", 2.0),
    "another object": lambda m, p: setattr(m.config, "inner", argparse.Namespace(factor=3.0)),
    "an object's class": lambda m, p: p.setattr(Config, "bias", 2.0),
    "what a property reads": lambda m, p: p.setattr(Config, "hidden", 2.0),
    "a class": lambda m, p: p.setattr(Settings, "shift", 2.0),
    "a base class": lambda m, p: p.setattr(Base, "level", 2.0),
    "a class before its base": lambda m, p: p.setattr(Reading, "level", 3.0, raising=False),
    "an instance before its class": lambda m, p: setattr(m, "level", 4.0),
    "a new attribute of a class": lambda m, p: p.setattr(Base, "extra", 2.0, raising=False),
    "a method": lambda m, p: p.setattr(Base, "scaled", lambda self, x: x * 7),
    "slots": lambda m, p: setattr(m.slotted, "gain", 2.0),
    "an object in a list": lambda m, p: setattr(m.listed[0], "scale", 2.0),
    "a function's own variable": lambda m, p: m.gain.__setitem__(0, 2.0),
    "an enumeration": lambda m, p: setattr(m, "mode", Mode.DOUBLE),
    "the type of a number": lambda m, p: setattr(m, "whole", 1.0),
    "a layer's forward": lambda m, p: p.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    TABLE["a"][0] = 1.0


@pytest.mark.filterwarnings("ignore:(?s).*a program was compiled for 8 states")
def test_programs_follow_what_a_forward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Reading().double(), torch.randn(4, 4, dtype=torch.float64)
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        for name, change in CHANGES.items():
            change(model, monkeypatch)
            # the weights are DTensors by now: the same modules read them whole
            with torch.no_grad():
                held = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
                want = torch.func.functional_call(model, held, (x,))
                torch.testing.assert_close(fast(x), want, msg=lambda m, name=name: f"{name}: {m}")


def test_each_change_is_seen_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reading()
    state = PythonState(model)
    state.asked()
    for number, (name, change) in enumerate(CHANGES.items(), 1):
        change(model, monkeypatch)
        assert state.asked()[0] == number, name
        assert " was " in state.why and ", is " in state.why, state.why
    assert len(state.states) == len(CHANGES) + 1


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return helped(model(x)).sum()


def test_a_loss_function_reads_as_a_forward_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = twins()
    state = PythonState(model, loss)
    state.asked()
    monkeypatch.setattr(python_settings, "POWER", 2.0)
    assert state.asked()[0] == 1 and state.why == "python_settings.POWER was 1.0, is 2.0"
    monkeypatch.setattr(python_settings, "POWER", 1.0)
    assert state.asked()[0] == 0


def test_what_nobody_reads_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reading()
    state = PythonState(model)
    state.asked()
    monkeypatch.setitem(globals(), "COUNTED", 5)
    monkeypatch.setattr(python_settings, "UNREAD", 5)
    model.config.unread = 5
    model.train()
    model.config = Config()  # another one that says the same
    model.gain[0] = 1.0
    model.whole = int("1")
    assert state.asked()[0] == 0 and len(state.states) == 1
