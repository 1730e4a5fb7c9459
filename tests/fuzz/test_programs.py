"""A few random programs of every kind at each run, many under `-m sweep`; `python -m tests.fuzz.run` runs any number.

A failure prints the program, made small, with its kind and seed: `--replay SEED --kind KIND` runs it again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from .judge import Verdict, judge
from .programs import KINDS, kind_of, make
from .run import one, sweep
from .runs import compared, run
from .text import Block, render, size, smaller
from .ways import EAGERLY


def check_programs(seeds: range, kind: str) -> None:
    """In this process: the tests of a worker share what PyTorch and Tessera have to load."""
    same = 0
    for seed in seeds:
        verdict, text = one(seed, kind)
        assert verdict.outcome != "wrong", f"{kind} {seed}: {verdict.reason}\n{text}"
        same += verdict.outcome == "same"
    assert same >= 0.4 * len(seeds), f"only {same} of {len(seeds)} programs could be compared"


@pytest.mark.parametrize(
    ("kind", "count"), [("functional", 40), ("jit", 25), ("tile", 8), ("backend", 6), ("transform", 14), ("train", 7)]
)
def test_programs(kind: str, count: int) -> None:
    check_programs(range(count), kind)


@pytest.mark.sweep
def test_many_programs() -> None:
    report = sweep([(seed, kind_of(seed)) for seed in range(1000, 3000)], jobs=2)
    texts = [f"{f['kind']} {f['seed']}: {f['reason']}\n{f['text']}" for f in report.failures]
    assert not texts, "\n\n".join(texts[:5])


# --- the programs themselves ---


def test_a_seed_always_gives_the_same_program() -> None:
    for kind in KINDS:
        assert [make(s, kind).text for s in range(5)] == [make(s, kind).text for s in range(5)]


def test_programs_cover_what_they_should() -> None:
    text = "\n".join(make(seed, "jit").text for seed in range(150))
    wanted = (
        "no_grad() enable_grad() requires_grad_() register_hook backward( for if else: .detach() copy_( masked_fill_("
        " fill_diagonal_( scatter_( out= as_strided( unbind( split( expand( checkpoint( Scale.apply( Gate.apply("
        " special=True dtype=i64 M(nn.Module) register_buffer m.eval() nn.Parameter .item() keep=True"
        " body Cube.apply( Over.apply( load_state_dict deepcopy"
    )
    assert not [word for word in wanted.split() if word not in text]


PROGRAM = """
def program(x):
    y = x * 2
    z = y + 1
    return y
def scenario():
    x = t(3, seed=1)
    f = compiled(program)
    out = f(x)
    see(out=out, x=x)
"""


def test_what_is_right_is_the_same_and_what_is_not_is_found() -> None:
    assert judge(PROGRAM, "jit").outcome == "same"

    def wrong(fn: Callable) -> Callable:
        return lambda *args: fn(*args) * 1.5

    eager = run(PROGRAM, EAGERLY)
    assert "expected" in compared(eager, run(PROGRAM, (wrong, None)), PROGRAM, "jit")
    assert "memory" in compared(eager, run(PROGRAM, (lambda fn: lambda x: x.copy_(fn(x)), None)), PROGRAM, "jit")
    assert not compared(eager, run(PROGRAM, EAGERLY), PROGRAM, "jit")


DRAWS = """
def program(x):
    return F.dropout(x, 0.5)
def scenario():
    x = t(50, seed=1)
    out = T.jvp(program, (x,), (x,))
    see(out=out, x=x)
"""
WRITES_NARROW = """
def program(x):
    y = torch.ones(3)
    y[...] = x
    return y
def scenario():
    x = t(3, seed=1)
    out = T.jacfwd(program, argnums=(0,))(x), T.jvp(program, (x,), (x,))
    see(out=out, x=x)
"""
MULTIPLIES_INFINITY = """
def program(x):
    return (x.prod(), x.cumprod(0))
