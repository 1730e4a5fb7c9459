"""What a model's Python says may change between calls on a mesh: programs follow, and go back to earlier ones."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from steps import pretended
from torch import Tensor, nn

import tessera
from tessera.util.errors import CaptureError

RATE = 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.scale, self.act, self.config, self.table = 1.0, torch.tanh, {"power": 1.0}, torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.act(self.first(x)) * self.table)
        if not y.requires_grad:
            y = y * 5
        return self.last(y) * self.scale * self.config["power"]


def rated(model: nn.Module, x: Tensor, by: float) -> Tensor:
    return model(x).square().mean() * by * RATE + model.first.weight.sum()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda m: None,
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a part in eval mode": lambda m: m.norm.eval(),
    "frozen": lambda m: m.first.requires_grad_(False),
    "all frozen but one": lambda m: [m.norm.requires_grad_(False), m.last.weight.requires_grad_(False)],
    "trained again": lambda m: m.requires_grad_(True),
    "a function": lambda m: setattr(m, "act", functools.partial(torch.clamp, min=0)),
    "within a dictionary": lambda m: m.config.update(power=2.0),
    "a hook": lambda m: m.first.register_forward_hook(lambda module, args, out: out * 2),
    "a tensor that is no buffer": lambda m: setattr(m, "table", torch.arange(4).double()),
    "another module": lambda m: setattr(m, "last", m.first),
    "momentum": lambda m: (m.norm.train(), setattr(m.norm, "momentum", 0.5)),
    "eval": lambda m: m.eval(),
}


@pytest.fixture(autouse=True)
def unmarked() -> Iterator[None]:
    """More states than a model should have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*a program was compiled for 8 states")
        yield


def twins() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model().double()
    return model, copy.deepcopy(model), torch.randn(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("plan", ["ddp", "1f1b"])
def test_calls(plan: str) -> None:
    model, plain, x = twins()
    with pretended({"pp" if plan == "1f1b" else "dp": 1}) as mesh:
        options = {"microbatches": 1} if plan == "1f1b" else {}
        fast = tessera.jit(model, mesh=mesh, plan=plan, executors="aten", **options)
        for change in CHANGES.values():
            if plan == "1f1b" and change is CHANGES["another module"]:
                continue
            for m in (model, plain):
                change(m)
                m.zero_grad()
            got, want = fast(x), plain(x)
            torch.testing.assert_close(got, want)
            for out in (got, want):
                out.sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if q.grad is not None:
                    torch.testing.assert_close(p.grad.to_local(), q.grad)


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, x = twins()
    by = 1.0
    loss = lambda model, x: rated(model, x, by)  # noqa: E731
    with pretended({"dp": 1}) as mesh:
        tessera.shard(model, mesh, "zero2")
        mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
        step = tessera.train_step(model, loss, mine, executors="aten")

        def both() -> None:
            got, want = step(x), loss(plain, x)
            want.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(got, want.detach())
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.detach().full_tensor(), q.detach())

        for name, change in CHANGES.items():
            if name == "another module":
                continue
            for m in (model, plain):
                change(m)
            both()
        by = 2.0
        both()
        monkeypatch.setitem(globals(), "RATE", 3.0)


def test_a_state_that_was_there_has_its_program() -> None:
    model, plain, x = twins()
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        for scale in (1.0, 2.0, 1.0, 2.0):
            model.scale = plain.scale = scale
            torch.testing.assert_close(fast(x), plain(x))
        graphs = tessera.explain(fast).graphs
        assert [g.recompile_reason for g in graphs] == ["", "Model.scale was 1.0, is 2.0"]


class Counting(Model):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape[0]
        self.calls += 1
        return super().forward(x)


def test_what_a_forward_changes_is_told() -> None:
    _, _, x = twins()
    model = Counting().double()
    model.calls = 0
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        fast(x)
        assert len(tessera.explain(fast).graphs) == 1
        with pytest.warns(UserWarning, match="Counting.calls was 1, is .: the forward changes it"):
            fast(x[:2])
        fast(x)


class Casting(nn.Module):
    """Under autocast its product is of bfloat16, and the sum is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            full = self.layer(x)
        return self.layer(x) + torch.ones(4) + full


def test_modes_around_calls() -> None:
    torch.manual_seed(0)
    model, x = Casting(), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    with pretended({"dp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        for _ in range(2):
            torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=0)
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype=dtype):
                    torch.testing.assert_close(fast(x), plain(x), rtol=0, atol=0)
        torch.set_default_dtype(torch.float64)
        try:
            assert fast(x).dtype == plain(x).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(tessera.explain(fast).graphs) == 4
        step = tessera.train_step(
            model, lambda m, x: m(x).float().square().mean(), torch.optim.SGD(model.parameters(), lr=0.1),
            executors="aten",
        )  # fmt: skip
        by = torch.optim.SGD(plain.parameters(), lr=0.1)
        for enabled in (False, True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                got, want = step(x), plain(x).float().square().mean()
            want.backward()
            by.step()
            by.zero_grad()
            torch.testing.assert_close(got, want.detach())


HOOKED = {
    "weight": lambda m: m.first.weight.register_hook(lambda grad: grad * 2),
    "accumulated": lambda m: m.last.bias.register_post_accumulate_grad_hook(lambda p: None),
    "module": lambda m: m.last.register_full_backward_hook(lambda module, grads, given: None),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_gradients(name: str, late: bool) -> None:
    """In a step nobody would call them; beside jit, autograd does, but for those inside."""
    says = {"weight": "first.weight: expected no hook", "accumulated": "last.bias", "module": "last: .* backward hooks"}
    model, plain, x = twins()
    with pretended({"dp": 1}) as mesh:
        tessera.shard(model, mesh, "zero2")
        step = tessera.train_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), executors="aten"
        )
        fast = tessera.jit(model, executors="aten")
        if late:
            step(x), fast(x)
        for m in (model, plain):
            handle = HOOKED[name](m)
        with pytest.raises(CaptureError, match=says[name]):
            step(x)
        if name == "module":
            with pytest.raises(CaptureError, match=says[name]):
                fast(x)
        elif not late:
            fast(x).sum().backward()
            plain(x).sum().backward()
            torch.testing.assert_close(model.first.weight.grad.to_local(), plain.first.weight.grad)
        assert handle is not None
