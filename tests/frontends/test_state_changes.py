"""What changes between calls of something compiled: the next call is eager's, values and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module

import tessera


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("shift", torch.ones(4))
        self.flag, self.factor, self.terms, self.scale = True, 0.5, [1.0], None

    def forward(self, x):
        h = self.first(x).tanh() * self.factor + self.shift
        h = h.sin() if self.flag else h.cos()
        for term in self.terms:
            h = h + term
        for layer in self.layers:
            h = layer(h)
        return h if self.scale is None else h * self.scale


def attributes(m):
    m.flag = False
    yield
    m.factor, m.scale = 2.5, 3
    yield
    m.terms.append(2.0)
    yield
    m.scale = None
    yield


def parameters(m):
    m.first.weight = nn.Parameter(torch.ones(4, 4))
    yield
    m.first.weight.data = torch.arange(16.0).view(4, 4).t()
    yield
    m.first.bias.requires_grad_(False)
    yield
    m.first.bias = None
    yield
    m.layers[0].weight = m.first.weight
    yield
    m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()})
    yield


def modules(m):
    m.layers.append(nn.Linear(4, 4, bias=False))
    yield
    m.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    yield
    m.register_buffer("shift", torch.zeros(1))
    yield
    nn.utils.parametrizations.weight_norm(m.layers[0])
    yield


def forward_hooks(m):
    handle = m.first.register_forward_hook(lambda module, args, out: out * 2)
    yield
    before = m.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    yield
    handle.remove()
    yield
    before.remove()
    yield


def backward_hooks(m):
    handle = m.layers[0].register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    yield
    handle.remove()
    yield
    handle = m.first.weight.register_hook(lambda g: g * 2)
    yield
    handle.remove()
    yield


CHANGES = (attributes, parameters, modules, forward_hooks, backward_hooks)


def gradients(call, model, x):
    model.zero_grad()
    out = call(x)
    out.sin().sum().backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_model(change):
    model, x = Net(), torch.randn(3, 4)
    other = copy.deepcopy(model)
    fast = tessera.jit(other)
    torch.testing.assert_close(gradients(fast, other, x), gradients(model, model, x))
    for seed, _ in enumerate(alike(change(model), change(other))):
        torch.testing.assert_close(gradients(fast, other, x), gradients(model, model, x), msg=f"change {seed}")


def alike(*generators):
    """Steps of all of them, with the same random numbers."""
    for seed in range(100):
        for generator in generators:
            torch.manual_seed(seed)
            if next(generator, generator) is generator:
                return
        yield


@pytest.mark.parametrize("change", [attributes, forward_hooks, backward_hooks], ids=lambda c: c.__name__)
def test_a_training_step(change):
    def loss_fn(m, x):
        return m(x).square().mean()

    model, x = Net(), torch.randn(3, 4)
    other = copy.deepcopy(model)
    slow, ours = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other))
    fast = tessera.train_step(other, loss_fn, ours)

    def check_step():
        slow.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        slow.step()
        torch.testing.assert_close(fast(x), loss.detach())
        torch.testing.assert_close(other.state_dict(), model.state_dict())

    check_step()
    for _ in alike(change(model), change(other)):
        check_step()


EVERYWHERE = (
    (every_module.register_module_forward_hook, lambda m, args, out: out * 2),
    (every_module.register_module_forward_pre_hook, lambda m, args: (args[0] + 1,)),
    (every_module.register_module_full_backward_hook, lambda m, into, out: (into[0] * 2,)),
    (every_module.register_module_full_backward_pre_hook, lambda m, out: (out[0] * 2,)),
)


@pytest.mark.parametrize(("register", "hook"), EVERYWHERE, ids=lambda f: f.__name__)
def test_a_hook_for_all_modules(register, hook):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    fast = tessera.jit(model)
    plain = gradients(model, model, x)
    torch.testing.assert_close(gradients(fast, model, x), plain)
    handle = register(hook)
    try:
        torch.testing.assert_close(gradients(fast, model, x), gradients(model, model, x))
    finally:
        handle.remove()
    torch.testing.assert_close(gradients(fast, model, x), plain)


def test_a_held_tensor_that_comes_to_require_gradients() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held, self.row = torch.ones(2, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.held * x
            self.held[0].copy_(self.row)
            return before

    model = Memory()
    fast = tessera.jit(model)
    assert not fast(torch.ones(3)).requires_grad
    assert model.held.requires_grad
    assert fast(torch.ones(3)).requires_grad