def scenario():
    x = torch.tensor([inf, 2.0, 3.0])
    out, pull = T.vjp(program, x)
    out = out, pull(tuple(torch.ones_like(o) for o in out)), T.jacrev(lambda x: (x.prod(),), argnums=(0,))(x)
    see(out=out, x=x)
"""
MULTIPLIES_TWICE = """
def program(x, w):
    y = x @ w
    y[0] = 1
    return y, (x @ w) * 2
def scenario():
    f = compiled(program)
    x, w = t(4, 4, seed=253, special=True), t(4, 4, seed=1).requires_grad_()
    out = f(x, w)
    backward(out)
    see(out=out, w=w)
"""
RECOMPUTES = """
def program(x):
    y = x.flip(0)
    y.sin_()
    return [x, y[:-1]]
def scenario():
    f = compiled(program)
    x = t(3, seed=154).requires_grad_()
    out = f(x)
    with torch.no_grad():
        out[0].add_(1)
    backward(out)
    see(x=x)
"""
RUNS_AGAIN = """
def program(x, w):
    y = checkpoint(lambda z: (z * w).exp(), x, use_reentrant=False)
    w.clamp_(-1, 1)
    return y.sum()
def scenario():
    f = compiled(program)
    x, w = t(4, seed=38).requires_grad_(), t(4, seed=144)
    backward(f(x, w))
    see(x=x)
"""
READS_NO_PRODUCT = """
def program(x, w):
    y = F.linear(x, w)
    return x * 2
def scenario():
    f = compiled(program)
    x, w = t(3, 3, seed=1, dtype=f32), t(3, 3, seed=2)
    see(out=f(x, w))
"""


CANCELS = """
def program(x):
    return torch.atan2(x, x * torch.softmax(x * 2.0, 1)).t()
def scenario():
    f = compiled(program)
    x = t(4, 4, seed=401, dtype=bf16).requires_grad_()
    out = f(x)
    backward(out)
    see(x=x)
"""
HANDS_ON_NONE = """
def program(x, y):
    v, w = Gate.apply(x, y)
    a, b = Over.apply(v * 1, y)
    return a, b
def scenario():
    f = compiled(program)
    x, y = t(3, seed=1).requires_grad_(), t(3, seed=2)
    out = f(x, y)
    backward(out, 1)
    see(x=x)
"""
MAKES_ZEROS = """
def program(x, y):
    x.mul_(2)
    return y * 3
def scenario():
    f = compiled(program)
    x, y = t(3, seed=1).requires_grad_(), t(3, seed=2).requires_grad_()
    backward(f(Scale.apply(x, 0.5), y))
    see(x=x)
"""
HIDES_A_WRITE = """
def program(x, w):
    v = x.data
    out = v * w
    x.copy_(v.exp())
    return out
def scenario():
    f = compiled(program)
    x, w = t(3, seed=1).requires_grad_() * 1, t(3, seed=2).requires_grad_()
    backward(f(x, w))
    see(w=w)
"""
FILLS_INTEGERS = """
def program(x, x1):
    v = x.type(i64)
    v[:-1][...] = x1
    return v
def scenario():
    f = compiled(program)
    see(out=f(t(4, seed=1), t(seed=2).requires_grad_()))
"""
INDEXES_IN_VAIN = """
def program(x):
    v = torch.zeros_like(x)
    v[torch.tensor([3, 3])] += 3
    return x * v.shape[0]
def scenario():
    f = compiled(program)
    see(out=f(t(3, seed=1)))
"""
HOOKS_IN_TURN = """
def program(x, w):
    return w * 2, x * 3
def scenario():
    f = compiled(program)
    x, w = t(3, seed=1).requires_grad_(), t(3, seed=2).requires_grad_()
    w.register_hook(note)
    x.register_hook(note_half)
    backward(f(x, w))
    backward(f(x, w), 0)
    see(x=x, w=w)
