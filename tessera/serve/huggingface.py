"""Models of transformers, unmodified, as the engine's programs want them; and models from a folder.

In: a `PreTrainedModel`, or a folder with a config and safetensors. Out: a `Paged` module over the same weights. The
model itself stays as it is: a twin shares its tensors and has a config of its own, which sends attention to our
operators through transformers' AttentionInterface. One call of the twin tells what its layers are: what they keep of a
token, and how far they look back. Attention that our operators do not compute is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn

from tessera.serve.cache import Table
from tessera.serve.joined import join, pays, watched
from tessera.serve.operators import WHOLE
from tessera.serve.programs import Layer, Programs, Site
from tessera.serve.scheduler import Answer, Work
from tessera.serve.tokenizer import Tokenizer
from tessera.util.errors import InputError
from tessera.util.log import log
from tessera.util.phases import phase

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PAGED, PROBE = "tessera_paged", "tessera_probe"
_WINDOW = "tessera_window"  # an attribute of masks
# What transformers hands to attention besides, and which changes nothing here.
_HARMLESS = {
    "dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "is_causal", "is_training",
    "logits_to_keep",
}  # fmt: skip
MESSAGE = 200  # characters of what transformers says
_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on how long the longest sequence is


def _flat(*tensors: Tensor) -> list[Tensor]:
    """[1, heads, tokens, head] as [tokens, heads, head]."""
    return [x.squeeze(0).transpose(0, 1) for x in tensors]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    step: tuple | None = None, scaling: float | None = None, softcap: float | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls in place of attention."""
    q, k, v = _flat(query, key, value)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    step = module.paged_carrier.step if step is None else step  # type: ignore[union-attr]
    return module.paged_site(q, k, v, step, scale, softcap or 0.0).unsqueeze(0), None  # type: ignore[operator]


class Carrier:
    """What a step is called with, where layers do not hand on to attention what they do not know; when the model is
    asked what its layers are, the answers."""

    step: tuple[Tensor, ...] | None = None

    def __init__(self) -> None:
        self.asked: list[tuple[nn.Module, Layer]] = []
        self.needed = False

    def probe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
        step: object = None, sliding_window: int | None = None, scaling: float | None = None,
        softcap: float | None = None, **kwargs: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """What transformers calls in place of attention in that one call."""
        unknown = sorted(k for k, x in kwargs.items() if x is not None and x is not False and k not in _HARMLESS)
        window = getattr(attention_mask, _WINDOW, None)
        strange = attention_mask is not None and window is None
        if strange or unknown or kwargs.get("is_causal") is False:
            what = ", ".join(unknown) or ("a mask of its own" if strange else "is_causal=False")
            raise InputError(f"expected causal attention, got attention with {what}")
        self.needed |= step is None
        reach = (sliding_window or WHOLE) if window is None else window()
        self.asked.append((module, Layer(key.shape[1], key.shape[3], value.shape[3], reach)))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probed_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Tensor], config: PreTrainedConfig, **kwargs: object
) -> Tensor:
    """What transformers calls in place of making a mask, in the same call. The mask that it gives knows how far tokens
    look back, for `probe` to ask; one that a layer makes of it does not."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=kwargs["device"])  # type: ignore[call-overload]
    setattr(mask, _WINDOW, partial(_look_back, mask_function, _longest(config) or 2**17))
    return mask


def _look_back(sees: Callable[..., Tensor], longest: int) -> int:
    """How many tokens, itself among them, every token of a text so long sees; `WHOLE`: all before it."""
    zero, window = torch.tensor(0), WHOLE
    powers = [1 << i for i in range((longest - 1).bit_length())]
    for query in sorted({q for p in (*powers, longest) for q in (p - 2, p - 1, p) if 0 <= q < longest}, reverse=True):
        places = torch.arange(query + 2)
        seen = sees(zero, zero, torch.tensor(query), places).expand(len(places))
        if query == longest - 1 and not seen[0]:
            window = int(seen.sum())
        if not torch.equal(seen, (places <= query) & ((places > query - window) if window else places >= 0)):
            raise InputError("expected attention to all tokens before, or to the last few, got a mask of another kind")
    return window


class HuggingFace(nn.Module):
    """A transformers model that follows the protocol `Paged`."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.twin: PreTrainedModel = _twin(model).eval()
        config = self.twin.config.get_text_config(decoder=True)
        self.vocabulary: int = config.vocab_size
        self.longest = _longest(config)
        self.stops = _stops(model)
        _refuse_angles(config)
        self._carrier = Carrier()
        self._attention, self._layers = self._ask()

    def _ask(self) -> tuple[list[nn.Module], list[Layer]]:
        from transformers import AttentionInterface, AttentionMaskInterface

        name, config = type(self.twin).__name__, self.twin.config
        AttentionInterface.register(PAGED, _attend)
        AttentionInterface.register(PROBE, self._carrier.probe)
        AttentionMaskInterface.register(PROBE, _probed_mask)
        config._attn_implementation = PROBE
        tokens = torch.ones(1, 2, dtype=torch.int64, device=self.twin.device)
        positions = torch.arange(2, device=tokens.device)[None]
        try:
            with torch.no_grad(), watched(self.twin) as self._beside:
                out = self.twin(input_ids=tokens, position_ids=positions, use_cache=False, step=(), logits_to_keep=1)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        except Exception as error:  # models that take other arguments, or make something of a mask
            told = " ".join(str(error).split())[:MESSAGE]
            raise InputError(f"{name}: expected a causal language model, got {type(error).__name__}: {told}") from error
        config._attn_implementation = PAGED
        self._picks = out.logits.shape[1] == 1
        asked, self._carrier.asked = self._carrier.asked, []  # the registry keeps the carrier, and no model
        modules = [module for module, _ in asked]
        expected = getattr(config.get_text_config(decoder=True), "num_hidden_layers", len(modules))
        if len({id(m) for m in modules}) != len(modules) or len(modules) != expected or not modules:
            raise InputError(
                f"{name}: expected {expected} layers of attention through transformers' "
                f"AttentionInterface, got {len(modules)} calls of {len({id(m) for m in modules})} modules"
            )
        return modules, [layer for _, layer in asked]

    def layers(self) -> list[Layer]:
        return self._layers

    def joined(self, device: torch.device) -> HuggingFace:
        """The same model, whose linear layers that read the same tensor are one product; itself if there are none, or
        if that is no faster on the device."""
        if not pays(device):
            return self
        other = _twin(self, {id(self._carrier): self._carrier})
        return other if join(other.twin, self._beside) else self

    def paged_forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, step: tuple[Tensor, ...]) -> Tensor:
        if self._carrier.needed:
            self._carrier.step = step
        out = self.twin(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, step=step,
            logits_to_keep=0 if rows is None else rows,
        )  # fmt: skip
        if self._carrier.needed:
            self._carrier.step = None
        return out.logits[0] if rows is None or self._picks else out.logits[0][rows]

    def take_sites(self, sites: Sequence[Site]) -> None:
        """They hang in the attention modules themselves: so equal layers stay equal, and are traced once."""
        for module, site in zip(self._attention, sites, strict=True):
            module.paged_site = site
            module.paged_carrier = self._carrier  # type: ignore[assignment]


