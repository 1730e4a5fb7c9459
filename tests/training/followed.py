"""Steps of `train_step` beside eager's loop, on a small model: losses, parameters, state, warnings and a log."""

from __future__ import annotations

import contextlib
import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import tessera


class Tied(nn.Module):
    """Shares a weight, leaves a layer out, and uses another only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6, bias=False)
        self.extra = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.uses_extra = False

    def forward(self, x):
        h = torch.tanh(self.hidden(self.embed(x)))
        return self.head(self.extra(h) if self.uses_extra else h)


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y)


class Run:
    """One of the two runs: its model and optimizer, and room for what a test hangs on them."""

    def __init__(self, model, make):
        self.model, self.optimizer, self.log = model, make(model), []


def clip(model, clip_norm=None, clip_value=None):
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if clip_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), clip_value)


def eager_steps(run, data, between, around, accumulate=1, clips=None):
    for i, batch in enumerate(data):
        if i % accumulate == 0:
            run.optimizer.zero_grad()
        with around():
            loss = loss_of(run.model, *batch)
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            clip(run.model, **(clips or {}))
            run.optimizer.step()
        yield loss.detach()
        between(run, i)


def compiled_steps(run, step, data, between, around):
    for i, batch in enumerate(data):
        with around():
            loss = step(*batch)
        yield loss
        between(run, i)


def check_follows(
    make, *, model=Tied, begin=None, between=None, around=None, steps=5, clips=None, accumulate=1, **options
):
    """Both runs, compared; gives the step and the run that it made."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    first = model()
    mine, theirs = Run(first, make), Run(copy.deepcopy(first), make)
    for run in (mine, theirs) if begin else ():
        begin(run)
    data = [(torch.randint(0, 7, (5,)), torch.randint(0, 7, (5,))) for _ in range(steps)]
    between, around = between or (lambda run, i: None), around or contextlib.nullcontext
    step = tessera.train_step(
        mine.model, loss_of, mine.optimizer, executors=["aten"], accumulate=accumulate, **(clips or {}), **options
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = list(compiled_steps(mine, step, data, between, around))
    with warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always")
        want = list(eager_steps(theirs, data, between, around, accumulate, clips))
    assert_close(torch.stack(got), torch.stack(want))
    assert_same(mine, theirs, bool(options.get("keep_grads")))
    assert schedulers(told) == schedulers(expected)
    return step, mine


def schedulers(caught):
    return sorted(str(w.message) for w in caught if "lr_scheduler" in str(w.message))


def assert_close(got, want, tolerance=1e-4):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_same(mine, theirs, grads):
    assert_close(mine.model.state_dict(), theirs.model.state_dict())
    assert mine.log == theirs.log
    a, b = mine.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    assert a.keys() == b.keys()
    for key, state in b.items():
        assert a[key].keys() == state.keys()
        for name, value in state.items():
            assert_close(a[key][name], value)
    for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True) if grads else ():
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            assert_close(p.grad, q.grad)
            assert p.grad.stride() == q.grad.stride()
