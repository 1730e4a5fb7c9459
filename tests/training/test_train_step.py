"""A compiled training step follows eager PyTorch: losses, parameters, state and counters, for every optimizer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tessera
from tessera.tools.models import GPT, GPTConfig
from tessera.util.errors import CaptureError, InputError, OptionError

TINY = GPTConfig(layers=2, width=32, heads=2, context=8, vocab=32)
EXECUTORS = [["aten"], ["tile", "sdpa", "aten"]]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-3, amsgrad=True),
    "lion": lambda ps: tessera.optim.Lion(ps, lr=1e-4, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield


def batches(count: int, vocab: int = 32):
    return [tuple(torch.randint(0, vocab, (2, 8)) for _ in range(2)) for _ in range(count)]


def eager_step(model, optimizer, batch, clip=None):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


def assert_close(got, want, tolerance=2e-4):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_same_state(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance=2e-4):
    a, b = mine.state_dict(), theirs.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for key, state in b["state"].items():
        assert a["state"][key].keys() == state.keys()
        for name, tensor in state.items():
            assert a["state"][key][name].device == tensor.device
            assert_close(a["state"][key][name], tensor, tolerance)


CASES = [*((name, EXECUTORS[0]) for name in OPTIMIZERS), *((n, EXECUTORS[1]) for n in ("nesterov", "adamw", "lion"))]


@pytest.mark.parametrize(("name", "executors"), CASES, ids=[f"{name}-{e[0]}" for name, e in CASES])
def test_twenty_steps_of_a_gpt_follow_eager(name, executors):
    """With clipping, a schedule of the learning rate, and state saved and restored half-way."""
    model = GPT(TINY)
    other = copy.deepcopy(model)
    mine, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 30) for o in (mine, theirs)]
    step = tessera.train_step(model, None, mine, clip_norm=0.5, executors=executors, strict=True)
    for i, batch in enumerate(batches(20)):
        got, want = step(*batch), eager_step(other, theirs, batch, clip=0.5)
        assert_close(got, want, 1e-3)
        assert not got.requires_grad
        for s in schedules:
            s.step()
        if i == 9:
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert all(p.grad is None for p in model.parameters())
    assert_same_state(mine, theirs, 1e-3)
    bound = 2e-3 if name == "lion" else 1e-3  # a sign may differ where the momentum is nearly zero
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q, bound)
    assert len(tessera.stages(step).graphs()) == 1  # no schedule, no restored state compiles again
    assert not tessera.explain(step).eager


@pytest.mark.parametrize("executors", EXECUTORS, ids=["aten", "tile"])
def test_accumulation(executors):
    model = GPT(TINY)
    other = copy.deepcopy(model)
    mine, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    step = tessera.train_step(model, None, mine, accumulate=3, clip_norm=1.0, executors=executors, strict=True)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        for k, batch in enumerate(batches(3)):
            loss = other(*batch)
            (loss / 3).backward()
            assert_close(step(*batch), loss.detach())
            if k < 2:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_close(p, q)


@pytest.mark.parametrize("executors", EXECUTORS, ids=["aten", "tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_by_value(executors, dtype):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, other))
    options = {"clip_value": 0.02, "keep_grads": True, "executors": executors, "strict": True}
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), mine, **options)
    for _ in range(3):
        x = torch.randn(5, 6, dtype=dtype)
        theirs.zero_grad()
        loss = other(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_value_(other.parameters(), 0.02)
        theirs.step()
        assert_close(step(x), loss.detach(), 2e-4 if dtype == torch.float32 else 2e-2)
        assert max(p.grad.abs().max() for p in model.parameters()) == torch.tensor(0.02, dtype=dtype)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q, 2e-4 if dtype == torch.float32 else 2e-2)
        assert_close(p.grad, q.grad, 2e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("broken", [False, True])
def test_a_loss_in_a_dict(broken):
    class Answer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, y):
            loss, out = loss_of(self.net, x, y)
            if broken:
                torch._dynamo.graph_break()
            return OrderedDict(out=out, loss=loss)

    model = Answer()
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, other))
    step = tessera.train_step(model, None, mine, executors=["aten"])
    for _ in range(2):
        batch = net_batch()
        found, (loss, out) = step(*batch), net_step(other.net, theirs, batch)
        assert type(found) is OrderedDict and list(found) == ["out", "loss"]
        assert_close(found["loss"], loss.detach())
        assert_close(found["out"], out.detach())
    assert bool(step.in_parts) is broken
    with pytest.raises(InputError, match='has it as "loss"'):
        tessera.train_step(model, lambda m, *batch: {"cost": m(*batch)["loss"]}, mine)(*net_batch())


class Net(nn.Module):
    """A frozen layer, an unused one, a buffer that is written, dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8)
        self.unused = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.second(self.norm(self.frozen(torch.relu(self.first(x)))))


