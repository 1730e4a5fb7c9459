"""PyTorch's own samples of every operator (the OpInfo database in its wheel): forward, backward, in place.

A case is an operator in one dtype; its parts are the ways it is called, each with another of its samples. Inputs and
cotangents are contiguous or strided; one cotangent is expanded, as that of a sum is.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tessera.tools.battery.case import Case, Missing, Part, Skip
from tessera.tools.battery.compare import tensors
from tessera.tools.battery.copies import copied
from tessera.tools.battery.program import Program, check_program
from tessera.torch_internals.lookup import missing

DTYPES = ("float32", "bfloat16", "float16")
MANY = 24  # samples that are looked at
LAYOUTS = ("contiguous", "strided")
# Their results are whatever the memory held; so is the random state that attention gives without dropout.
UNWRITTEN = ("empty", "resize", "new_empty")
RANDOM_STATE = ("_flash_attention_forward", "_efficient_attention_forward")
# Eager's own derivative of these is wrong, also in double precision; the project's tests hold ours against numbers.
MISTAKEN = ("as_strided_scatter",)


@functools.cache
def database() -> dict[str, object]:
    from tessera.torch_internals import samples  # takes seconds

    if reason := missing(samples.operators):  # they want numpy, and on some machines more
        raise Missing(f"PyTorch's samples cannot be imported: {reason}")
    # Random operators are wrapped in a function that seeds a generator; the operator itself is what is tried.
    for module in samples.MODULES:
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in samples.operators}


def cases(device: str) -> list[Case]:
    listed = []
    for name, op in database().items():
        have = op.supported_dtypes(device)
        chosen = [dtype for dtype in DTYPES if getattr(torch, dtype) in have]
        if not chosen and (other := _other(have)):
            chosen = [other]
        listed += [Case("operators", f"{name} {dtype}", seconds=3.0 if dtype == "float32" else 2.0) for dtype in chosen]
    return listed


def _other(have: set[torch.dtype]) -> str:
    for dtype in (torch.int64, torch.complex64, torch.bool, torch.int32):
        if dtype in have:
            return str(dtype).removeprefix("torch.")
    return ""


def parts(case: str, device: str) -> Iterator[Part]:
    name, _, dtype_name = case.rpartition(" ")
    op, dtype = database()[name], getattr(torch, dtype_name)
    differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    half = dtype in (torch.bfloat16, torch.float16)
    samples = functools.cache(lambda requires_grad: _samples(op, device, dtype, requires_grad))
    number = itertools.count()
    for layout in LAYOUTS:
        if not (half and differentiable):  # backward looks at the results as well
            yield f"forward {layout}", _try(name, op.op, samples, next(number), layout)
        if differentiable:
            yield f"backward {layout}", _try(name, op.op, samples, next(number), layout, backward=True)
        if op.inplace_variant is not None and not (half and layout == "strided"):
            yield f"in place {layout}", _try(name, op.inplace_variant, samples, next(number), layout, in_place=True)
    if differentiable and not half:
        yield "backward expanded", _try(name, op.op, samples, next(number), "expanded", backward=True)


def _unwritten(name: str) -> Callable[[Tensor], bool]:
    """Which results of this operator hold whatever the memory held."""
    if name.startswith(UNWRITTEN):
        return lambda _: True
    # a seed and an offset, in one tensor or in two
    return (lambda t: t.dtype in (torch.int64, torch.uint64)) if name.endswith(RANDOM_STATE) else lambda _: False


def _samples(op: object, device: str, dtype: torch.dtype, requires_grad: bool) -> list:
    random.seed(0)
    torch.manual_seed(0)
    drawn = itertools.islice(op.sample_inputs(device, dtype, requires_grad=requires_grad), MANY)
    samples = list(drawn)
    full = [s for s in samples if all(t.numel() for t in tensors((s.input, s.args, s.kwargs)))]
    return full or samples


Samples = Callable[[bool], list]


def _try(
    name: str,
    op: Callable,
    samples: Samples,
    number: int,
    layout: str,
    backward: bool = False,
    in_place: bool = False,
) -> Callable[[], None]:
    def run() -> None:
        if backward and name in MISTAKEN:
            raise Skip("eager's own derivative is wrong")
        every = samples(backward)
        if not every:
            raise Skip("no samples")
        sample = every[(5 * number) % len(every)]
        if in_place and getattr(sample, "broadcasts_input", False):
            raise Skip("the result is larger than the argument")
        if layout == "strided":
            if any(t.layout is not torch.strided for t in tensors((sample.input, sample.args, sample.kwargs))):
                raise Skip("sparse tensors have no strides")
            sample = sample.noncontiguous()

        def called(*args: object, **kwargs: object) -> object:
            return op(*args, **kwargs)

        program = Program(
            called,
            (sample.input, *sample.args),
            sample.kwargs,
            backward=backward,
            cotangent=COTANGENTS[layout],
            roots=sample.output_process_fn_grad,
            unwritten=_unwritten(name),
            strides=layout == "contiguous",
        )
        check_program(program)

    return run


def strided(t: Tensor) -> Tensor:
    """The same numbers, with a gap after each and turned around."""
    if t.numel() < 2 or t.layout is not torch.strided:
        return t
    wide = torch.zeros((*reversed(t.shape), 2), dtype=t.dtype, device=t.device)
    view = wide[..., 0].permute(*reversed(range(t.ndim)))
    return view.copy_(t)


def expanded(t: Tensor) -> Tensor:
    """One number everywhere, as the cotangent of a sum is."""
    return t.flatten()[:1].reshape(()).expand(t.shape) if t.numel() and t.layout is torch.strided else t


COTANGENTS: dict[str, Callable[[Tensor], Tensor]] = {"contiguous": copied, "strided": strided, "expanded": expanded}  # type: ignore[dict-item]
