"""The CUDA side of `tessera bench kernels`: every case, dtype and size, against eager and TorchInductor in one run.

Time is the GPU's own, between two events, the median of many calls. Before each call a large buffer is read, so that
nothing of the inputs is left in the L2 cache and nothing in it waits to be written back, and the GPU waits a little, so
that the host is ahead and its work is not in the time. A case that fails says so and the next one starts; if the device
itself failed, the rest is not tried. The same code runs on a CPU, by the clock, so that it can be tested where there is
no GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from tessera.tools.bench.kernel_cases import CASES, Case, Inputs, Size, cotangents, mistake, results_of, with_grads
from tessera.tools.bench.kernel_report import OURS, Measured
from tessera.tools.bench.measure import dead, short, tidy, wait
from tessera.tools.bench.probe import CONTESTANTS, fresh
from tessera.torch_internals import functorch
from tessera.torch_internals.cuda import sleep

Say = Callable[[str], None]
WHO = ("eager", "inductor", OURS)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
FLUSHED = 256 * 2**20  # bytes read between calls: several times any L2 cache
AHEAD = 1_000_000  # cycles that the GPU waits, about half a millisecond


@dataclass(frozen=True)
class Options:
    """What to measure. `deadline`: seconds after which no further case is started."""

    only: tuple[str, ...] = ()
    quick: bool = False
    who: tuple[str, ...] = WHO
    device: str = "cuda"
    deadline: float | None = None
    rounds: int = 30
    sizes: dict[str, tuple[Size, ...]] | None = None  # by case, in place of the usual ones

    def cases(self) -> Iterator[tuple[Case, str, Size]]:
        for case in CASES:
            if self.only and case.name not in self.only:
                continue
            sizes = case.quick if self.quick else case.sizes
            for size in sizes if self.sizes is None else self.sizes.get(case.name, ()):
                for dtype in ["bf16"] if self.quick or case.flops else DTYPES:
                    yield case, dtype, size


class Clock:
    """Seconds of a call on a device."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.flushed = torch.zeros(FLUSHED // 4 if device == "cuda" else 1, dtype=torch.float32, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        for _ in range(3):
            call()
        return median(self._cuda(call) if self.device == "cuda" else self._cpu(call))

    def _cpu(self, call: Callable[[], object]) -> list[float]:
        samples = []
        for _ in range(self.rounds):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return samples

    def _cuda(self, call: Callable[[], object]) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.rounds)
        ]
        torch.cuda.synchronize()
        for start, end in events:
            self.flushed.sum()
            sleep(AHEAD)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in events]


def copy_rate(clock: Clock) -> float:
    """Bytes a second of a plain copy: the roof for kernels that read and write."""
    n = 2**27 if clock.device == "cuda" else 2**20
    x = torch.empty(n, dtype=torch.bfloat16, device=clock.device).normal_()
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / clock(lambda: y.copy_(x))


def matmul_rate(clock: Clock, size: Size, dtype: torch.dtype) -> float:
    m, n, k = size
    a = torch.randn(m, k, dtype=dtype, device=clock.device)
    b = torch.randn(k, n, dtype=dtype, device=clock.device)
    return 2.0 * m * n * k / clock(lambda: a @ b)


def run(options: Options, say: Say) -> list[Measured]:
    """Measure everything that was asked for; what could not be measured says why."""
    clock = Clock(options.device, options.rounds)
    copy = copy_rate(clock)
    say(f"a copy moves {copy / 1e12:.2f} TB/s")
    measured: list[Measured] = []
    start, failed = time.perf_counter(), ""
    for case, dtype, size in options.cases():
        for backward in (False, True) if case.back else (False,):
            row = _row(case, dtype, size, options.device, backward)
            row.copy = copy
            measured.append(row)
            late = options.deadline is not None and time.perf_counter() - start > options.deadline
            if failed or late:
                row.errors["not run"] = failed or f"{options.deadline:.0f} seconds were over"
                continue
            say(f"{case.name} {row.direction} {row.size} {dtype}")
            measure(row, case, DTYPES[dtype], size, backward, options.who, clock)
            failed = dead(options.device)
    return measured


def _row(case: Case, dtype: str, size: Size, device: str, backward: bool) -> Measured:
    text = "x".join(map(str, size))
    return Measured(case.name, "backward" if backward else "forward", text, dtype, device)


def measure(
    row: Measured, case: Case, dtype: torch.dtype, size: Size, backward: bool, who: Sequence[str], clock: Clock
) -> None:
    """Fill in one row. Every contestant is checked before it is timed, and fails alone."""
    torch.manual_seed(0)
    try:
        inputs = case.make(size, dtype, clock.device)
        with torch.no_grad():
            results = results_of(case.function(*inputs))
        row.bytes = case.backward_bytes(inputs, results) if backward else case.forward_bytes(inputs, results)
        if case.flops is not None:
            row.flops, row.matmul = case.flops(size), matmul_rate(clock, size, dtype)
        del results
    except Exception as error:  # out of memory, or a broken case: the next one may do
        row.errors["inputs"] = short(error)
        return
    for name in who:
        try:
            _contestant(row, case, inputs, backward, name, clock)
        except Exception as error:
            row.errors[name] = short(error)
        finally:
            tidy(clock.device)


def _contestant(row: Measured, case: Case, inputs: Inputs, backward: bool, name: str, clock: Clock) -> None:
    torch.compiler.reset()
    function = _compile(name, case.function)
    with torch.set_grad_enabled(backward):
        start = time.perf_counter()
        call = _call(case, function, inputs, backward)
        call()
        wait(clock.device)
        row.first[name] = time.perf_counter() - start
        if name != "eager" and (reason := mistake(case, function, inputs, backward)):
            row.errors[name] = f"wrong: {reason}"
            return
        row.seconds[name] = clock(call)


def _compile(name: str, function: Callable) -> Callable:
    own = fresh(function)  # for each size one, so that none becomes dynamic
    return torch.compile(own, dynamic=False) if name == "inductor" else CONTESTANTS[name](own)


def _call(case: Case, function: Callable, inputs: Inputs, backward: bool) -> Callable[[], object]:
    """What is timed: the forward pass, or the backward pass of one that stands already."""
    if not backward:
        return lambda: function(*inputs)
    # A backward that writes over what was saved cannot run twice.
    functorch.config.donated_buffer = False
    arguments = with_grads(case, inputs)
    results = results_of(function(*arguments))
    given_back = cotangents(tuple(y.detach() for y in results))
    return lambda: torch.autograd.grad(results, arguments[: case.grads], given_back, retain_graph=True)