def loss_of(model, x, y):
    out = model(x)
    return nn.functional.mse_loss(out, y), out


def net_pair(make, **options):
    model = Net()
    other = copy.deepcopy(model)
    mine, theirs = make(model), make(other)
    options = {"strict": True, "executors": ["aten"], **options}
    return model, other, theirs, tessera.train_step(model, loss_of, mine, **options)


def net_step(other, theirs, batch):
    theirs.zero_grad()
    loss, out = loss_of(other, *batch)
    loss.backward()
    theirs.step()
    return loss, out


def net_batch(n=5):
    return torch.randn(n, 6), torch.randn(n, 4)


def groups(model):
    first = {"params": list(model.first.parameters()), "lr": 0.05, "weight_decay": 0.0}
    return [first, {"params": [p for n, p in model.named_parameters() if not n.startswith("first")]}]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.AdamW(groups(m), lr=0.01, weight_decay=0.1),
        lambda m: torch.optim.SGD(groups(m), lr=0.01, momentum=0.9, maximize=True),
    ],
)
def test_groups_frozen_unused_and_buffers(make):
    model, other, theirs, step = net_pair(make)
    for _ in range(4):
        batch = net_batch()
        loss, out = step(*batch)
        want, want_out = net_step(other, theirs, batch)
        assert_close(loss, want.detach())
        assert_close(out, want_out.detach())
        assert not out.requires_grad
    for (name, p), q in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4, msg=name)
    assert_same_state(step.state.optimizer, theirs)


def test_keep_grads_and_state_loaded_before():
    def make(m):
        return torch.optim.Adam(m.parameters(), lr=0.01)

    model, other, theirs, step = net_pair(make, keep_grads=True)
    batch = net_batch()
    for _ in range(3):
        net_step(other, theirs, batch)
    model.load_state_dict(other.state_dict())
    step.state.optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    batch = net_batch()
    assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert_close(p, q)
        if q.grad is not None:
            assert_close(p.grad, q.grad)
    assert step.state.optimizer.state[model.first.weight]["step"].item() == 4


def test_sizes_may_change():
    model, other, theirs, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9))
    for n in (5, 7, 9, 11):
        batch = net_batch(n)
        assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q)


def test_flags_may_change_back_and_forth():
    """Each way has a program of its own, made once."""
    model, other, theirs, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9))
    for i in range(6):
        for group in (step.state.optimizer.param_groups[0], theirs.param_groups[0]):
            group["maximize"], group["weight_decay"] = i % 2 == 1, 0.1 * (i % 2)
        batch = net_batch()
        assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())
    assert len(tessera.explain(step).graphs) == 2
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q)


def test_train_and_eval_mode_are_told_apart():
    model, other, theirs, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    for mode in (True, False, True):
        model.train(mode)
        other.train(mode)
        batch = net_batch()
        assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())


def test_parameters_of_16_bits():
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8, vocab=32)).to(torch.bfloat16)
    other = copy.deepcopy(model)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3)
    step = tessera.train_step(model, None, mine, executors=["tile", "sdpa", "aten"], strict=True)
    for batch in batches(5):
        assert_close(step(*batch), eager_step(other, theirs, batch), 3e-2)
    assert all(s["exp_avg"].dtype == torch.bfloat16 for s in mine.state.values())


# --- where the step cannot be one program ---


def test_a_graph_break_runs_in_parts():
    model = Net()
    other = copy.deepcopy(model)

    def broken(model, x, y):
        hidden = model(x)
        torch._dynamo.graph_break()
        return nn.functional.mse_loss(hidden, y)

    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, other))
    step = tessera.train_step(model, broken, mine, accumulate=2, clip_norm=0.1, executors=["aten"])
    for _ in range(3):
        for _ in range(2):
            batch = net_batch()
            loss = loss_of(other, *batch)[0]
            (loss / 2).backward()
            assert_close(step(*batch), loss.detach())
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q)
        assert p.grad is None
    assert any("in parts" in g.eager_reason for g in tessera.explain(step).graphs)
    assert_same_state(mine, theirs)


def test_a_value_that_is_asked_for_runs_in_parts():
    def asking(model, x, y):
        loss = loss_of(model, x, y)[0]
        return loss * 2 if loss.item() > 1e9 else loss

    model = Net()
    step = tessera.train_step(model, asking, torch.optim.SGD(model.parameters(), lr=0.05), executors=["aten"])
    assert step(*net_batch()).ndim == 0 and "data-dependent" in step.in_parts


