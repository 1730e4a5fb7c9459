"""Every private symbol of PyTorch that Tessera uses is in the PyTorch that is installed, and does what it is used for.

`make internals` runs this on each version of PyTorch that Tessera supports: nothing here needs more than PyTorch.
"""

from __future__ import annotations

import importlib
import pkgutil
import types

import pytest
import torch
from torch.autograd import forward_ad

import tessera.torch_internals as torch_internals
from tessera.torch_internals import (
    autograd,
    dispatch,
    dynamo,
    fake,
    frames,
    functorch,
    lookup,
    memory,
    modules,
    operators,
    pytree,
    shapes,
)
from tessera.util.errors import InternalsError

SAMPLES = "samples"  # importing them takes seconds, which nobody pays who only collects tests
for _module in pkgutil.iter_modules(torch_internals.__path__):
    if _module.name != SAMPLES:
        importlib.import_module(f"{torch_internals.__name__}.{_module.name}")
for _name in shapes.LATE:
    getattr(shapes, _name)

LINEAR = torch.ops.aten.linear.default


@pytest.mark.parametrize("path", sorted(lookup.SYMBOLS))
def test_this_version_has(path: str) -> None:
    known = lookup.SYMBOLS[path]
    assert known.there == known.expected, f"{path}, for {known.why}"


def test_this_version_has_samples_of_operators() -> None:
    importlib.import_module(f"{torch_internals.__name__}.{SAMPLES}")
    known = [symbol for symbol in lookup.SYMBOLS.values() if symbol.why == "trying every operator"]
    assert len(known) == 3 and all(symbol.there == symbol.expected for symbol in known), known


def test_a_missing_symbol_names_itself_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "SYMBOLS", {})
    missing = lookup.symbol("torch._C._no_such_thing", "this test")
    told = r"has no torch\._C\._no_such_thing, which Tessera needs for this test"
    with pytest.raises(InternalsError, match=told):
        missing(1)
    with pytest.raises(InternalsError, match=told):
        missing.SKIP  # noqa: B018
    with pytest.raises(InternalsError, match=told):
        isinstance(1, missing)
    with pytest.raises(InternalsError, match=told):
        types.new_class("Mode", (missing,))
    with pytest.raises(InternalsError, match=told):
        lookup.owner_of("torch._C._no_such_thing", "this test")
    assert lookup.symbol("torch._no_such_module.thing", "this test", otherwise=None) is None
    assert not any(known.there for known in lookup.SYMBOLS.values()) and len(lookup.SYMBOLS) == 2


def test_names_are_handed_on_as_they_are() -> None:
    assert operators.OpOverload is type(LINEAR) and autograd.set_grad_enabled is torch._C._set_grad_enabled
    assert dispatch.BelowADInplaceOrView is torch._C._AutoDispatchBelowADInplaceOrView
    assert memory.empty_cpu is torch._C._dynamo.guards._empty_strided_cpu


def test_operators() -> None:
    assert (operators.op_name(LINEAR), operators.overload_name(LINEAR)) == ("linear", "default")
    assert [a.name for a in operators.op_schema(LINEAR).arguments] == ["input", "weight", "bias"]
    assert operators.aten_name(LINEAR) == "linear" and operators.aten_name(len) == ""
    assert operators.raw_callable(len) is len and operators.raw_callable(LINEAR) is not LINEAR
    assert operators.can_decompose(LINEAR) and not operators.can_decompose(torch.ops.aten.mm.default)
    assert operators.has_kernel("aten::linear", "CompositeImplicitAutograd")
    assert "aten::linear" in operators.all_operator_names()


def test_tensors() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    v = x[1:]
    assert memory.storage_id(x) == memory.storage_id(v) == memory.memory_of(v) != memory.storage_id(x.clone())
    assert memory.storage_uses(x) > memory.storage_uses(torch.randn(3))
    assert memory.empty_cpu((2, 3), (1, 2), torch.float64).stride() == (1, 2)
    assert autograd.is_tensor_view(v) and not autograd.is_tensor_view(x)
    before = autograd.version_of(x)
    v.zero_()
    assert autograd.version_of(x) == before + 1
    assert autograd.lazy_conj(x).is_conj() and autograd.lazy_neg(x).is_neg()


