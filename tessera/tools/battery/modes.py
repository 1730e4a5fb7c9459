"""Ways of running beside a plain call: CUDA graphs, whole training steps, generation, fewer bits, offload, transforms.

Each case is a function of the device that raises `Wrong` where the mode's answer is not eager's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import tessera
from tessera.ops.quantized import KINDS
from tessera.tools.battery.case import Case, Part, Skip, Wrong
from tessera.tools.battery.compare import check, distance
from tessera.tools.battery.language import model_of
from tessera.tools.battery.language_inputs import tokens
from tessera.tools.models import GPT, GPTConfig

Trial = Callable[[str], None]
MODES: dict[str, Trial] = {}
STEPS = 6
VOCAB, TIME = 128, 32


def mode(name: str) -> Callable[[Trial], Trial]:
    def note(trial: Trial) -> Trial:
        MODES[name] = trial
        return trial

    return note


def cases(device: str) -> list[Case]:
    return [Case("modes", name, 50.0, limit=240.0) for name in MODES]


def parts(case: str, device: str) -> Iterator[Part]:
    yield "", lambda: MODES[case](device)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=2, width=64, heads=4, context=TIME, vocab=VOCAB))


def batch(device: str, seed: int, rows: int = 4, time: int = TIME) -> Tensor:
    return torch.randint(0, VOCAB, (rows, time), generator=torch.Generator().manual_seed(seed)).to(device)


def agree(what: str, got: Tensor, want: Tensor, limit: float) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{what}: expected {want.dtype} {tuple(want.shape)}, got {got.dtype} {tuple(got.shape)}")
    if not (off := distance(got, want)) <= limit:
        raise Wrong(f"{what}: {off:.2g} from eager, expected at most {limit:.2g}")


def needs_gpu(device: str) -> None:
    if device != "cuda":
        raise Skip("needs a GPU")


# --- replays ---


@mode("cuda graph of a model")
def replayed(device: str) -> None:
    needs_gpu(device)
    model = gpt().eval().to(device)
    fast = tessera.jit(model, strict=True, cuda_graph=True)
    with torch.no_grad():
        held = []
        for seed in range(STEPS):
            x = batch(device, seed)
            held.append((fast(x), model(x)))
        for number, (got, want) in enumerate(held):  # a replay must not write over what an earlier call gave
            check(f"call {number}", got, want)
        wide = batch(device, 9, rows=2)
        check("another size", fast(wide), model(wide))


@mode("cuda graph of a written buffer")
def replayed_writes(device: str) -> None:
    needs_gpu(device)

    def step(cache: Tensor, x: Tensor) -> Tensor:
        cache[:, 1] += x
        return cache.sum(1) * 2

    fast = tessera.jit(step, strict=True, cuda_graph=True)
    mine, theirs = (torch.zeros(8, 4, 16, device=device) for _ in range(2))
    for seed in range(STEPS):
        x = torch.randn((8, 16), generator=torch.Generator().manual_seed(seed)).to(device)
        check(f"call {seed}", fast(mine, x), step(theirs, x))
        check(f"cache after call {seed}", mine, theirs)


# --- training steps ---

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5),
    # The gradient of a key's bias is zero but for rounding; divided by its own size, rounding would decide.
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=1e-3),
}


def trained(device: str, optimizer: str, cuda_graph: bool = False, autocast: bool = False, accumulate: int = 1) -> None:
    mine = gpt().to(device)
    theirs = copy.deepcopy(mine)
    first, second = (OPTIMIZERS[optimizer](m.parameters()) for m in (mine, theirs))
    more = {"cuda_graph": True} if cuda_graph else {}
    step = tessera.train_step(mine, None, first, strict=True, clip_norm=1.0, accumulate=accumulate, **more)

    def context() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16, enabled=autocast)

    for number in range(STEPS):
        x = batch(device, number)
        with context():
            got = step(x, x)
            loss = theirs(x, x)
        (loss / accumulate).backward()
        if number % accumulate == accumulate - 1:
            nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
            second.step()
            second.zero_grad()
        agree(f"loss {number}", got.detach().float(), loss.detach().float(), 2e-2 if autocast else 1e-3)
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        agree(name, p.detach(), q.detach(), 5e-2 if autocast else 5e-3)


def _training() -> None:
    for name in OPTIMIZERS:
        MODES[f"train_step {name}"] = lambda device, name=name: trained(device, name)
    # Not Adam: it makes steps of full length out of gradients that are nothing but rounding, as that of a key's bias.
    MODES["train_step autocast"] = lambda device: trained(device, "sgd", autocast=True)
    MODES["train_step accumulate"] = lambda device: trained(device, "adamw", accumulate=2)

    def graphed(device: str) -> None:
        needs_gpu(device)
        trained(device, "adamw", cuda_graph=True)

    MODES["train_step cuda graph"] = graphed


_training()


# --- memory ---


def same_gradients(device: str, dtype: torch.dtype = torch.float32, **options: object) -> None:
    """A wide model's gradients, with and without."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).to(device, dtype)
    x = torch.randn((2048, 256), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    fast = tessera.jit(model, strict=True, **options)  # type: ignore[arg-type]
    cotangent = torch.randn((2048, 256), generator=torch.Generator().manual_seed(2)).to(device, dtype)
    wanted = torch.autograd.grad(model(x), list(model.parameters()), cotangent)
    for call in range(3):
        grads = torch.autograd.grad(fast(x), list(model.parameters()), cotangent)
        for place, (got, want) in enumerate(zip(grads, wanted, strict=True)):
            agree(f"gradient {place} of call {call}", got, want, 1e-4)


MODES["offload host"] = lambda device: same_gradients(device, offload="host")
MODES["memory budget"] = lambda device: same_gradients(device, memory_budget="4MB")
MODES["recompute cheap"] = lambda device: same_gradients(device, recompute="cheap")


@mode("checkpoint")
def checkpointed(device: str) -> None:
    model, x = gpt().to(device), batch(device, 0)
    block = copy.deepcopy(model)

    def run(m: nn.Module, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(m, x, x, use_reentrant=False)

    fast = tessera.jit(run, strict=True)
    fast(block, x).backward()
    run(model, x).backward()
    for (name, p), q in zip(block.named_parameters(), model.parameters(), strict=True):
        agree(name, p.grad, q.grad, 1e-4)


@mode("dynamic sizes")
def dynamic(device: str) -> None:
    model = gpt().to(device)
    other = copy.deepcopy(model)
    fast = tessera.jit(other, strict=True, dynamic=True)
    for rows, time in ((2, 8), (3, 16), (5, 31), (1, 32)):
        x = batch(device, rows, rows, time)
        got, want = fast(x, x), model(x, x)
        agree(f"loss of {rows} x {time}", got.detach(), want.detach(), 1e-4)
        got.backward()
        want.backward()
    for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
        agree(name, p.grad, q.grad, 1e-4)


# --- fewer bits ---


def quantized(device: str, kind: str, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128, bias=False)).to(device, dtype).eval()
    tessera.quantize(model, kind)
    x = torch.randn((rows, 256), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with torch.no_grad():
        # With many rows a layer of 8 bits rounds what it multiplies to 8 bits as well.
        limit = 6e-2 if kind == "fp8" and rows > 16 and device == "cuda" else 1e-2
        agree(f"{rows} rows", tessera.jit(model, strict=True)(x), model(x), limit)


def _quantized() -> None:
    for kind in KINDS:
        for rows in (1, 5, 64):
            for dtype in (torch.bfloat16, torch.float16):
                name = f"quantize {kind} {rows} rows {str(dtype).removeprefix('torch.')}"
                MODES[name] = lambda device, k=kind, r=rows, d=dtype: quantized(device, k, r, d)


_quantized()


# --- generation ---

GENERATORS = ("llama", "qwen3", "gpt2", "gemma2", "mistral")


def generated(device: str, name: str, cache: str) -> None:
    if find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    model = model_of(name).eval().to(device)
    with torch.no_grad():
        for weight in model.parameters():  # large enough that tokens differ clearly
            weight.normal_(std=0.1) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.1)
    prompt = tokens(6)[:1].to(device)
    given = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    given |= {"pad_token_id": 0, "eos_token_id": None, "disable_compile": True}
    if cache:
        given["cache_implementation"] = cache
    want = model.generate(prompt, **given)
    fast = tessera.jit(model, strict=True)
    got = fast.generate(prompt, **given)
    same = int((want.sequences == got.sequences)[0].long().cumprod(0).sum()) - prompt.shape[1]
    if same < 3:
        raise Wrong(f"only {same} tokens are eager's")
    for place in range(min(same + 1, len(want.logits))):
        agree(f"logits {place}", got.logits[place], want.logits[place], 1e-3)


def _generating() -> None:
    for name in GENERATORS:
        for cache in ("", "static"):
            title = f"generate {name} {cache or 'dynamic'} cache"
            MODES[title] = lambda device, n=name, c=cache: generated(device, n, c)


_generating()


# --- transforms ---


def transformed(device: str, ours: Callable, theirs: Callable) -> None:
    w = torch.randn((6, 5), generator=torch.Generator().manual_seed(0)).to(device)
    x = torch.randn((4, 5), generator=torch.Generator().manual_seed(1)).to(device)
    check("result", ours(w, x), theirs(w, x))


def _loss(w: Tensor, x: Tensor) -> Tensor:
    return nn.functional.softmax(torch.tanh(x @ w.t()), -1).square().sum()


MODES |= {
    "grad": lambda device: transformed(device, tessera.grad(_loss), torch.func.grad(_loss)),
    "vmap of grad": lambda device: transformed(
        device,
        tessera.vmap(tessera.grad(_loss), in_dims=(None, 0)),
        torch.func.vmap(torch.func.grad(_loss), in_dims=(None, 0)),
    ),
    "hessian": lambda device: transformed(device, tessera.hessian(_loss), torch.func.hessian(_loss)),
    "jacfwd": lambda device: transformed(device, tessera.jacfwd(_loss), torch.func.jacfwd(_loss)),
}