def test_a_batch_that_fails_changes_nothing():
    """The step stays one program, and sums of gradients that wait for an update wait on."""
    options = {"accumulate": 2, "strict": False}
    model, other, theirs, step = net_pair(lambda m: torch.optim.AdamW(m.parameters(), lr=0.05), **options)
    for failing in (True, False):
        theirs.zero_grad()
        for _ in range(2):
            batch = net_batch()
            (loss_of(other, *batch)[0] / 2).backward()
            step(*batch)
            if failing:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    step(torch.randn(5, 7), batch[1])
        theirs.step()
    assert not step.in_parts
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(p, q)
    assert_same_state(step.state.optimizer, theirs)


def test_a_fault_of_ours_runs_in_parts_with_a_warning(monkeypatch):
    def broken(*_: object) -> None:
        raise AssertionError("a broken pass")

    monkeypatch.setattr("tessera.pipeline.parts.remat", broken)
    model, other, theirs, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05), strict=False)
    batch = net_batch()
    with pytest.warns(UserWarning, match="in parts: AssertionError: a broken pass"):
        assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())
    assert_close(model.first.weight, other.first.weight)
    *_, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    with pytest.raises(CaptureError, match="a broken pass"):
        step(*batch)


def test_hooks_are_run():
    model, other, theirs, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9))
    calls = []
    for m in (model, other):
        m.first.weight.register_hook(lambda g: g * 0.5)
    step.state.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        batch = net_batch()
        assert_close(step(*batch)[0], net_step(other, theirs, batch)[0].detach())
    assert_close(model.first.weight, other.first.weight)
    assert len(calls) == 2


def test_parameters_that_share_memory_run_in_parts():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(4))
            self.b = nn.Parameter(self.a.data[:2])

        def forward(self, x):
            return ((x * self.a).sum() + self.b.sum()) ** 2

    model = Shared()
    start = model.a.detach().clone()
    step = tessera.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.01), executors=["aten"])
    x = torch.randn(4)
    step(x)
    total = 2 * ((x * start).sum() + start[:2].sum())
    want = start - 0.01 * total * x
    want[:2] -= 0.01 * total
    assert_close(model.a.detach(), want)
    assert any("share memory" in g.eager_reason for g in tessera.explain(step).graphs)


# --- what is refused ---


def test_errors_name_what_is_valid():
    model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="accumulate"):
        tessera.train_step(model, None, sgd, accumulate=0)
    with pytest.raises(OptionError, match="clip_value"):
        tessera.train_step(model, None, sgd, clip_value=0.0)
    with pytest.raises(OptionError, match="clip_norm"):
        tessera.train_step(model, None, sgd, clip_norm=-1.0)


def test_a_loss_that_is_no_number_is_an_error():
    model = Net()
    step = tessera.train_step(model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="one floating-point number"):
        step(torch.randn(5, 6))


def test_no_step_in_inference_mode():
    model, _, _, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode(), pytest.raises(InputError, match="inference_mode"):
        step(*net_batch())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# --- stages ---


def test_a_stage_can_be_edited(tmp_path):
    model, _, _, step = net_pair(lambda m: torch.optim.SGD(m.parameters(), lr=0.05))
    batch = net_batch()
    step(*batch)
    stages = tessera.stages(step)
    assert {"captured", "vjp", "forward", "backward", "step"} <= set(stages.names())
    path = tmp_path / "backward.py"
    stages["backward"].save(str(path))
    text = path.read_text()
    assert "sgd step" in text
    path.write_text(text.replace("aten.full([], 1.0", "aten.full([], 0.0"))  # no gradient, so no update
    tessera.edit(step, str(path))
    before = model.second.weight.detach().clone()
    step(*batch)
    assert torch.equal(model.second.weight, before)


@pytest.mark.parametrize("loss", [torch.nn.functional.cross_entropy, torch.nn.MSELoss()])
def test_a_loss_of_outputs_is_no_loss_of_a_model(loss: Callable) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="takes no model; expected lambda model, x, y"):
        tessera.train_step(model, loss, torch.optim.SGD(model.parameters()))


class Remembering(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.weight, self.cut = nn.Parameter(torch.tensor([1.0, -2.0])), cut
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.mean.lerp_(self.weight.detach() if self.cut else self.weight, 0.5)
        return self.mean.sum() + self.weight.sum() + x.sum()  # nothing is saved: eager may go through it again


@pytest.mark.parametrize("cut", [False, True])
def test_buffers_with_a_history_lead_into_earlier_steps(cut):
    seen = []
    for compiled in (False, True):
        model = Remembering(cut)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = tessera.train_step(model, lambda m, x: m(x), optimizer)
        for i in range(3):
            x = torch.full((2,), float(i))
            if compiled:
                step(x)
            else:
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
        if compiled:
            assert bool(step.in_parts) is not cut
        seen.append((model.weight, model.mean))
    assert_close(seen[1], seen[0])
