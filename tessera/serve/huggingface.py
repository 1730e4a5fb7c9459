"""Models of transformers, unmodified, as the engine's programs want them; and models from a folder.

In: a `PreTrainedModel`, or a folder with a config and safetensors. Out: a `Paged` module over the same weights. The
model itself stays as it is: a twin shares its tensors and has a config of its own, which sends attention to our
operators through transformers' AttentionInterface. One call of the twin tells what its layers are: what they keep of a
token, and how far they look back. Attention that our operators do not compute is refused by name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tessera.serve.cache import Table
from tessera.serve.operators import WHOLE
from tessera.serve.programs import Layer, Programs, Site
from tessera.serve.scheduler import Answer, Work
from tessera.util.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAGED, PROBE = "tessera_paged", "tessera_probe"
# What transformers hands to attention besides, and which changes nothing here.
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "is_causal", "is_training"}
_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on how long the longest sequence is


def _flat(*tensors: Tensor) -> list[Tensor]:
    """[1, heads, tokens, head] as [tokens, heads, head]."""
    return [x.squeeze(0).transpose(0, 1) for x in tensors]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, step: tuple,
    scaling: float | None = None, softcap: float | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in place of attention."""
    q, k, v = _flat(query, key, value)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return module.paged_site(q, k, v, step, scale, softcap or 0.0).unsqueeze(0), None  # type: ignore[operator]


def _probe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, step: list,
    sliding_window: int | None = None, scaling: float | None = None, softcap: float | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """The same in the one call that asks what the layers are: `step` collects them."""
    unknown = sorted(k for k, x in kwargs.items() if x is not None and x is not False and k not in _HARMLESS)
    if attention_mask is not None or unknown or kwargs.get("is_causal") is False:
        what = ", ".join(unknown) or ("a mask" if attention_mask is not None else "is_causal=False")
        raise InputError(f"{type(module).__name__}: expected causal attention, got attention with {what}")
    layer = Layer(key.shape[1], key.shape[3], value.shape[3], sliding_window or WHOLE)
    step.append((module, layer))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class HuggingFace(nn.Module):
    """A transformers model that follows the protocol `Paged`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        from transformers import AttentionInterface

        AttentionInterface.register(PAGED, _attend)
        AttentionInterface.register(PROBE, _probe)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.twin: PreTrainedModel = copy.deepcopy(model, shared).eval()
        config = self.twin.config
        self.vocabulary: int = config.vocab_size
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        self.stops = _stops(model)
        _refuse_angles(config)
        self._attention, self._layers = self._ask()

    def _ask(self) -> tuple[list[nn.Module], list[Layer]]:
        config, asked = self.twin.config, []
        config._attn_implementation = PROBE
        tokens = torch.ones(1, 2, dtype=torch.int64, device=self.twin.device)
        positions = torch.arange(2, device=tokens.device)[None]
        with torch.no_grad():
            self.twin(input_ids=tokens, position_ids=positions, use_cache=False, step=asked)
        config._attn_implementation = PAGED
        modules = [module for module, _ in asked]
        expected = getattr(config, "num_hidden_layers", len(asked))
        if len({id(m) for m in modules}) != len(modules) or len(modules) != expected or not modules:
            raise InputError(
                f"{type(self.twin).__name__}: expected {expected} layers of attention through transformers' "
                f"AttentionInterface, got {len(modules)} calls of {len({id(m) for m in modules})} modules"
            )
        return modules, [layer for _, layer in asked]

    def layers(self) -> list[Layer]:
        return self._layers

    def paged_forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        out = self.twin(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, step=step,
            logits_to_keep=0 if rows is None else rows,
        )  # fmt: skip
        return out.logits[0]

    def take_sites(self, sites: Sequence[Site]) -> None:
        """They hang in the attention modules themselves: so equal layers stay equal, and are traced once."""
        for module, site in zip(self._attention, sites, strict=True):
            module.paged_site = site


def compare(model: PreTrainedModel, programs: Programs) -> None:
    """Refuse a model whose logits, computed in two chunks over pages, are not those that it computes itself."""
    room = min(site.keys.shape[0] - 1 for site in programs.sites) * programs.block_size
    tokens = [(i + 2) * 7 % model.config.vocab_size for i in range(min(10, room))]
    half, blocks = -(-len(tokens) // 2), -(-len(tokens) // programs.block_size)
    answer = Answer(0, tokens, 1, table=Table([list(range(1, blocks + 1)) for _ in range(programs.groups)]))
    parts = []
    for first, end in ((0, half), (half, len(tokens))):
        work = Work(answer, first, tuple(tokens[first:end]), samples=True)
        name, given = programs.fill([work], range(end - first))
        parts.append(programs.run(name, given)[: end - first].float())
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([tokens], device=programs.device), use_cache=False).logits[0].float()
    error = (torch.cat(parts) - theirs).abs().mean() / theirs.abs().mean()
    allowed = 1e-3 if model.dtype is torch.float32 else 0.1
    if not error <= allowed:
        raise InputError(
            f"{type(model).__name__}: expected the logits that the model computes itself, got others step by step "
            f"(they differ by {error:.2g} of their size); does anything but its attention look back?"
        )


def _stops(model: PreTrainedModel) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else model.config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _refuse_angles(config: object) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if entry.get("rope_type") in _BY_LENGTH:
            raise InputError(f"rope_type {entry['rope_type']!r}: its angles depend on other sequences in the step")


def from_folder(
    folder: str | Path, random_weights: bool = False, device: str | torch.device | None = None
) -> PreTrainedModel:
    """A model from its config and safetensors. Code in the folder is never run; nothing is fetched. Random weights are
    drawn on the device, where that takes no time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: expected a folder with a config.json")
    if "auto_map" in json.loads((path / "config.json").read_text()):
        raise InputError(f"{path}/config.json: auto_map asks for code from the folder, which is never run")
    if random_weights:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device(device or "cpu"):
            return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()
    if not any(path.glob("*.safetensors")):
        raise InputError(f"{path}: expected weights in *.safetensors; random_weights=True does without")
    model = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype="auto"
    )
    return model.eval()


def tokenizer_of(folder: str | Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, if it has one."""
    from transformers import AutoTokenizer

    path = Path(folder)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
