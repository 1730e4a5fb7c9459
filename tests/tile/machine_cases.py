"""Runs under Triton's interpreter what is proposed for every described GPU, and prints a report as JSON.

The interpreter has to be chosen before Triton is imported: `test_machines` starts this file in a process of its own.
"""

from __future__ import annotations

import json
from functools import partial

import attention_cases
import kernels
import torch
from kernels import Case

from tessera.machines import Machine, known, machine
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.targets.triton.target import TritonTarget

GPUS = [m for m in map(machine, known()) if m.kind == "gpu"]
CASES = [
    kernels.pointwise(3000, torch.bfloat16), kernels.layer_norm(9, 1000), kernels.softmax(5, 3000, torch.bfloat16),
    kernels.full_sum(70_000), kernels.column_sum(2000, 96), kernels.matmul(70, 96, 64), kernels.norm_backward(600, 64),
]  # fmt: skip
ATTENTION = attention_cases.Case(1, 2, 4, 1, 200, 16, 16, parts=2)


Call = tuple[KernelOp, list[torch.Tensor], list[int]]
TRIED: set[tuple] = set()  # machines that agree run it once


def run(target: TritonTarget, calls: list[Call]) -> bool:
    """Each under the first proposal; False where those of another machine were the same."""
    chosen = []
    for kernel, _, symbols in calls:
        sizes = dict(zip([s.data for s in kernel.symbol_names], symbols, strict=True))
        chosen.append(target.propose(kernel, sizes)[0])
    key = tuple((kernel.sym_name.data, schedule) for (kernel, _, _), schedule in zip(calls, chosen, strict=True))
    if key in TRIED:
        return False
    TRIED.add(key)
    for (kernel, tensors, symbols), schedule in zip(calls, chosen, strict=True):
        target.compile(kernel, schedule)(tensors, symbols)
    return True


def try_case(target: TritonTarget, case: Case) -> None:
    tensors = [t.clone() for t in case.tensors]
    if run(target, [(case.kernel, tensors, case.symbols)]):
        case.check(tensors)


def try_attention(target: TritonTarget) -> None:
    found = attention_cases.calls(ATTENTION)
    if run(target, found.calls):
        assert (found.out.double() - found.want).abs().max() < 1e-5


def report(of: Machine) -> dict[str, str]:
    """What failed, by the kernel's name."""
    target, failed = TritonTarget(of), {}
    trials = {case.name: partial(try_case, target, case) for case in CASES}
    trials["attention"] = partial(try_attention, target)
    for name, trial in trials.items():
        try:
            trial()
        except Exception as error:  # told in the report
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


if __name__ == "__main__":
    torch.set_num_threads(1)
    reports: dict[str, object] = {of.key: report(of) for of in GPUS}
    print(json.dumps(reports | {"tried": len(TRIED)}))