"""
BEGINS_NOWHERE = """
def program(x):
    y = x**3
    z = y[None]
    z.mul_(2)
    return z, y[1:, :1]
def scenario():
    f = compiled(program)
    see(out=f(t(4, 2, seed=1).t()[1:]))
"""

KINKS_AT_NAN = """
def program(x):
    y = x * x / x.detach()
    return F.hardtanh(y)
def scenario():
    x = t(3, seed=1) * 0
    v = torch.cos(x)
    out = T.jvp(lambda a: T.jvp(lambda b: outs(program(b)), (a,), (v,))[1], (x,), (v,))
    see(out=out)
"""


@pytest.mark.parametrize(
    ("text", "kind", "outcome"),
    [
        (DRAWS, "transform", "same"),
        (WRITES_NARROW, "transform", "beyond"),
        (MULTIPLIES_INFINITY, "transform", "beyond"),
        (MULTIPLIES_TWICE, "jit", "merged"),
        (RECOMPUTES, "tile", "written"),
        (RECOMPUTES, "jit", "same"),
        (RUNS_AGAIN, "jit", "written"),
        (RUNS_AGAIN.replace("y.sum()", "y[1:].neg_()"), "functional", "written"),
        (CANCELS, "jit", "beyond"),
        (HANDS_ON_NONE, "jit", "node"),
        (HANDS_ON_NONE.replace("Over", "Filled"), "jit", "same"),
        (MAKES_ZEROS, "jit", "node"),
        (MAKES_ZEROS.replace("Scale.apply", "Scale.plain"), "jit", "same"),
        (HIDES_A_WRITE, "jit", "written"),
        (HIDES_A_WRITE.replace(".data", ".clone()"), "jit", "same"),
        (FILLS_INTEGERS, "functional", "written"),
        (INDEXES_IN_VAIN, "jit", "beyond"),
        (HOOKS_IN_TURN, "jit", "node"),
        (HOOKS_IN_TURN.replace("x.register_hook(note_half)", "pass"), "jit", "same"),
        (BEGINS_NOWHERE, "backend", "same"),
        (KINKS_AT_NAN, "transform", "beyond"),
        (KINKS_AT_NAN.replace("* 0", "+ 9"), "transform", "same"),
        (READS_NO_PRODUCT, "jit", "beyond"),
        (READS_NO_PRODUCT.replace("return x * 2", "return y"), "jit", "same"),
    ],
)
def test_what_is_no_fault_of_ours(text: str, kind: str, outcome: str) -> None:
    assert judge(text, kind).outcome == outcome


def test_a_child_that_dies_costs_one_program_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadly(seed: int, kind: str, shrinking: bool = True) -> tuple[Verdict, str]:
        if seed == 1:
            raise MemoryError("no room left")
        if seed == 3:
            os.write(2, b"terminate called\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return Verdict("same"), ""

    monkeypatch.setattr(sys.modules[sweep.__module__], "one", deadly)
    report = sweep([(seed, "jit") for seed in range(6)], jobs=2)
    assert report.outcomes == {"same": 4, "wrong": 2}
    reasons = {f["seed"]: f["reason"] for f in report.failures}
    assert "exit code 1" in reasons[1] and "MemoryError: no room left" in reasons[1]
    assert "exit code -9" in reasons[3] and "terminate called" in reasons[3]
    assert all("def scenario" in f["text"] for f in report.failures)


def test_a_smaller_program_has_one_part_less() -> None:
    program = [Block("def program(x):", ["y = x", Block("with torch.no_grad():", ["z = y"]), "return (y, z)"])]
    found = {render(nodes) for nodes in smaller(program)}
    assert "def program(x):\n    y = x\n    z = y\n    return (y, z)" in found
    assert "def program(x):\n    y = x\n    with torch.no_grad():\n        z = y\n    return z" in found
    assert all(size(nodes) <= size(program) for nodes in smaller(program))
