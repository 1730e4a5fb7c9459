"""The contestants of `tessera bench models`: a job on a model of one's own, compiled one's own way.

`enter` gives a `Run`: `call` is what is timed, `results` names what a first call must get right. What the contestants
share stands here: gradients are dropped before each forward pass, inference keeps no history, and a decoded token is
replayed as a CUDA graph that was captured by hand, for everyone alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tessera
from tessera.tools.bench import model_jobs
from tessera.tools.bench.model_jobs import Job, Made, cast
from tessera.tools.llama import Cache
from tessera.util.config import config

EAGER, INDUCTOR, THUNDER, OURS = "eager", "inductor", "thunder", "tessera"
MODES = {  # further ways of TorchInductor, which --best tries
    "inductor[autotune]": "max-autotune",
    "inductor[overhead]": "reduce-overhead",
}
TUNED = {  # those that the zoo tries: graphs in one of them alone
    "inductor[tuned]": "max-autotune-no-cudagraphs",
    "inductor[overhead]": "reduce-overhead",
}
RATE = 1e-4  # learning rate of the training step
STEPS = 3  # of which the losses are compared


@dataclass(frozen=True)
class Run:
    call: Callable[[], Tensor]
    results: Callable[[Tensor], dict[str, Tensor]]  # from what the first call gave


def suits(who: str, job: Job) -> bool:
    """Whether a contestant enters a job. Replaying by itself is of no use where all are replayed."""
    return not (MODES.get(who) == "reduce-overhead" and job.kind == "decode")


def compiler(who: str, replayed: bool = False) -> Callable[[Callable], Callable]:
    """How a contestant compiles a model or a method of one; what is `replayed` by hand takes no graphs of its own."""
    match who:
        case "eager":
            return lambda f: f
        case "inductor":
            return lambda f: torch.compile(f, dynamic=False)
        case "thunder":
            return import_module("thunder").jit
        case "tessera" | model_jobs.BF16:
            return lambda f: tessera.jit(f, **ours())
    mode = (MODES | TUNED)[who] + ("-no-cudagraphs" if replayed else "")
    return lambda f: torch.compile(f, dynamic=False, mode=mode)


def ours() -> dict[str, list[str]]:
    """Options for Tessera: none where it chooses by itself."""
    return {} if config.executors == "auto" else {"executors": ["tile", "sdpa", "aten"]}


def enter(who: str, job: Job, workload: Made) -> Run:
    """A contestant at its job, on a copy of the model and of the inputs."""
    model, inputs = copy.deepcopy(workload.model), copy.deepcopy(workload.inputs)
    return build(who, job, model, inputs, workload.model)


def reference(job: Job, workload: Made) -> Run:
    """The job as PyTorch does it, with more bits."""
    dtype = torch.float64 if job.dtype == torch.float32 else torch.float32
    model = copy.deepcopy(workload.model).to(dtype)
    run = build(EAGER, job, model, cast(workload.inputs, dtype), workload.model)
    return Run(_with_own_keys(run.call), run.results)


class OwnKeys(TorchFunctionMode):
    """Gives every query head keys of its own: shared ones in float32 would take the whole matrix of scores, saved for
    backward in every layer."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and kwargs.pop("enable_gqa", False):
            q, k, v, *rest = args
            shared = q.shape[1] // k.shape[1]
            args = (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), *rest)
        return func(*args, **kwargs)


