"""Whatever changes what is compiled makes another key; what changes nothing does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cached import called, counting, forget, trained
from planted import own_pipelines, plant
from torch import nn
from torch.utils import _pytree as pytree

import tessera
from tessera.executors.base import in_order, register, unregister
from tessera.executors.register import unregister_executor
from tessera.frontends.captured import Captured
from tessera.ir import fake
from tessera.ir.match import P, Table, Var, rewrite
from tessera.ir.trace import Trace
from tessera.pipeline.lists import remove
from tessera.store.environment import environment, own_text, switches
from tessera.store.key import key_of
from tessera.util.errors import Unserial


def scaled(x: torch.Tensor, n: float = 2.0) -> torch.Tensor:
    return torch.softmax(x * n, -1)


def outcome(fn: Callable, args: tuple, around: AbstractContextManager | None = None, **options: object) -> str:
    forget()
    with around or nullcontext(), counting() as found:
        called(fn, args, **options)
    return {(1, 0): "stored", (0, 1): "loaded", (0, 0): "neither"}[found["stored"], found["loaded"]]


X = torch.ones(4, 6)


def test_the_same_again() -> None:
    assert outcome(scaled, (X,)) == "stored"
    assert outcome(scaled, (X.clone(),)) == "loaded"
    assert outcome(scaled, (X + 1,)) == "loaded"  # numbers in tensors do not matter


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(4, 7),),
        (torch.ones(6, 4).t(),),
        (X.double(),),
        (X.bfloat16(),),
        (X.clone().requires_grad_(),),
        (X, 3.0),
        (torch.ones(2, 4, 6),),
    ],
    ids=["shape", "strides", "dtype", "half", "requires_grad", "constant", "dimensions"],
)
def test_arguments(args: tuple) -> None:
    outcome(scaled, (X,))
    assert outcome(scaled, args) == "stored"
    assert outcome(scaled, args) == "loaded"


@contextmanager
def set_to(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "around",
    [
        lambda: tessera.override(fused_random="on"),
        lambda: tessera.override(reinplace=False),
        lambda: tessera.override(fp8_matmul="off"),
        lambda: torch.inference_mode(),
        lambda: torch.no_grad(),
        lambda: deterministic(),
        lambda: set_to(torch.backends.cudnn, "benchmark", True),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["random", "reinplace", "fp8", "inference", "no_grad", "deterministic", "cudnn", "attention"],
)
def test_what_is_around(around: Callable[[], AbstractContextManager]) -> None:
    outcome(scaled, (X,))
    assert outcome(scaled, (X,), around()) == "stored"
    assert outcome(scaled, (X,), around()) == "loaded"
    assert outcome(scaled, (X,)) == "loaded"


@pytest.mark.parametrize(
    "options",
    [
        {"executors": "aten"},
        {"recompute": "none"},
        {"memory_budget": "1GB"},
        {"offload": "host"},
        {"dynamic": True},
        {"precision": "fp8"},
    ],  # fmt: skip
    ids=lambda o: next(iter(o)),
)
def test_options(options: dict) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2, -1)

    outcome(fn, (X,))
    assert outcome(fn, (X,), None, **options) == "stored"
    assert outcome(fn, (X,), None, **options) == "loaded"


def test_scales_of_earlier_steps_are_not_stored() -> None:
    assert outcome(scaled, (X,), None, precision=tessera.FP8(history="delayed")) == "neither"


def test_numbers_known_only_at_run_time_are_not_stored() -> None:
    assert outcome(scaled, (X, 2.5), None, dynamic=True) == "neither"


def test_tensors_in_the_program_count_by_their_numbers() -> None:
    def made(numbers: list[float]) -> Callable:
        held = torch.tensor(numbers)

        def f(x: torch.Tensor) -> torch.Tensor:
            return x * held.clone()

        return f

    assert outcome(made([1.0, 2.0]), (torch.ones(2),)) == "stored"
    assert outcome(made([1.0, 2.0]), (torch.ones(2),)) == "loaded"
    # Dynamo makes an argument of a tensor that is closed over: its numbers are read at every call
    assert outcome(made([1.0, 3.0]), (torch.ones(2),)) in ("stored", "loaded")

    def literal(numbers: str) -> Callable:
        scope: dict = {"torch": torch}
        exec(f"def f(x):\n    return x * torch.tensor({numbers})", scope)
        return scope["f"]

    assert outcome(literal("[1.0, 2.0]"), (torch.ones(2),)) == "stored"
    assert outcome(literal("[1.0, 2.0]"), (torch.ones(2),)) == "loaded"
    assert outcome(literal("[1.0, 4.0]"), (torch.ones(2),)) == "stored"


def test_large_tensors_in_the_program_are_not_compared() -> None:
    large = torch.ones(1 << 23)
    trace = tessera.trace(lambda x: x + large.sum(), X)
    captured = Captured(trace, pytree.tree_structure([None]), fake.default_mode(), 1, {}, (False,))
    with pytest.raises(Unserial, match="closes over large tensors"):
        key_of(captured, ("aten",), {})


def test_frozen_parameters() -> None:
    model = nn.Linear(4, 4)
    forget()
    trained(model, (torch.ones(2, 4),))
    model.weight.requires_grad_(False)
    forget()
    with counting() as found:
        fast = tessera.jit(model, strict=True)
        fast(torch.ones(2, 4)).sum().backward()
    assert found == {"stored": 1, "loaded": 0}


def test_lines_do_not_matter_and_are_the_callers() -> None:
    def at(line: int) -> Callable:
        scope: dict = {"torch": torch}
        text = "\n" * line + "def f(x):\n    return torch.softmax(x * 2, -1)"
        exec(compile(text, f"file_{line}.py", "exec"), scope)
        return scope["f"]

    assert outcome(at(0), (X,)) == "stored"
    forget()
    with counting() as found:
        *_, fast = called(at(7), (X,))
    assert found["loaded"] == 1
    assert "file_7.py:9" in str(tessera.stages(fast)[-1].trace) and "file_0" not in str(tessera.stages(fast)[-1].trace)


def test_a_users_executor_is_not_stored() -> None:
    tessera.register_executor("mine", {"aten.softmax": torch.softmax})
    try:
        assert outcome(scaled, (X,)) == "neither"
    finally:
        unregister_executor("mine")
    assert outcome(scaled, (X,)) == "stored"


def test_a_users_operator_is_not_stored_and_harms_nobody_else() -> None:
    double = tessera.register_operator("store_test_double", lambda x: x * 2, like=0)
    tessera.register_executor("store_test", {"tessera_user.store_test_double": lambda x: x * 2})
    try:
        assert outcome(lambda x: double(x) + 1, (X,)) == "neither"
        assert outcome(scaled, (X,)) == "stored"
    finally:
        unregister_executor("store_test")


def test_a_users_pass_is_not_stored_and_no_stored_program_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_softmax(trace: Trace) -> Trace:
        return rewrite(trace, Table([(P("aten.softmax", Var("x"), Var("dim")), lambda x, dim: x)]))

    assert outcome(scaled, (X,)) == "stored"
    with monkeypatch.context() as patch:
        plant(patch, no_softmax)
        assert outcome(scaled, (X,)) == "neither"
    assert outcome(scaled, (X,)) == "loaded"
    own_pipelines(monkeypatch)
    remove("cse")
    assert outcome(scaled, (X,)) == "stored"


def test_an_executor_with_one_part_of_a_users() -> None:
    tile = next(e for e in in_order(["tile"]) if e.name == "tile")
    register(replace(tile, name="half_mine", compile=lambda body: None))  # type: ignore[arg-type]
    try:
        assert outcome(scaled, (X,), None, executors=["half_mine", "aten"]) == "neither"
    finally:
        unregister("half_mine")


def test_the_flag() -> None:
    with tessera.override(program_cache=False):
        assert outcome(scaled, (X,)) == "neither"


def test_environment_know_this_machine() -> None:
    told = environment([torch.device("cpu")])
    assert own_text() in told["process"] and torch.__version__ in str(told["process"])  # type: ignore[operator]
    assert "llvmlite" in str(told["targets"]) and told["flags"]["reinplace"] is True  # type: ignore[index]
    assert not any("Error" in answer for answer in switches().values()), switches()


def test_sources_that_changed_or_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unserial, match="not here"):
        own_text(tmp_path)
    (tmp_path / "passes.py").write_text("x = 1")
    with pytest.raises(Unserial, match=r"passes.py of Tessera was changed"):
        own_text(tmp_path, 0.0)
    before = own_text(tmp_path, time.time() + 60)
    (tmp_path / "passes.py").write_text("x = 2")
    assert own_text(tmp_path, time.time() + 61) != before
