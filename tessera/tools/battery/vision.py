"""Networks for images of timm and torchvision, and of our own, at small sizes with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from tessera.tools.battery.case import Case, Part, Skip
from tessera.tools.battery.models import model_parts
from tessera.tools.models import GPT, GPTConfig

TORCHVISION = {
    "resnet18": 64,
    "vgg11_bn": 64,
    "squeezenet1_1": 64,
    "mobilenet_v3_small": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "vit_b_32": 224,
    "alexnet": 96,
}
TIMM = {
    "resnet10t": 64,
    "vit_tiny_patch16_224": 224,
    "deit_tiny_patch16_224": 224,
    "mixer_s32_224": 224,
    "convnext_atto": 64,
    "mobilenetv4_conv_small": 64,
    "resmlp_12_224": 224,
    "poolformer_s12": 64,
    "edgenext_xx_small": 64,
    "eva02_tiny_patch14_224": 224,
    "levit_128s": 224,
    "regnetx_002": 64,
}


def cases(device: str) -> list[Case]:
    names = ["own gpt"]
    for library, table in (("torchvision", TORCHVISION), ("timm", TIMM)):
        names += [f"{library} {name}" for name in table]
    return [Case("vision", name, 70.0, limit=280.0) for name in names]


def parts(case: str, device: str) -> Iterator[Part]:
    library, name = case.split()
    return model_parts(lambda: build(library, name), device)


def build(library: str, name: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if library == "own":
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        return GPT(GPTConfig(layers=2, width=64, heads=2, context=16, vocab=64)), (ids, ids), {}
    if find_spec(library) is None:
        raise Skip(f"{library} is not installed")
    if library == "torchvision":
        import torchvision

        size = TORCHVISION[name]
        model = torchvision.models.get_model(name, weights=None, num_classes=5)
    else:
        import timm

        if not timm.is_model(name):
            raise Skip(f"timm {timm.__version__} has no {name}")
        size, model = TIMM[name], timm.create_model(name, pretrained=False, num_classes=5)
    return model, (torch.randn((4, 3, size, size), generator=generator),), {}
