"""What a training loop may do around and between steps: groups, flags, gradients, hooks, averages, autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from followed import check_follows
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model, **flags):
    return torch.optim.Adam(model.parameters(), lr=0.01, **flags)


FLAGS = {
    "foreach": {"foreach": True}, "one by one": {"foreach": False}, "fused": {"fused": True},
    "maximize": {"maximize": True}, "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "tensors": {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False},
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name):
    step, _ = check_follows(lambda m: adam(m, **FLAGS[name]))
    assert not step.in_parts


@pytest.mark.parametrize("own", [False, True], ids=["one program", "own step"])
def test_clipping_by_norm_then_by_value(own):
    def begin(run):
        if own:
            run.optimizer.register_step_post_hook(lambda *_: None)

    step, _ = check_follows(sgd, begin=begin, clips={"clip_norm": 0.5, "clip_value": 0.02}, keep_grads=True)
    assert bool(step.in_parts) == own


def use_every_other(run, i):
    run.model.uses_extra = i % 2 == 0


def freeze_every_other(run, i):
    run.model.hidden.weight.requires_grad_(i % 2 == 1)


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("between", [use_every_other, freeze_every_other])
def test_parameters_that_come_and_go(between, keep_grads):
    """One without a gradient has None, not zeros: its momentum rests."""
    step, _ = check_follows(sgd, between=between, keep_grads=keep_grads)
    assert not step.in_parts


def test_gradients_that_were_there_before():
    """They are taken away, as `zero_grad` does."""

    def begin(run):
        for p in run.model.parameters():
            p.grad = torch.ones_like(p)

    check_follows(sgd, begin=begin, keep_grads=True)
    _, run = check_follows(sgd, begin=begin)
    assert all(p.grad is None for p in run.model.parameters())


def add_backward(run, i):
    if i % 2 == 0:
        (run.model.hidden.weight**2).sum().backward()


def zero_in_between(run, i):
    if i in (2, 4):
        run.optimizer.zero_grad(set_to_none=i == 2)


@pytest.mark.parametrize("between", [None, add_backward, zero_in_between, use_every_other])
def test_accumulated_gradients_wait_where_eager_keeps_them(between):
    step, _ = check_follows(sgd, between=between, accumulate=2, steps=6, keep_grads=True)
    assert not step.in_parts


def test_accumulation_goes_on_in_parts():
    """Hooks that come between two calls of one update: what waits is not lost."""

    def between(run, i):
        if i == 2:
            run.model.hidden.weight.register_hook(lambda g: g * 0.5)

    step, _ = check_follows(sgd, between=between, accumulate=2, steps=6)
    assert "hooks are registered on a parameter" in step.in_parts


def test_hooks_after_accumulation():
    def begin(run):
        def halve(p):
            run.log.append(1)
            p.grad.mul_(0.5)

        run.model.hidden.weight.register_post_accumulate_grad_hook(halve)

    check_follows(sgd, begin=begin)


def in_groups(model):
    groups = [
        {"params": [model.hidden.weight], "lr": 0.1},
        {"params": [model.embed.weight], "weight_decay": 0.0},
        {"params": list(model.extra.parameters()), "betas": (0.8, 0.9), "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def edit(run, i):
    group = run.optimizer.param_groups[0]
    group.update([{"lr": 0.5}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.3}, {"maximize": True}, {}][i])


def move(run, i):
    """A parameter to another group of the same flags, and the groups into another order."""
    first, second, *rest = run.optimizer.param_groups
    second["params"].append(first["params"].pop(0))
    run.optimizer.param_groups[:] = [second, first, *rest]


def add(run, i):
    if i == 1:
        run.optimizer.add_param_group({"params": list(run.model.unused.parameters()), "lr": 0.5})


@pytest.mark.parametrize("between", [use_every_other, edit, move, add])
def test_groups(between):
    step, _ = check_follows(in_groups, between=between)
    assert not step.in_parts


def test_averages_of_a_model():
    def begin(run):
        run.average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def between(run, i):
        run.average.update_parameters(run.model)
        run.log.append([round(p.detach().double().sum().item(), 2) for p in run.average.parameters()])

    check_follows(sgd, begin=begin, between=between)


def test_autocast_around_a_step():
    step, _ = check_follows(sgd, around=lambda: torch.autocast("cpu", torch.bfloat16), steps=3)
    assert not step.in_parts


def test_state_and_parameters_that_are_replaced():
    def between(run, i):
        if i == 1:
            run.optimizer.load_state_dict(run.optimizer.state_dict())
        if i == 2:
            run.model.hidden.weight.data = run.model.hidden.weight.data * 2
        if i == 3:
            run.optimizer.state.clear()

    step, _ = check_follows(adam, between=between)
    assert not step.in_parts


class Turned(nn.Module):
    """Weights that are not contiguous, as their gradients are then not."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(7, 4).t())

    def forward(self, x):
        image = F.one_hot(x, 7).float()[:, None, :, None].expand(-1, 3, 7, 7)
        return self.conv(image).mean((2, 3)) @ self.weight


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_laid_out_as_their_parameters(accumulate):
    check_follows(sgd, model=Turned, accumulate=accumulate, steps=4, keep_grads=True)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7, dtype=torch.complex64))

    def forward(self, x):
        return (F.one_hot(x, 7).to(torch.complex64) @ self.weight).abs()


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"clips": {"clip_norm": 0.1}}, {"keep_grads": True}], ids=str
)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_complex_parameters_are_updated_as_pairs(optimizer, options):
    step, _ = check_follows(optimizer, model=Complex, steps=4, **options)
    assert not step.in_parts
