"""What somebody put in the place of an optimizer's methods, or hung on them, is run, as eager runs it."""

from __future__ import annotations

import functools
from types import MethodType

import pytest
import torch
from followed import Tied, check_follows
from torch.optim import lr_scheduler

import tessera
from tessera.util.errors import OptionError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def shrink(optimizer):
    """What a plain step does not do."""
    with torch.no_grad():
        optimizer.param_groups[0]["params"][1].mul_(0.5)


def on_the_object(run):
    step = run.optimizer.step

    def wrapped(*args, **kwargs):
        result = step(*args, **kwargs)
        shrink(run.optimizer)
        return result

    run.optimizer.step = wrapped


def under_a_scheduler(run):
    step = type(run.optimizer).step

    def wrapped(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        shrink(self)
        return result

    run.optimizer.step = MethodType(wrapped, run.optimizer)
    lr_scheduler.StepLR(run.optimizer, 1)


def over_a_scheduler(run):
    """`functools.wraps` copies the mark that a scheduler leaves on a step."""
    lr_scheduler.StepLR(run.optimizer, 1)
    step = run.optimizer.step

    @functools.wraps(step)
    def wrapped(*args, **kwargs):
        result = step(*args, **kwargs)
        shrink(run.optimizer)
        return result

    run.optimizer.step = wrapped


class Callable:
    def __init__(self, optimizer):
        self.optimizer, self.step = optimizer, optimizer.step

    def __call__(self, closure=None):
        self.step(closure)
        shrink(self.optimizer)


def an_object(run):
    run.optimizer.step = Callable(run.optimizer)


@pytest.mark.parametrize("begin", [on_the_object, under_a_scheduler, over_a_scheduler, an_object])
def test_a_step_that_was_replaced_runs(begin):
    step, _ = check_follows(sgd, begin=begin)
    (told,) = (g.eager_reason for g in tessera.explain(step).graphs if g.eager_reason)
    assert "the optimizer's step was replaced by a" in told


def test_a_step_that_was_replaced_on_the_class_runs(monkeypatch):
    original = torch.optim.SGD.step

    @functools.wraps(original)
    def patched(self, closure=None):
        result = original(self, closure)
        shrink(self)
        return result

    monkeypatch.setattr(torch.optim.SGD, "step", patched)
    step, _ = check_follows(sgd)
    assert "test_methods.py" in step.in_parts


def test_a_step_may_be_replaced_between_steps_and_put_back():
    def between(run, i):
        if i == 1:
            on_the_object(run)
        elif i == 3:
            del run.optimizer.step

    step, _ = check_follows(adam, between=between)
    assert step.in_parts


class Shrinking(torch.optim.SGD):
    def step(self, closure=None):
        result = super().step(closure)
        shrink(self)
        return result


class Renamed(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)


class OtherState(torch.optim.SGD):
    def _init_group(self, group, *lists):
        result = super()._init_group(group, *lists)
        shrink(self)
        return result


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: Shrinking(m.parameters(), lr=0.1), "step was replaced"),
        (lambda m: OtherState(m.parameters(), lr=0.1), "no equations for the optimizer OtherState"),
        (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), "no equations for the optimizer Adagrad"),
        (lambda m: Renamed(m.parameters()), ""),
    ],
    ids=["step", "another method", "unknown", "nothing changed"],
)
def test_other_classes_run_their_own_step(make, reason):
    """Of a subclass that changes nothing a step does, the base's equations hold."""
    step, _ = check_follows(make, clips={"clip_norm": 0.5, "clip_value": 0.05}, accumulate=2, steps=4)
    assert reason in step.in_parts and bool(reason) == bool(step.in_parts)


def test_zero_grad_that_was_replaced_is_called():
    def begin(run):
        plain = run.optimizer.zero_grad

        def zero_grad(set_to_none=False):
            run.log.append("zero_grad")
            plain(set_to_none)

        run.optimizer.zero_grad = zero_grad

    def between(run, i):  # zeros are not None: momentum moves what has no gradient this time
        run.model.uses_extra = i % 2 == 0

    step, run = check_follows(sgd, begin=begin, between=between, keep_grads=True)
    assert run.log == ["zero_grad"] * 5
    assert "zero_grad was replaced" in step.in_parts


@pytest.mark.parametrize("name", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer(name):
    step, run = check_follows(sgd, begin=lambda run: getattr(run.optimizer, name)(lambda *_: run.log.append(1)))
    assert len(run.log) == 5 and "hooks" in step.in_parts


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_leave_one_program(name):
    """They wrap `step` only to note that one came, which a compiled step notes too: nothing is warned about."""

    def begin(run):
        run.schedule = SCHEDULES[name](run.optimizer)

    def between(run, i):
        run.schedule.step(*([1.0 + i] if name == "plateau" else []))
        run.log.append(run.optimizer.param_groups[0]["lr"])

    step, _ = check_follows(sgd, begin=begin, between=between)
    assert not step.in_parts


def test_a_scheduler_that_comes_late():
    def between(run, i):
        if i == 1:
            run.schedule = lr_scheduler.StepLR(run.optimizer, 1, 0.5)
        elif i > 1:
            run.schedule.step()

    step, _ = check_follows(adam, between=between)
    assert not step.in_parts


def test_what_is_refused():
    model = Tied()
    with pytest.raises(OptionError, match="LBFGS, whose step wants a closure"):
        tessera.train_step(model, None, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(OptionError, match=r"expected a torch\.optim\.Optimizer, got list"):
        tessera.train_step(model, None, list(model.parameters()))
