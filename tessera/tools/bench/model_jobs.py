"""The jobs of `tessera bench models`: which model, on what, doing what.

A `Job` makes a model with random weights and its inputs on a device, from a fixed seed. Its kind says what is timed:
`train` forward and backward, `step` those and AdamW's update, `infer` forward alone, `decode` one token from a
cache, as a CUDA graph. `jobs(tiny=True)` gives the same jobs at sizes that a CPU runs in a moment, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from tessera.tools.llama import Cache, Llama, LlamaConfig
from tessera.tools.models import GPT, GPTConfig
from tessera.tools.networks import Bert, EncoderConfig, MoE, ResNet50, ViT
from tessera.transforms.quantize import quantize

CONTEXTS, BATCHES = (1, 1024, 8192), (1, 8)
EIGHT_BITS = 0.17  # activations of 8 bits put its logits 0.165 of their size off, with exact sums (0.077 at width 512)
BF16 = "bf16"  # the rival of a model in fewer bits: the same model as it was


@dataclass(frozen=True)
class Made:
    """A model and what it is called with: tensors, or a cache."""

    model: nn.Module
    inputs: tuple[object, ...]


@dataclass(frozen=True)
class Job:
    name: str
    size: str
    kind: str  # train · step · infer · decode
    make: Callable[[str], Made]  # on a device
    dtype: torch.dtype
    quick: bool = False
    rivals: dict[str, Callable[[str], Made]] = field(default_factory=dict)  # ours on another model, in place of peers
    beyond: float = 0.0  # of a result's size: how much further than eager it may be off, where it rounds more

    @property
    def method(self) -> str:
        return "decode" if self.kind == "decode" else "forward"

    @property
    def trains(self) -> bool:
        return self.kind in ("train", "step")

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


def jobs(tiny: bool) -> list[Job]:
    """Every job, in the order they are run."""
    dtype = torch.float32 if tiny else torch.bfloat16
    return [job for group in (_llama(tiny, dtype), _decode(tiny, dtype), _others(tiny, dtype)) for job in group]


def _llama(tiny: bool, dtype: torch.dtype) -> list[Job]:
    batch, time = (2, 16) if tiny else (2, 4096)
    make = partial(_tokens, partial(Llama, _llama_config(tiny)), batch, time, dtype)
    prefill = partial(make, targets=False)
    fp8 = partial(prefill, kind="fp8")
    size = f"{batch}x{time}"
    return [
        Job("llama-train", size, "train", make, dtype, quick=True),
        Job("llama-step", size, "step", make, dtype),
        Job("llama-prefill", size, "infer", prefill, dtype, quick=True),
        Job("llama-prefill-fp8", size, "infer", fp8, dtype, True, {BF16: prefill}, EIGHT_BITS),
    ]


def _decode(tiny: bool, dtype: torch.dtype) -> list[Job]:
    config = _llama_config(tiny)
    quick = {(1, 1), (8192, 1), (8192, 8)}
    pairs = [(1, 1), (8, 2)] if tiny else [(context, batch) for batch in BATCHES for context in CONTEXTS]
    listed = []
    for context, batch in pairs:
        make = partial(_one_token, config, batch, context, dtype)
        size = f"batch {batch}, context {context}"
        listed.append(Job("llama-decode", size, "decode", make, dtype, (context, batch) in quick))
    context = 8 if tiny else 1024
    full = partial(_one_token, config, 1, context, dtype)
    int4 = partial(full, kind="int4")
    listed.append(Job("llama-decode-int4", f"batch 1, context {context}", "decode", int4, dtype, True, {BF16: full}))
    return listed


def _others(tiny: bool, dtype: torch.dtype) -> list[Job]:
    small = EncoderConfig(1, 32, 2, 64)
    gpt = GPTConfig(1, 32, 2, 16, 61) if tiny else GPTConfig(12, 768, 12, 1024, 50257, tied=True)
    gpt_batch, images, side = (2, 2, 32) if tiny else (8, 128, 224)
    vit = partial(ViT, small, 32, 16, 10) if tiny else partial(ViT, EncoderConfig())
    bert = partial(Bert, small, 61, 16) if tiny else partial(Bert, EncoderConfig(24, 1024, 16, 4096))
    bert_size = (2, 16) if tiny else (32, 512)
    resnet = partial(ResNet50, (1, 1), 8, 10) if tiny else ResNet50
    moe = partial(MoE, 32, 64, 4) if tiny else MoE
    moe_size = (2, 16, 32) if tiny else (2, 2048, 4096)
    classes = 10 if tiny else 1000
    pictures = f"{images}x3x{side}x{side}"
    return [
        Job("gpt2-train", f"{gpt_batch}x{gpt.context}", "train",
            partial(_tokens, partial(GPT, gpt), gpt_batch, gpt.context, dtype), dtype, quick=True),
        Job("vit-train", pictures, "train", partial(_images, vit, images, side, classes, dtype), dtype),
        Job("bert-infer", "x".join(map(str, bert_size)), "infer",
            partial(_tokens, bert, *bert_size, dtype, targets=False, vocab=61 if tiny else 30522), dtype),
        Job("resnet50-step", pictures, "step",
            partial(_images, resnet, images, side, classes, dtype, channels_last=True), dtype),
        Job("moe", "x".join(map(str, moe_size)), "train", partial(_moe, moe, moe_size, dtype), dtype),
    ]  # fmt: skip


def _llama_config(tiny: bool) -> LlamaConfig:
    return LlamaConfig(1, 128, 4, 2, 256, 61) if tiny else LlamaConfig()


# --- models with their inputs -------------------------------------------------------------------------------


def _build(build: Callable[[], nn.Module], dtype: torch.dtype, device: str, train: bool) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = build().to(dtype).train(train)
    for module in model.modules():  # statistics of batches are float32, as mixed precision keeps them
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


def _tokens(
    build: Callable[[], nn.Module],
    batch: int,
    time: int,
    dtype: torch.dtype,
    device: str,
    targets: bool = True,
    vocab: int | None = None,
    kind: str | None = None,
) -> Made:
    model = _build(build, dtype, device, targets)
    if kind is not None:
        quantize(model, kind)
    tokens = torch.randint(vocab or model.config.vocab, (batch, time + 1), device=device)  # type: ignore[union-attr]
    idx, after = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Made(model, (idx, after) if targets else (idx,))


def _one_token(
    config: LlamaConfig, batch: int, context: int, dtype: torch.dtype, device: str, kind: str | None = None
) -> Made:
    model = _build(partial(Llama, config), dtype, device, False)
    if kind is not None:
        quantize(model, kind)
    cache = Cache.empty(config, batch, context, model.tokens.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        for one in (*cache.keys, *cache.values):
            one[:, :, :-1].normal_()
    idx = torch.randint(config.vocab, (batch, 1), device=device)
    return Made(model, (idx, torch.tensor([context - 1], device=device), cache))


def _images(
    build: Callable[[], nn.Module],
    batch: int,
    side: int,
    classes: int,
    dtype: torch.dtype,
    device: str,
    channels_last: bool = False,
) -> Made:
    model = _build(build, dtype, device, True)
    images = torch.randn(batch, 3, side, side, device=device, dtype=dtype)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    return Made(model, (images, torch.randint(classes, (batch,), device=device)))


def _moe(build: Callable[[], nn.Module], size: tuple[int, ...], dtype: torch.dtype, device: str) -> Made:
    """The input wants its gradient too, as it would inside a model."""
    model = _build(build, dtype, device, True)
    x, targets = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    return Made(model, (x.requires_grad_(), targets))


def cast(inputs: tuple[object, ...], dtype: torch.dtype) -> tuple[object, ...]:
    """The same inputs with every floating-point tensor in another dtype, copied."""

    def one(x: object) -> object:
        match x:
            case Cache(keys, values):
                return Cache([k.to(dtype, copy=True) for k in keys], [v.to(dtype, copy=True) for v in values])
            case Tensor() if x.is_floating_point():
                return x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)
        return x

    return tuple(one(x) for x in inputs)