def _with_own_keys(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with OwnKeys():
            return call()

    return run


def build(who: str, job: Job, model: nn.Module, inputs: tuple[object, ...], before: nn.Module) -> Run:
    match job.kind:
        case "train":
            return _train(who, model, inputs)
        case "step":
            return _step(who, model, inputs, before)
    return _infer(who, job, model, inputs)


def _infer(who: str, job: Job, model: nn.Module, inputs: tuple[object, ...]) -> Run:
    replayed = job.kind == "decode" and next(model.parameters()).is_cuda
    fast = compiler(who, replayed)(model if job.method == "forward" else getattr(model, job.method))

    def call() -> Tensor:
        with torch.no_grad():
            return fast(*inputs)

    def results(out: Tensor) -> dict[str, Tensor]:
        caches = [t for x in inputs if isinstance(x, Cache) for t in (x.keys[-1], x.values[-1])]
        return {"result": out} | dict(zip(("keys", "values"), caches, strict=False))

    return Run(call, results)


def _train(who: str, model: nn.Module, inputs: tuple[object, ...]) -> Run:
    fast = compiler(who)(model)
    leaves = dict(model.named_parameters())
    leaves |= {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}  # type: ignore[misc]

    def call() -> Tensor:
        for leaf in leaves.values():
            leaf.grad = None
        loss = fast(*inputs)
        loss.backward()
        return loss.detach()

    def results(loss: Tensor) -> dict[str, Tensor]:
        return {"loss": loss} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    return Run(call, results)


def _step(who: str, model: nn.Module, inputs: tuple[object, ...], before: nn.Module) -> Run:
    """Forward, backward and AdamW: fused where eager, compiled by itself for peers, one program for Tessera."""
    call = _our_step(model, inputs) if who == OURS else _their_step(who, model, inputs)

    def results(loss: Tensor) -> dict[str, Tensor]:
        values = {"loss 1": loss.clone()} | {f"loss {i}": call().clone() for i in range(2, STEPS + 1)}
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        values["updates"] = torch.stack([(p.detach() - q.detach().to(p.dtype)).float().norm() for p, q in pairs])
        return values

    return Run(call, results)


def _our_step(model: nn.Module, inputs: tuple[object, ...]) -> Callable[[], Tensor]:
    step = tessera.train_step(model, None, torch.optim.AdamW(model.parameters(), lr=RATE), **ours())  # type: ignore[arg-type]
    return lambda: step(*inputs)  # type: ignore[return-value]


def _their_step(who: str, model: nn.Module, inputs: tuple[object, ...]) -> Callable[[], Tensor]:
    alone = who in (EAGER, THUNDER)  # no compiler for the optimizer
    kind = {"fused": True} if alone else {"foreach": True, "fused": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, **kind)  # type: ignore[arg-type]
    fast, update = compiler(who)(model), optimizer.step if alone else torch.compile(optimizer.step)

    def call() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = fast(*inputs)
        loss.backward()
        update()
        return loss.detach()

    return call


def captured(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A call as a CUDA graph: what replays it, and where its result stands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, out


def mistake(
    got: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
    many: float = 2.5,
    beyond: float = 0.0,
) -> str:
    """What is wrong, or nothing: a result may be off `many` times as far as eager's own, and by a little more; by
    `beyond` more where a job rounds more than eager does."""
    if missing := exact.keys() - got.keys():
        return f"no gradient of {min(missing)}"
    for name, want in exact.items():
        distance, usual = off(got[name], want), off(eager[name], want)
        limit = many * usual + beyond + (2**-7 if dtype == torch.bfloat16 else 1e-4)
        # It cancels to nothing, as the gradient of a key's bias: no digit counts.
        if usual > 1 and distance < float("inf"):
            continue
        if not distance <= limit:
            return f"{name} is off by {distance:.2g} of its size, where eager is off by {usual:.2g}"
    return ""


def off(got: Tensor, want: Tensor) -> float:
    """How far a result is from what it should be, relative to its size."""
    if got.shape != want.shape:
        return float("inf")
    size = want.double().norm() if want.dtype == torch.float64 else want.float().norm()
    return float((got.to(want.dtype) - want).norm() / size.clamp(min=1e-12))


def names(who: Sequence[str], job: Job) -> list[str]:
    """Who enters a job: everyone asked for whom it suits, or Tessera on the job's other models."""
    if job.rivals:
        return [*job.rivals, OURS] if OURS in who else []
    return [name for name in who if suits(name, job)]
