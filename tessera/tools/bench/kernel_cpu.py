"""The CPU side of `tessera bench kernels`: cases and models against eager and TorchInductor, in fresh processes.

`run` starts one child for each case and number of threads; `measure`, in the child, compiles the case for every
contestant without caches, checks it, and times all of them round by round. The first call is taken in CPU seconds
(compilers start processes of their own), and so are steady calls on one thread, where the ratio is the median of those
within a round. With more threads CPU time counts waiting, so the clock is taken; since others may use the machine, what
is compared is then each contestant's fastest round.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from tessera.tools.bench.kernel_cases import BY_NAME, Case, cotangents, mistake, results_of, with_grads
from tessera.tools.bench.kernel_report import OURS, Measured
from tessera.tools.bench.measure import cpu_seconds, in_fresh_process, interleave, ratio
from tessera.tools.bench.probe import CONTESTANTS, fresh
from tessera.tools.models import GPT, MLP, GPTConfig

Say = Callable[[str], None]
WHO = ("eager", "inductor", OURS)


def chain_4(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a * b + 1) - b


def chain_16(a: Tensor, b: Tensor) -> Tensor:
    for _ in range(4):
        a = torch.tanh(a * 0.7 + b) - b
    return a


def _chain(function: Callable[..., Tensor]) -> Case:
    """So many elementwise operators in a row, on matrices as `pointwise` has them."""
    return replace(BY_NAME["pointwise"], name=function.__name__, function=function)


CASES = BY_NAME | {f.__name__: _chain(f) for f in (chain_4, chain_16)}
FUNCTIONS = ("chain_4", "pointwise", "chain_16", "softmax", "layer_norm", "rms_norm", "cross_entropy")
MODELS: dict[str, Callable[[], tuple]] = {
    "mlp": lambda: (MLP(GPTConfig(width=512)), torch.randn(256, 512)),
    "gpt": lambda: _gpt(GPTConfig()),
    "gpt512": lambda: _gpt(GPTConfig(layers=4, width=512, heads=8, context=256)),
}
SECTIONS = (*FUNCTIONS, *MODELS)
BLOCK = 0.01  # seconds that one sample takes at the least
ATOL = 2e-4  # of a model's results and gradients, against their largest element


@dataclass(frozen=True)
class Options:
    only: tuple[str, ...] = ()
    quick: bool = False
    who: tuple[str, ...] = WHO
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 30
    deadline: float | None = None  # seconds after which no further child is started

    def jobs(self) -> Iterator[tuple[str, bool, int]]:
        for name in SECTIONS:
            if (self.only and name not in self.only) or (self.quick and not self.only and name == "gpt512"):
                continue
            for train in (False, True):
                if train and name in CASES and CASES[name].back is None:
                    continue
                for threads in self.threads[:1] if self.quick else self.threads:
                    yield name, train, threads


def run(options: Options, say: Say) -> list[Measured]:
    measured = []
    start = time.monotonic()
    for name, train, threads in options.jobs():
        if options.deadline is not None and time.monotonic() - start > options.deadline:
            late = Measured(name, _direction(train), "", "f32", "cpu", threads)
            late.errors["all"] = "not run: the deadline has passed"
            measured.append(late)
            continue
        say(f"{name}, {'training' if train else 'forward'}, {threads} threads")
        arguments = {"name": name, "train": train, "who": options.who, "rounds": options.rounds}
        try:
            answer = in_fresh_process(__name__, "measure", threads=threads, **arguments)
            measured.append(Measured(**answer))
        except RuntimeError as error:
            failed = Measured(name, _direction(train), "", "f32", "cpu", threads)
            failed.errors["child"] = str(error).strip().splitlines()[-1]
            measured.append(failed)
    return measured


# --- in the child -----------------------------------------------------------------------------------------


def measure(name: str, train: bool, who: Sequence[str], rounds: int) -> dict[str, object]:
    """One case for every contestant."""
    workload = _function(CASES[name], train) if name in CASES else _model(name, train)
    row = Measured(name, _direction(train), workload.size, "f32", "cpu", torch.get_num_threads())
    calls: dict[str, Callable[[], object]] = {}
    with torch.set_grad_enabled(train):
        for contestant in who:
            try:
                _warm(contestant, train)
                start = cpu_seconds()
                call, check = workload.compile(contestant)
                call()
                row.first[contestant] = cpu_seconds() - start
                if contestant != "eager" and (reason := check()):
                    row.errors[contestant] = f"wrong: {reason}"
                else:
                    calls[contestant] = call
            except Exception as error:  # the others are measured all the same
                row.errors[contestant] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        alone = torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        samples = interleave(calls, rounds=rounds, repeat=_repeat(calls), clock=clock) if calls else {}
    row.seconds = {contestant: (median if alone else min)(taken) for contestant, taken in samples.items()}
    if alone and OURS in samples:
        row.ratios = {peer: ratio(samples, OURS, peer) for peer in samples if peer != OURS}
    return vars(row)


@dataclass(frozen=True)
class _Workload:
    """`compile` gives what is timed, and a check of it."""

    size: str
    compile: Callable[[str], tuple[Callable[[], object], Callable[[], str]]]


def _function(case: Case, train: bool) -> _Workload:
    inputs = case.make(case.small, torch.float32, "cpu")

    def compile(who: str) -> tuple[Callable[[], object], Callable[[], str]]:
        function = CONTESTANTS[who](fresh(case.function))
        arguments = with_grads(case, inputs) if train else inputs
        back = cotangents(results_of(case.function(*inputs))) if train else ()

        def step() -> object:
            output = function(*arguments)
            return torch.autograd.grad(results_of(output), arguments[: case.grads], back) if train else output

        return step, lambda: mistake(case, function, inputs, train)

    return _Workload("x".join(map(str, case.small)), compile)


def _model(name: str, train: bool) -> _Workload:
    model, *inputs = MODELS[name]()
    size = "x".join(map(str, inputs[0].shape))

    def step(model: nn.Module, call: Callable) -> Tensor:
        output = call(*inputs) if train or len(inputs) == 1 else call(inputs[0])
        if train:
            model.zero_grad(set_to_none=True)
            (output if output.ndim == 0 else output.square().mean()).backward()
        return output

    def compile(who: str) -> tuple[Callable[[], object], Callable[[], str]]:
        own = copy.deepcopy(model)
        fast = CONTESTANTS[who](own)
        return lambda: step(own, fast), lambda: _model_mistake(model, own, step(model, model), step(own, fast), train)

    return _Workload(size, compile)


def _model_mistake(model: nn.Module, own: nn.Module, want: Tensor, got: Tensor, train: bool) -> str:
    pairs = [("result", want, got)]
    if train:
        pairs += [(n, p.grad, q.grad) for (n, p), q in zip(model.named_parameters(), own.parameters(), strict=True)]  # type: ignore[misc]
    for name, a, b in pairs:
        off, scale = (a - b).abs().max().item(), a.abs().max().item()
        if not off <= ATOL * scale + 1e-7:
            return f"{name} is off by {off:.3g} where the largest element is {scale:.3g}"
    return ""


def _gpt(config: GPTConfig) -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(config.vocab, (1, config.context + 1))
    return GPT(config), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _warm(who: str, train: bool) -> None:
    """One tiny function, so that imports and start-up are not in the first call."""
    tiny = torch.ones(2, requires_grad=train)
    output = CONTESTANTS[who](lambda x: x.sin() * 2)(tiny)
    if train:
        output.sum().backward()


def _repeat(calls: dict[str, Callable[[], object]]) -> int:
    """Calls in a row that make a sample long enough for the clock."""
    call = next(iter(calls.values()))
    start = time.perf_counter()
    call()
    return max(1, min(200, int(BLOCK / max(time.perf_counter() - start, 1e-7))))


def _direction(train: bool) -> str:
    return "both" if train else "forward"


def main(task: str, options: str) -> None:
    torch.manual_seed(0)
    assert task == measure.__name__
    print(json.dumps(measure(**json.loads(options))))


if __name__ == "__main__":
    main(*sys.argv[1:])
