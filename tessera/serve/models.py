"""What the engine is given, as a model that follows `Paged`: a module, a folder or an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from tessera.serve.huggingface import HuggingFace, from_folder, tokenizer_of
from tessera.serve.packed import Packed
from tessera.serve.programs import Paged
from tessera.serve.tokenizer import Tokenizer
from tessera.util.errors import InputError, OptionError
from tessera.util.phases import phase


class Source(NamedTuple):
    """A model, the tokenizer that came with it, and the module as it was given."""

    model: Paged
    tokenizer: Tokenizer | None = None
    module: nn.Module | None = None


def source_of(given: nn.Module | str | Path, device: str | torch.device | None, random_weights: bool) -> Source:
    _check_device(device)
    if isinstance(given, nn.Module):
        module, tokenizer = given, None
    elif Path(given).is_file():
        packed = Packed(given, device)
        return Source(cast("Paged", packed), packed.tokenizer)
    else:
        with phase("weights"):
            module = from_folder(given, random_weights, device)
        with phase("tokenizer"):
            tokenizer = tokenizer_of(given)
    if device is not None:
        module = nn.Module.to(module, device)
    return Source(paged(module), tokenizer, module)


def _check_device(device: str | torch.device | None) -> None:
    try:
        kind = "cpu" if device is None else torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda") or kind == "cuda" and not torch.cuda.is_available():
        here = "cpu or cuda" if torch.cuda.is_available() else "cpu, since there is no GPU here"
        raise OptionError(f"device: expected {here}, got {str(device)!r}")


def paged(model: nn.Module) -> Paged:
    """A model that follows the protocol, from one that does or one of transformers."""
    if hasattr(model, "paged_forward"):
        return cast("Paged", model)
    if hasattr(model, "generation_config") and hasattr(model, "config"):
        return HuggingFace(model)  # type: ignore[arg-type]
    raise InputError(
        "expected a model of transformers, a module with paged_forward, a folder or an artifact, got "
        f"{type(model).__name__}"
    )
