"""`tessera bench kernels`: what compiled regions cost, against eager and TorchInductor in one run.

On a CPU, functions and small models, forward and training, on one and two threads, with the cost of the first call. On
CUDA, memory-bound kernels over many sizes in bf16 and f32, each beside the bytes it must move and the speed of a
copy, and a matrix product with an epilogue beside the plain one. Every contestant's results are checked before it is
timed; what fails says so and the rest goes on.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from tessera.tools.bench import kernel_cpu, kernel_cuda, kernel_tune
from tessera.tools.bench.kernel_cases import BY_NAME
from tessera.tools.bench.kernel_report import Measured, listed, missed_targets, table
from tessera.tools.bench.report import Outcome
from tessera.tools.command import chosen_device
from tessera.util.errors import OptionError

Say = Callable[[str], None]
SECTIONS = tuple(dict.fromkeys((*BY_NAME, *kernel_cpu.SECTIONS)))
CPU_NOTE = "CPU time on one thread, the fastest round by the clock on more; first calls in CPU time"
QUICK_SECONDS = 110.0  # after which a quick run on CUDA starts nothing new


def outcome(args: Namespace, say: Say) -> Outcome:
    """Measure what the command line asks for, on the device it names or the best there is."""
    device = chosen_device(args)
    if args.tune:
        return _tune(args, device, say)
    measured = _cuda(args, say) if device == "cuda" else _cpu(args, say)
    note = f"a copy moves {measured[0].copy / 1e12:.2f} TB/s" if measured and measured[0].copy else CPU_NOTE
    missed = any(row.errors for row in measured) or (device == "cpu" and bool(missed_targets(measured)))
    return Outcome(note, table(measured, "tessera bench kernels"), listed(measured), missed)


def _tune(args: Namespace, device: str, say: Say) -> Outcome:
    only = _only(args, tuple(BY_NAME), "cuda")
    sizes = None if device == "cuda" else {name: (case.small,) for name, case in BY_NAME.items()}
    rounds = args.rounds or kernel_cuda.Options.rounds
    tuned = kernel_tune.run(kernel_cuda.Options(only, args.quick, device=device, rounds=rounds, sizes=sizes), say)
    return Outcome("by search", kernel_tune.table(tuned), kernel_tune.listed(tuned), False)


def _cpu(args: Namespace, say: Say) -> list[Measured]:
    options = kernel_cpu.Options(
        _only(args, kernel_cpu.SECTIONS, "cpu"),
        args.quick,
        _who(args, kernel_cpu.WHO),
        tuple(args.threads),
        args.rounds or kernel_cpu.Options.rounds,
        args.deadline,
    )
    return kernel_cpu.run(options, say)


def _cuda(args: Namespace, say: Say) -> list[Measured]:
    options = kernel_cuda.Options(
        _only(args, tuple(BY_NAME), "cuda"),
        args.quick,
        _who(args, kernel_cuda.WHO),
        deadline=args.deadline or (QUICK_SECONDS if args.quick else None),
        rounds=args.rounds or kernel_cuda.Options.rounds,
    )
    return kernel_cuda.run(options, say)


def _who(args: Namespace, usual: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(args.who) if args.who else usual


def _only(args: Namespace, known: tuple[str, ...], device: str) -> tuple[str, ...]:
    for name in args.only:
        if name not in known:
            raise OptionError(f"--only: expected some of {', '.join(known)} on {device}, got {name!r}")
    return tuple(args.only)
