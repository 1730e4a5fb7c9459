"""Programs of torch.export: every size of the exported range, and arguments that do not fit."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, ExportedProgram, export
from torch.testing import assert_close

import tessera
from tessera.frontends.export import capture_export
from tessera.frontends.export_model import exported_program, recorded_program
from tessera.frontends.export_ranges import Sizes, narrower
from tessera.torch_internals import pytree
from tessera.util.config import override
from tessera.util.errors import CaptureError, InputError

X = torch.linspace(-1, 1, 12).view(3, 4)
ROWS = Dim("rows", min=2, max=16)


class Model(nn.Module):
    """A layer, a norm, a buffer, and what `how` makes of them."""

    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.how = nn.Linear(4, 4), nn.BatchNorm1d(4), how
        self.register_buffer("calls", torch.zeros(()))
        self.table = torch.arange(4.0)

    def forward(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN201
        return self.how(self, *args, **kwargs)


def counts(m: Model, x: Tensor) -> Tensor:
    m.calls += 1
    return m.norm(m.linear(x)) * m.calls


def writes(m: Model, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y.add_(1)
    return m.linear(x) * y[:, None], y


def writes_what_it_holds(m: Model, x: Tensor, calls: Tensor) -> Tensor:
    """An argument is called as a buffer is."""
    with torch.no_grad():
        m.linear.bias.mul_(2)
    m.calls.sub_(1)
    calls.add_(m.calls)
    return m.linear(x) * calls


@torch.library.custom_op("exported_tests::bump", mutates_args=("x", "y"))
def bump(x: Tensor, y: Tensor, by: int) -> Tensor:
    x.add_(by)
    y.mul_(by)
    return x + y


@bump.register_fake
def _(x: Tensor, y: Tensor, by: int) -> Tensor:
    return torch.empty_like(x)


def operator_that_writes(m: Model, x: Tensor) -> Tensor:
    part = x[:, 0].clone()
    with torch.no_grad():
        return m.linear(x) * bump(m.calls, part[1:2].view(()), 3) + part.sum()


def modes(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = m.linear(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = m.linear(x)
    return m.linear(x) + fixed + rough


def chooses(m: Model, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: m.linear(x), lambda x: x - 1, (x,))


def nested(m: Model, tree: dict, *, scale: Tensor, other: Tensor) -> dict:
    return {"first": m.linear(tree["a"]) * scale, "rest": [tree["b"][0] + other, (tree["b"][1],)]}


def sizes(m: Model, x: Tensor) -> tuple:
    return x.shape[0] * 2, x.reshape(-1), x.new_zeros(x.shape[0], 2)


def known_at_run_time(m: Model, x: Tensor) -> Tensor:
    n = x[0, 0].abs().int().item()
    torch._check(n >= 0)
    torch._check(n < 10)
    return torch.ones(n) * x[0, 1]


TREE = ({"a": X, "b": [X, X * 2]},), {"scale": torch.tensor(2.0), "other": X + 1}
PROGRAMS: dict[str, tuple[Callable, tuple, dict]] = {
    "table": (lambda m, x: m.linear(x).relu() + m.table, (X,), {}),
    "counts": (counts, (X,), {}),
    "writes": (writes, (X, torch.ones(3)), {}),
    "writes what it holds": (writes_what_it_holds, (X, torch.ones(())), {}),
    "an operator that writes": (operator_that_writes, (X,), {}),
    "modes": (modes, (X,), {}),
    "chooses": (chooses, (X + 1,), {}),
    "nested": (nested, *TREE),
    "gives arguments back": (lambda m, x: (x, m.linear.weight, x.view(-1), m.calls), (X,), {}),
    "numbers": (lambda m, x, n, _: (m.linear(x) * n, n, None), (X, 3, None), {}),
    "known at run time": (known_at_run_time, (X * 5,), {}),
}


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    with override(strict=True):
        yield


def copied(tree: object) -> object:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def exported(how: Callable, args: tuple, kwargs: dict | None = None, **options: object) -> ExportedProgram:
    return export(Model(how), copied(args), copied(kwargs or {}), **options)  # type: ignore[arg-type]


def same_as_eager(fast: Callable, eager: Callable, args: tuple, kwargs: dict) -> None:
    (args, kwargs), (others, named) = copied((args, kwargs)), copied((args, kwargs))  # type: ignore[misc]
    want, got = eager(*args, **kwargs), fast(*others, **named)
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    assert_close(got, want)
    assert_close(others, args)  # what was written
    wanted = [x.requires_grad for x in pytree.tree_leaves(want) if isinstance(x, Tensor)]
    assert [x.requires_grad for x in pytree.tree_leaves(got) if isinstance(x, Tensor)] == wanted


@pytest.mark.parametrize("lifted", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name: str, lifted: bool) -> None:
    torch._dynamo.reset()
    how, args, kwargs = PROGRAMS[name]
    program, other = (exported(how, args, kwargs) for _ in range(2))
    fast, eager = tessera.jit(program if lifted else program.module()), other.module()
    for _ in range(2):
        same_as_eager(fast, eager, args, kwargs)


def test_a_program_from_a_file_and_its_gradients() -> None:
    file = io.BytesIO()
    torch.export.save(exported(lambda m, x: m.norm(m.linear(x)), (X,), dynamic_shapes=(({0: ROWS},),)), file)
    one, other = (torch.export.load(io.BytesIO(file.getvalue())) for _ in range(2))
    eager = other.module()

    def observed(call: Callable, weights: list[nn.Parameter]) -> tuple[Tensor, ...]:
        out = call(torch.cat([X, X]))
        return out.detach(), *torch.autograd.grad(out.square().sum(), weights)

    got = observed(tessera.jit(one), list(one.parameters()))
    assert_close(got, observed(eager, list(eager.parameters())))


def test_gradients_follow_the_call() -> None:
    """Of arguments and of weights, in the grad mode and with the flags that hold when the program is called."""
    program = exported(lambda m, x: m.linear(x).relu(), (X,))
    with torch.no_grad():
        fast = tessera.jit(program)
    weights, eager = list(program.parameters())[:2], program.module()
    x = X.clone().requires_grad_()
    for flag in (True, False):
        weights[0].requires_grad_(flag)
        wanted = [t for t in (x, *weights) if t.requires_grad]
        got, want = (torch.autograd.grad(call(x).square().sum(), wanted) for call in (fast, eager))
        assert_close(got, want)
    with torch.no_grad():
        assert not fast(x).requires_grad
    weights[1].requires_grad_(False)
    assert not fast(X).requires_grad and fast(x).requires_grad


def test_what_has_no_derivative_runs_as_pytorch_runs_it() -> None:
    def turns(m: Model, x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, m.linear(x)), (torch.tensor(0), x))[1]

    program = exported(turns, (X,))
    with override(strict=False), pytest.warns(UserWarning, match="runs it eagerly"):
        fast = tessera.jit(program)
    assert "while_loop" in tessera.explain(fast).eager[0].eager_reason
    same_as_eager(fast, program.module(), (X,), {})
    with torch.no_grad():
        assert_close(fast(X), program.module()(X))
    assert len(tessera.explain(fast).graphs) == 2 and len(tessera.explain(fast).eager) == 1


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {"known at run time"}))
def test_a_program_in_core_operators(name: str) -> None:
    """Functional: what it writes, to buffers, parameters and arguments, is given as further results."""
    torch._dynamo.reset()
    how, args, kwargs = PROGRAMS[name]
    program, other = (exported(how, args, kwargs).run_decompositions() for _ in range(2))
    # PyTorch loses the no_grad around a write to a parameter on the way.
    with torch.set_grad_enabled(how is not writes_what_it_holds):
        fast, eager = tessera.jit(program), other.module()
        for _ in range(2):
            same_as_eager(fast, eager, args, kwargs)


def test_every_size_of_the_range() -> None:
    program = exported(sizes, (X,), dynamic_shapes=(({0: ROWS},),))
    fast = tessera.jit(program)
    for rows in (2, 3, 7, 16):
        same_as_eager(fast, program.module(), (torch.randn(rows, 4),), {})


def test_named_arguments_in_another_order() -> None:
    program = exported(nested, *TREE)
    (args, kwargs), fast = TREE, tessera.jit(program)
    assert_close(fast(*args, **dict(reversed(kwargs.items()))), program.module()(*args, **kwargs))


@pytest.mark.parametrize("written", [False, True])
def test_arguments_that_lie_otherwise(written: bool) -> None:
    how = (lambda m, x: x.mul_(2).sin() + 1) if written else (lambda m, x: x.sin().reshape(-1) + 1)
    program = exported(how, (X,), dynamic_shapes=(({0: ROWS},),))
    fast, eager = tessera.jit(program), exported(how, (X,), dynamic_shapes=(({0: ROWS},),)).module()
    for x in (torch.randn(4, 5).t(), torch.randn(10, 8)[::2, ::2], torch.randn(1, 4).expand(1, 4).repeat(5, 1)):
        one, other = x.clone(memory_format=torch.preserve_format), x
        assert_close(fast(one), eager(other))
        assert_close(one, other)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.randn(17, 4), torch.randn(17, 4)), "x, dimension 0: expected rows from 2 to 16, got 17"),
        (
            (torch.randn(3, 5), torch.randn(3, 4)),
            "x, dimension 1: expected 4, .* exported for, got 5",
        ),
        ((torch.randn(3, 4), torch.randn(5, 4)), "y, dimension 0: expected rows = 3, the size of another .*, got 5"),
        ((torch.randn(3, 4).double(), torch.randn(3, 4)), r"x: expected float32\[rows, 4\] on cpu, got float64"),
        ((torch.randn(3), torch.randn(3, 4)), r"x: expected float32\[rows, 4\] on cpu, got float32\[3\]"),
        ((torch.randn(3, 4), 2.0), r"y: expected a tensor, float32\[rows, 4\] on cpu, got 2.0"),
        ((torch.randn(3, 4),), "expected arguments of structure"),
    ],
    ids=["too large", "another size", "sizes differ", "dtype", "dimensions", "a number", "one is missing"],
)
def test_arguments_that_do_not_fit(args: tuple, message: str) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    fast = tessera.jit(export(Both(), (X, X), dynamic_shapes=({0: ROWS}, {0: ROWS})))
    with pytest.raises(InputError, match=message):
        fast(*args)


def test_a_number_that_it_was_not_exported_for() -> None:
    fast = tessera.jit(exported(*PROGRAMS["numbers"]))
    with pytest.raises(InputError, match="expected 3, which the program was exported for, got 4"):
        fast(X, 4, None)


def test_a_size_that_is_computed_from_another() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + torch.cat([y, y])

    fast = tessera.jit(export(Halved(), (torch.ones(6), torch.ones(3)), dynamic_shapes=({0: 2 * ROWS}, {0: ROWS})))
    assert_close(fast(torch.ones(10), torch.ones(5)), torch.full((10,), 2.0))
    with pytest.raises(InputError, match=r"x, dimension 0: expected 12, which is 2 \* rows, got 10"):
        fast(torch.ones(10), torch.ones(6))


def test_a_size_that_no_argument_has_itself() -> None:
    program = export(nn.ReLU(), (torch.ones(6),), dynamic_shapes=({0: 2 * ROWS},))
    fast = tessera.jit(program)
    assert_close(fast(torch.ones(10)), torch.ones(10))
    for n in (9, 34):
        with pytest.raises(InputError, match=rf"expected 2 \* rows with rows from 2 to 16, got {n}"):
            fast(torch.ones(n))


def test_what_a_program_claims_is_told_by_the_names_of_sizes() -> None:
    class Claims(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            count = n.item()
            torch._check(count <= x.shape[0])
            torch._check(count >= 0)
            return x[:count] * 2

    fast = tessera.jit(export(Claims(), (torch.ones(8), torch.tensor(3)), dynamic_shapes=({0: ROWS}, None)))
    assert_close(fast(torch.ones(6), torch.tensor(5)), torch.full((5,), 2.0))
    with pytest.raises(RuntimeError, match="rows = 6"):
        fast(torch.ones(6), torch.tensor(7))


def test_to_exported_and_back() -> None:
    def program(x: Tensor) -> Tensor:
        return x.sin() + 1

    exported = tessera.to_exported(program, (X,), dynamic={"x": {0: ("rows", 2, 16)}})
    assert isinstance(exported, ExportedProgram)
    fast = tessera.jit(exported)
    for rows in (2, 9):
        x = torch.randn(rows, 4)
        assert_close(fast(x), program(x))
        assert_close(exported.module()(x), program(x))
    with pytest.raises(InputError, match="expected rows from 2 to 16, got 17"):
        fast(torch.randn(17, 4))


class Resized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone().resize_(2, 2) + 1


class Replaced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(3).set_(x.clone()) + 1


@pytest.mark.parametrize("model", [Resized(), Replaced()])
@pytest.mark.parametrize("door", [tessera.export, tessera.onnx.export])
def test_a_change_of_storage_is_refused_with_the_line(model: nn.Module, door: Callable, tmp_path) -> None:
    with pytest.raises(CaptureError, match=r"changes a tensor's own storage.*test_export\.py:\d+"):
        door(model, (torch.randn(4),), tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_range_loses_its_end_where_that_is_a_case_of_its_own() -> None:
    message = (
        "Constraints violated (length)!\n  - Not all values of length = L['ids'].size()[1] in the specified range "
        "length <= 64 satisfy the generated guard L['ids'].size()[1] != 64.\n"
    )
    shapes = {"ids": {1: Dim("length", max=64)}}
    narrowed = narrower(message, Sizes(shapes), {"ids": {1: "length"}})
    assert narrowed is not None and narrowed.shapes["ids"][1].max == 63  # type: ignore[index]
    assert narrower(message, Sizes(shapes), {"ids": {1: ("length", 1, 64)}}) is None  # the user says otherwise


def test_conditions_are_arithmetic_and_nothing_else() -> None:
    def sizes(guard: str) -> Sizes | None:
        line = f"  - Not all values of n = L['x'].size()[0] in the specified range satisfy the generated guard {guard}."
        return narrower(line, Sizes({"x": {0: Dim("n")}}), {"x": {0: "n"}})

    first = sizes("L['x'].size()[0] - 1 != 1")
    assert first is not None and first.deferred and first.shapes["x"][0].min == 3  # type: ignore[index]
    line = "  - Not all values of n = L['x'].size()[0] in the specified range satisfy the generated guard "
    line += "30 <= L['x'].size()[0] and L['x'].size()[0] <= IntInfinity()"  # PyTorch ends this one without a period
    far = narrower(line, Sizes({"x": {0: Dim("n")}}), {"x": {0: "n"}})
    assert far is not None and far.shapes["x"][0].min == 30  # type: ignore[index]
    for guard in ("L['().__class__'].size()[0] > 1", "().__class__ != 1", "n.real > 0", "'a' < 'b'", "[n][0] > 0"):
        assert sizes(guard) is None


def test_lines_are_the_users_also_where_pytorchs_modules_run() -> None:
    model = Model(lambda m, x: m.linear(x).relu())
    with torch.no_grad():
        exported = capture_export(exported_program(model, (X,), {}, None)[0])
    recorded = recorded_program(model, (X,), {}, None, "model")
    assert recorded is not None
    for captured in (exported.captured, recorded[0].captured):
        linear, relu = captured.trace.equations
        assert linear.source.module == "linear" and linear.source.file == relu.source.file == __file__
        assert linear.source.line == relu.source.line == model.how.__code__.co_firstlineno
    alone = capture_export(exported_program(nn.Sequential(nn.Linear(4, 4)), (X,), {}, None)[0])
    assert alone.captured.trace.equations[0].source.file.endswith("linear.py")