M = TypeVar("M", bound=nn.Module)


def _twin(model: M, shared: dict[int, object] | None = None) -> M:
    """The same modules over the same tensors."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())} | (shared or {}))


@phase("comparing")
def compare(model: PreTrainedModel, programs: Programs) -> None:
    """Refuse a model whose logits, computed in two chunks over pages, are not those that it computes itself."""
    room = min(site.keys.shape[0] - 1 for site in programs.sites) * programs.block_size
    tokens = [(i + 2) * 7 % programs.model.vocabulary for i in range(min(10, room))]
    half, blocks = -(-len(tokens) // 2), -(-len(tokens) // programs.block_size)
    answer = Answer(0, tokens, 1, table=Table([list(range(1, blocks + 1)) for _ in range(programs.groups)]))
    parts, places = [], []
    for first, end in ((0, half), (half, len(tokens))):
        work = Work(answer, first, tuple(tokens[first:end]), samples=True)
        rows = range(0, end - first, 2)
        places += [first + row for row in rows]
        name, given = programs.fill([work], rows)
        parts.append(programs.run(name, given)[: len(rows)].float())
    try:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([tokens], device=programs.device), use_cache=False)
    except Exception as error:  # whatever a model raises that cannot run: sizes of its config may not fit each other
        told = " ".join(str(error).split())[:MESSAGE]
        raise InputError(f"{type(model).__name__}: its own call fails: {type(error).__name__}: {told}") from error
    theirs = out.logits[0, places].float()
    error = (torch.cat(parts) - theirs).abs().mean() / theirs.abs().mean()
    allowed = 1e-3 if model.dtype is torch.float32 else 0.1
    if not error <= allowed:
        raise InputError(
            f"{type(model).__name__}: expected the logits that the model computes itself, got others step by step "
            f"(they differ by {error:.2g} of their size); does anything but its attention look back?"
        )


def _longest(config: PreTrainedConfig) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def _stops(model: PreTrainedModel) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id if model.generation_config is not None else model.config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)


def _refuse_angles(config: object) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if entry.get("rope_type") in _BY_LENGTH:
            raise InputError(f"rope_type {entry['rope_type']!r}: its angles depend on other sequences in the step")


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """What transformers says of files that it cannot read, in one line, and nothing else of what it says."""
    from transformers.utils import logging

    told_before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # what it would tell of weights is told by whoever reads them
    logging.disable_progress_bar()
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # which kind it is depends on the file at fault and on the model
        told = " ".join(str(error).split())
        raise InputError(f"{what}: {type(error).__name__}: {told[:MESSAGE]}") from error
    finally:
        logging.set_verbosity(told_before)
        if bars:
            logging.enable_progress_bar()


def from_folder(
    folder: str | Path, random_weights: bool = False, device: str | torch.device | None = None
) -> PreTrainedModel:
    """A model from its config and safetensors. Code in the folder is never run; nothing is fetched. Random weights are
    drawn on the device, where that takes no time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: expected a folder with a config.json")
    with _reading(f"{path}"):
        if "auto_map" in json.loads((path / "config.json").read_text()):
            raise InputError(f"{path}/config.json: auto_map asks for code from the folder, which is never run")
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if random_weights:
            with torch.device(device or "cpu"):
                return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()
        if not any(path.glob("*.safetensors")):
            raise InputError(f"{path}: expected weights in *.safetensors; random_weights=True does without")
        model, told = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            path, config=config, local_files_only=True, use_safetensors=True, dtype="auto", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    for name, stored, wanted in told["mismatched_keys"]:
        raise InputError(f"{path}: {name}: expected the shape {[*wanted]}, which config.json asks for, got {[*stored]}")
    if missing := sorted(told["missing_keys"]):
        raise InputError(f"{path}: expected the weight {missing[0]}, which is in no file ({len(missing)} are missing)")
    if more := sorted(told["unexpected_keys"]):
        log(0, f"serve: {path}: {len(more)} weights are not the model's, such as {more[0]}")
    return model.eval()


def tokenizer_of(folder: str | Path) -> Tokenizer | None:
    """The folder's tokenizer, if it has one."""
    from transformers import AutoTokenizer

    path = Path(folder)
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    with _reading(f"{path}: its tokenizer"):
        return cast("Tokenizer", AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False))