def test_autograd() -> None:
    seen = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ANN001, ANN205
            return x.sum(), x.double()

        @staticmethod
        def backward(ctx, *cts):  # noqa: ANN001, ANN002, ANN205
            seen.extend((tuple(m.shape), m.dtype, m.device.type) for m in autograd.result_metadata(ctx))
            return cts[0].expand(3)

    leaf = torch.randn(3, requires_grad=True)
    assert not autograd.has_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert autograd.has_hooks(leaf)
    Two.apply(leaf)[0].backward()
    assert seen == [((), torch.float32, "cpu"), ((3,), torch.float64, "cpu")]
    assert issubclass(Two, autograd.SingleLevelFunction)
    assert getattr(forward_ad, autograd.DUAL_LEVEL) == -1
    with forward_ad.dual_level():
        assert getattr(forward_ad, autograd.DUAL_LEVEL) == 0


def test_dispatch_and_fake_tensors() -> None:
    assert not dispatch.is_key_excluded(dispatch.DispatchKey.AutogradFunctionality)
    with dispatch.BelowAutograd():
        assert dispatch.is_key_excluded(dispatch.DispatchKey.AutogradFunctionality)
    assert not dispatch.is_key_included(dispatch.parse_key("VmapMode"))
    functorch.vmap_level_up()
    try:
        assert dispatch.is_key_included(dispatch.parse_key("VmapMode"))
    finally:
        functorch.vmap_level_down()
    mode = fake.FakeTensorMode(shape_env=shapes.ShapeEnv())
    assert fake.active_fake_mode() is None
    with mode:
        x = torch.empty(3)
        assert fake.active_fake_mode() is mode and fake.detect_fake_mode([x]) is mode
    assert isinstance(x, fake.FakeTensor) and not functorch.functorch_interpreters() and functorch.level_count() == 0


def test_symbolic_sizes() -> None:
    sizes: list[torch.SymInt] = []

    def backend(gm: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        sizes.extend(s for s in inputs if isinstance(s, torch.SymInt))
        return gm

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.randn(5))
    torch.compiler.reset()
    [size] = sizes
    assert shapes.unreplaced_expression(size) == size.node.expr
    assert int(shapes.symbol_values(size.node.shape_env)[size.node.expr]) == 5
    assert eval(shapes.PythonPrinter().doprint(size.node.expr + 1), {str(size.node.expr): 5}) == 6


def test_modules_and_optimizers() -> None:
    module, kept = torch.nn.BatchNorm1d(2), []
    assert set(modules.own_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked"}
    module.register_forward_hook(lambda *_: kept.append(1))
    assert [kind for kind, hooks in modules.hooks_of(module).items() if hooks] == ["_forward_hooks"]
    assert len(modules.hooks_of_all_modules()) == 4 and not any(modules.hooks_of_all_modules().values())
    optimizer = torch.optim.SGD(module.parameters())
    assert not modules.has_step_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert modules.has_step_hooks(optimizer)


def test_what_dynamo_holds_can_be_looked_at_and_freed() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    torch.compile(f, backend="eager")(torch.randn(3))
    [entry] = [e for e in dynamo.all_entries() if e in frames.cache_entries(f.__code__)]
    assert any("check_tensor" in part or "TENSOR_MATCH" in part for part in entry.guard_manager.code_parts)
    del entry
    dynamo.forget(f.__code__)
    assert not frames.cache_entries(f.__code__) and dynamo.recompile_reason() == ""


def test_what_follows_a_break_in_a_loop_is_freed_once() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1:
            x = x / 2
        return x

    torch.compile(f, backend="eager")(torch.full((3,), 8.0))
    resumed = list(dynamo._resumed.cache.get(f.__code__).values())
    assert resumed
    dynamo.forget(f.__code__)
    assert not any(frames.cache_entries(code) for code in (f.__code__, *resumed))


def test_nested_structures() -> None:
    tree = {"a": [1, (2, 3)], "b": None}
    leaves, spec = pytree.tree_flatten(tree)
    assert pytree.tree_unflatten(leaves, spec) == tree and isinstance(spec, pytree.TreeSpec)
    assert pytree.broadcast_to_and_flatten((0, None), pytree.tree_structure((1, 2)), is_leaf=lambda d: d is None) == [
        0,
        None,
    ]


def test_levels_of_every_transform_are_left() -> None:
    f = torch._C._functorch
    for enter in (f._grad_increment_nesting, f._jvp_increment_nesting, lambda: f._vmap_increment_nesting(2, "error")):
        enter()
    f._func_increment_nesting(True)
    assert functorch.level_count() == 4
    functorch.pop_levels(1)
    assert functorch.level_count() == 1
    functorch.pop_levels(0)
    assert functorch.level_count() == 0
