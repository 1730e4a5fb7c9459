"""Kernels, schedules and functions to try on the Triton target; as a script, a part of them under Triton's interpreter.

The interpreter has to be chosen (TRITON_INTERPRET=1) before Triton is imported, hence a process of its own. It prints
a JSON object: the name of every trial, and what went wrong with it, if anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import attention_cases
import kernels
import torch
from kernels import Case
from on_h200 import TRITON as TARGET
from on_h200 import propose

from tessera.tile.dialect.build import KernelBuilder, bf16, f32, f64, i1, i64
from tessera.tile.dialect.functions import FUNCTIONS
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.schedules.schedule import Schedule, reduced_axis
from tessera.tile.targets.base import CompiledKernel
from tessera.tile.targets.triton.emit import emit
from tessera.tile.targets.triton.functions import FLOAT, INTEGER
from tessera.tile.targets.triton.launch import Launcher


def sizes_of(case: Case) -> dict[str, int]:
    return dict(zip([s.data for s in case.kernel.symbol_names], case.symbols, strict=True))


# --- schedules to try on every kernel: by hand, beside what the target proposes ---

LOOPS = [
    Schedule((("r", 16),), loop=True),
    Schedule((("i", 2), ("r", 16)), loop=True),
    Schedule((("i", 2), ("r", 64))),
]
SPLIT = Schedule((("r", 8),), loop=True, split=3)
SEVERAL = [  # blocks in a step, with and without masks
    Schedule((("r", 8),), loop=True, extra=(("blocks", 4),)),
    Schedule((("i", 2), ("r", 16)), loop=True, extra=(("blocks", 2),)),
    Schedule((("r", 8),), loop=True, split=3, extra=(("blocks", 2),)),
]
BY_HAND: dict[str, list[Schedule]] = {
    "pointwise": [Schedule((("i", 256),))],
    "silu_mul": [Schedule((("i j", 64),)), Schedule((("i", 2), ("j", 16)))],
    "gelu": [Schedule((("i j", 64),)), Schedule((("j", 32),))],
    "transpose": [Schedule((("i", 16), ("j", 16))), Schedule((("h i j", 128),))],
    "rotary": [Schedule((("q p r c", 64),)), Schedule((("p r", 4), ("c", 8)))],
    "gather": [Schedule((("i", 4), ("j", 32)))],
    "softmax": [*LOOPS, SPLIT, *SEVERAL],
    "layer_norm": [*LOOPS, SPLIT, *SEVERAL],
    "rms_norm": [replace(LOOPS[0], stages=3), SPLIT, Schedule((("i", 2), ("r", 128)))],
    "cross_entropy": [*LOOPS, SPLIT, *SEVERAL],
    "softmax_sums": [*LOOPS[:2], SPLIT, SEVERAL[0], Schedule((("r", 512),), loop=True)],
    "argmax": [*LOOPS, *SEVERAL[:2]],
    "flags": [*LOOPS, *SEVERAL[:2]],
    "shared_row": [*LOOPS, *SEVERAL[:2]],
    "cumsum": [*LOOPS, *SEVERAL[:2]],
    "cumprod": LOOPS,
    "cummax": LOOPS,
    "cummin": LOOPS,
    "running_places": [Schedule((("j", 2), ("r", 64)), loop=True)],
    "column_sum": [
        Schedule((("j", 16), ("r", 32)), loop=True),
        Schedule((("j", 16), ("r", 8)), loop=True, split=4),
        *(Schedule((("j", 32), ("r", 4)), loop=True, split=n, extra=(("blocks", 4),)) for n in (1, 3)),
    ],
    "middle_max": [
        Schedule((("h j", 16), ("r", 8)), loop=True),
        Schedule((("h", 1), ("j", 16), ("r", 8)), loop=True, split=3),
        Schedule((("h", 1), ("j", 32), ("r", 4)), loop=True, extra=(("blocks", 2),)),
    ],
    "full_sum": [Schedule((("r", 128),), loop=True), Schedule((("r", 128),), loop=True, split=5)],
    "matmul": [
        Schedule((("i", 16), ("j", 32), ("r", 16)), loop=True, group=2),
        Schedule((("i", 16), ("j", 32), ("r", 16)), loop=True, group=2, split=2),
        Schedule((("i", 16), ("j", 32), ("r", 64))),
        Schedule((("i j", 64), ("r", 64))),
        Schedule((("i", 16), ("j", 64), ("r", 16)), loop=True, group=2, persistent=True),
        *(
            Schedule((("i", 16), ("j", 64), ("r", 16)), loop=True, group=2, persistent=True, extra=extra)
            for extra in ((("bulk", True), ("flatten", True)), (("bulk", True), ("parts", 4)))
        ),
    ],
    "norm_backward": [
        Schedule(),
        Schedule((("i", 4),), split=3, stages=3),
        Schedule((("i", 2),), split=8),
        *(  # rows, then columns
            Schedule((("r", 16), ("i", 8)), loop=True, split=n, extra=(("row_block", 32), ("row_warps", 2), *more))
            for n, more in ((1, ()), (2, ()), (2, (("blocks", 2),)))
        ),
    ],
    "matvec": [Schedule((("j", 8), ("r", 16)), loop=True)],
}
EXTRA = [
    partial(kernels.softmax, 3, 1), partial(kernels.softmax, 4, 64), partial(kernels.pointwise, 1024),
    partial(kernels.pointwise, 77, torch.float64), partial(kernels.pointwise, 65, torch.float16),
    partial(kernels.matmul, batch=3), partial(kernels.matmul, 40, 48, 56, batch=2),
    partial(kernels.matmul, 40, 48, 56, dynamic=True), partial(kernels.matmul, 33, 20, 40, torch.float32),
    partial(kernels.cumsum, kind="prod"), partial(kernels.cumsum, kind="max"), partial(kernels.cumsum, kind="min"),
    partial(kernels.softmax_sums, 9, 200, torch.bfloat16, "exp2", "zero"), partial(kernels.softmax_sums, 8, 2048),
    partial(kernels.full_sum, 3), partial(kernels.column_sum, 96, 40),
    partial(kernels.running_places, 9000, 3), partial(kernels.running_places, 40, 300),
]  # fmt: skip


def trials(most: int = 2) -> list[tuple[str, Case, Schedule]]:
    """(name, kernel, schedule) for everything worth running."""
    found = []
    for case in kernels.cases() + [make() for make in EXTRA] + kernels.sequential_cases():
        own = BY_HAND.get(case.kernel.sym_name.data, [])
        for schedule in dict.fromkeys([*propose(case.kernel, sizes_of(case))[:most], *own]):
            dynamic = "-dynamic" if case.symbols else ""
            blocks = ",".join(f"{k.replace(' ', '')}{n}" for k, n in schedule.blocks)
            how = "".join(f"-{k}{v}" for k, v in schedule.extra) + ("-persistent" if schedule.persistent else "")
            how += ("-loop" if schedule.loop else "") + (f"-split{schedule.split}" if schedule.split > 1 else "")
            name = f"{case.name}{dynamic}-{blocks}{how}-w{schedule.warps}s{schedule.stages}"
            found.append((name, case, schedule))
    return found


TRIALS = trials()
# Some interpreters cannot loop up to a size argument with a recent NumPy.
NO_LOOP = "only 0-dimensional arrays"
PARTS = 6  # of the trials under the interpreter


def run(case: Case, schedule: Schedule, device: str = "cpu", kept: bool = False) -> None:
    tensors = [t.clone().to(device) for t in case.tensors]
    compiled = TARGET.compile(case.kernel, schedule)
    (restored(compiled) if kept and not case.symbols else compiled)(tensors, case.symbols)
    case.check(tensors)


def restored(compiled: CompiledKernel) -> CompiledKernel:
    """As another process would find it on disk; it lowers and emits nothing."""

    def never() -> KernelOp:
        raise AssertionError("the tile kernel is not needed")

    found = TARGET.load(json.loads(json.dumps(TARGET.save(compiled))), never)
    assert found is not None and found.source == compiled.source
    return found


# --- under the interpreter ---


def function_case(fn: str, element, dtype: torch.dtype) -> Case:
    """One elementwise function over many values, awkward ones among them."""
    floats = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-4, -3e-3, 7.25, -9.75, 30.0, -30.0, 100.0, 1e-30]
    special = [float("inf"), float("-inf"), float("nan")]
    whole = [0, 1, -1, 2, -2, 3, 7, -7, 8, 63, -64, 100]
    arity = FUNCTIONS[fn].arity
    base = torch.tensor(floats + special if dtype.is_floating_point else whole).to(dtype)
    n = base.numel()
    first, second = base.repeat_interleave(n), base.repeat(n)
    if not dtype.is_floating_point and fn in ("floordiv", "truncdiv", "mod", "fmod"):
        second = torch.where(second == 0, 5, second)
    if fn in ("shl", "shr"):
        second = second.abs() % 31
    if not dtype.is_floating_point and fn == "pow":
        second = second.abs() % 12
    args = [first, second, second.flip(0)][:arity]
    k = KernelBuilder(f"fn_{fn}")
    i = k.axis("i", first.numel())
    buffers = [k.buffer(element) for _ in args]
    if fn == "select":
        args[0], buffers = first > 0, [k.buffer(i1), k.buffer(element), k.buffer(element)][:3]
        k = KernelBuilder("fn_select")
        i = k.axis("i", first.numel())
        buffers = [k.buffer(i1), k.buffer(element), k.buffer(element)]
    want = FUNCTIONS[fn].reference(*args)
    out = k.buffer(i1 if FUNCTIONS[fn].predicate else element)
    k.store(k.apply(fn, *(k.load(b, i) for b in buffers)), out, i)
    want = want if want.dtype == torch.bool else want.to(dtype)
    return Case(f"fn-{fn}-{dtype}", k.finish(), [*args, torch.zeros_like(want)], [], {arity: want})


def function_cases() -> list[Case]:
    floats = [function_case(fn, f32, torch.float32) for fn in FLOAT if fn in FUNCTIONS]
    doubles = [function_case(fn, f64, torch.float64) for fn in ("div", "exp", "sigmoid", "sqrt", "floordiv", "pow")]
    whole = [function_case(fn, i64, torch.int64) for fn in INTEGER if fn not in ("floor", "ceil", "trunc", "round")]
    return floats + doubles + whole


def cast_case() -> Case:
    """From every type to every other, as PyTorch does it."""
    types = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.int8,
        torch.int32,
        torch.int64,
    ]
    values = torch.tensor([0.0, 1.0, -1.0, 2.5, -3.75, 100.0, 0.1, -0.2, 42.0, -100.0])
    k = KernelBuilder("casts")
    i = k.axis("i", values.numel())
    tensors, expected = [], {}
    for source in types:
        given = values.to(source)
        at = k.buffer(kernels.ELEMENTS[source])
        tensors.append(given)
        x = k.load(at, i)
        for target in types:
            out = k.buffer(kernels.ELEMENTS[target])
            k.store(k.cast(x, kernels.ELEMENTS[target]), out, i)
            expected[len(tensors)] = given.to(target)
            tensors.append(torch.zeros_like(expected[len(tensors)]))
    return Case("casts", k.finish(), tensors, [], expected)


def add_once_case() -> Case:
    """An atomic addition that does not vary along a parallel axis happens once."""
    k = KernelBuilder("add_once")
    i, j = k.axis("i", 5), k.axis("j", 7)
    x, y, z = k.buffer(f32), k.buffer(f32), k.buffer(f32)
    k.store(k.load(x, i), y, i, mode="add")
    k.store(k.load(x, i), z, i * 7 + j)
    a = kernels.rand(5)
    return Case(
        "add_once",
        k.finish(),
        [a, torch.ones(5), torch.zeros(5, 7)],
        [],
        {1: a + 1, 2: a[:, None].expand(5, 7).clone()},
    )


def takes_long(case: Case, schedule: Schedule) -> bool:
    """Schedules made by hand have small blocks: over many elements, the interpreter needs seconds for each."""
    return case.tensors[0].numel() > 5000 and schedule in BY_HAND.get(case.kernel.sym_name.data, [])


def interpreted(part: int) -> dict[str, str]:
    """Everything that runs in a subprocess: name -> what went wrong, or nothing. Trials come in parts: the first has
    some of every kernel, and what else there is."""
    works: list[tuple[str, Callable[[], None]]] = []
    seen: Counter[str] = Counter()
    for name, case, schedule in TRIALS:
        kernel = case.kernel.sym_name.data
        if takes_long(case, schedule):
            continue
        if seen[kernel] % PARTS == part:
            works.append((name, partial(run, case, schedule, kept=len(works) % 2 == 1)))
        seen[kernel] += 1
    return outcomes(works + ([] if part else others()))


def others() -> list[tuple[str, Callable[[], None]]]:
    works = [(c.name, partial(run, c, Schedule((("i", 128),)))) for c in (*function_cases(), cast_case())]
    for blocks in ((("i j", 16),), (("i", 2), ("j", 4)), (("j", 8),), ()):
        works.append((f"add_once-{blocks}", partial(run, add_once_case(), Schedule(blocks))))
    works += [(f"attention-{i}", partial(_attention, case)) for i, case in enumerate(attention_cases.CASES)]
    return works + [("grows", _grows), ("wide", _check_wide), ("alone", _check_alone), ("empty", _check_empty)]


def outcomes(works: list[tuple[str, Callable[[], None]]]) -> dict[str, str]:
    found = {}
    for name, work in works:
        try:
            work()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    return found


def _attention(case: attention_cases.Case) -> None:
    """Attention in one kernel, or in parts and whole, in both precisions."""

    def launch(kernel, tensors: list[torch.Tensor], symbols: list[int]) -> None:
        blocks = (("c", 16), ("p", 8)) if reduced_axis(kernel) == "p" else (("i", 16), ("c", 16), ("r", 16))
        TARGET.compile(kernel, Schedule(blocks, loop=reduced_axis(kernel) == "r"))(tensors, symbols)

    attention_cases.check(case, launch)
    attention_cases.check(case, launch, torch.bfloat16, 2e-2)


def _grows() -> None:
    """A row longer than the block that the schedule was made for."""
    small, large = kernels.softmax(2, 30, dynamic=True), kernels.softmax(2, 100, dynamic=True)
    compiled = TARGET.compile(small.kernel, Schedule((("r", 32),)))
    for case in (small, large, small):
        tensors = [t.clone() for t in case.tensors]
        compiled(tensors, case.symbols)
        case.check(tensors)


def _check_wide() -> None:
    """Offsets of 64 bits."""
    for case, schedule in (
        (kernels.softmax(dynamic=True), Schedule((("i", 2), ("r", 16)), loop=True)),
        (kernels.silu_mul(dynamic=True), Schedule((("i j", 64),))),
        (kernels.argmax(dynamic=True), Schedule((("r", 16),), loop=True)),
        (kernels.matmul(dynamic=True), Schedule((("i", 16), ("j", 16), ("r", 16)), loop=True, group=2)),
        (kernels.norm_backward(dynamic=True), Schedule()),
        (kernels.norm_backward(dynamic=True), Schedule((("i", 4),))),
    ):
        launcher = Launcher(case.kernel, schedule)
        launcher._plans[tuple(case.symbols)] = (
            launcher.variant(False, True),
            launcher._plan(tuple(case.symbols), case.tensors[0].device, len(case.tensors))[1],
        )
        tensors = [t.clone() for t in case.tensors]
        launcher(tensors, case.symbols)
        case.check(tensors)
        assert "tl.int64" in launcher._variants[False, True, False].source


def _check_alone() -> None:
    """The emitted module needs nothing of ours."""
    case = kernels.column_sum(dynamic=True)
    path = Path(os.environ["TESSERA_CACHE"]) / "alone.py"
    path.write_text(emit(case.kernel, Schedule((("j", 16), ("r", 16)), loop=True)))
    text = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import alone\n"
        "x = torch.arange(60.).reshape(12, 5).bfloat16(); y = torch.zeros(5).bfloat16()\n"
        "alone.launch(x, y, 12, 5); assert torch.equal(y, (x.float().sum(0) / 2).bfloat16()), y\n"
    )
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", text, str(path.parent)], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _check_empty() -> None:
    """No elements: nothing runs; an empty row reduces to the identity."""
    case = kernels.pointwise(1, dynamic=True)
    TARGET.compile(case.kernel, Schedule((("i", 128),)))([torch.zeros(0)] * 3, [0])
    rows = kernels.full_sum(1, dynamic=True)
    out = [torch.zeros(0), torch.ones(1), torch.ones(1)]
    TARGET.compile(rows.kernel, Schedule((("r", 128),), loop=True))(out, [0])
    assert out[1].isnan().all() and (out[2] == float("-inf")).all()
    sides = (("i", 16), ("j", 64), ("r", 16))
    product = TARGET.compile(_across(), Schedule(sides, loop=True, persistent=True, extra=(("bulk", True),)))
    for depth in (32, 0):
        x, w = kernels.rand(depth, 64, dtype=torch.bfloat16), kernels.rand(depth, 64, dtype=torch.bfloat16)
        y = torch.ones(64, 64)
        product([x, w, y], [depth])
        torch.testing.assert_close(y, x.float().t() @ w.float(), atol=1e-3, rtol=1e-3)


def _across() -> KernelOp:
    """x.t() @ w: no stride is a multiple of the depth."""
    k = KernelBuilder("across", ["p"])
    i, j, r = k.axis("i", 64), k.axis("j", 64), k.axis("r", "p", reduce=True)
    bx, bw, by = k.buffer(bf16), k.buffer(bf16), k.buffer(f32)
    k.store(k.contract(k.load(bx, r * 64 + i), k.load(bw, r * 64 + j), "r"), by, i * 64 + j)
    return k.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpreted(int(sys.argv[1]))))
