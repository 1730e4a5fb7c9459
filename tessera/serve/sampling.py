"""Choosing the next tokens, on the device, each row by its own settings.

In: logits [rows, vocabulary], and a `Rows` of what every row asks for. Out: a token for each row, -1 where its logits
hold NaN. The steps, in this order: bias and allowed tokens, penalties, temperature, the most likely `top_k`, the fewest
that make up `top_p`, those at least `min_p` times as likely as the first. Temperature 0 takes the most likely token.
What changes logits is here; from temperature on it is `sampling_aten.py`, or on a GPU `sampling_kernels.py`.

A row's random number is Philox of its seed, which answer to the request it belongs to, and its position. So a seed
repeats its tokens whatever else runs, and a token that was guessed beforehand is drawn just as it would have been.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tessera.serve.guide import KINDS, Guide, GuideError, masks_of
from tessera.util.errors import OptionError

_RANGES = {
    "max_tokens": (1, 2**62), "min_tokens": (0, 2**62), "temperature": (0.0, math.inf), "top_k": (0, 2**62),
    "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0),
    "n": (1, 2**62), "logprobs": (0, 2**62), "prompt_logprobs": (0, 2**62), "seed": (-(2**63), 2**64 - 1),
}  # fmt: skip
OPTIONAL = ("logprobs", "prompt_logprobs", "seed", "longest", "step_seconds", "deadline")  # these may be None


def check_ranges(given: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse options beyond their least and most, which say their kind, too: a step that raises fails for others."""
    for name, (least, most) in ranges.items():
        value, kind = given[name], Integral if isinstance(least, int) else Real
        known = issubclass(type(value), kind) and type(value) is not bool
        if not (known and least <= value <= most) and not (value is None and name in OPTIONAL):
            span = f"at least {least:g}" if most in (2**62, math.inf) else f"{least:.16g} to {most:.16g}"
            whole = "" if known or kind is Real else "a whole number, "
            raise OptionError(f"{name}: expected {whole}{span}, got {value!r}")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen, and when it ends.

    max_tokens              at most so many new tokens
    min_tokens              before so many, no token is chosen that ends the answer, and no stop text ends it
    temperature             0: always the most likely token
    top_k, top_p, min_p     only the k most likely; the fewest that together have this probability; those at least so
                            many times as likely as the first. 0, 1 and 0 leave all.
    presence_penalty        taken from the logits of tokens that were generated before
    frequency_penalty       the same, times how often
    repetition_penalty      divides positive and multiplies negative logits of tokens in prompt or answer
    logit_bias              added to the logits of some tokens
    allowed                 no other tokens than these
    stop, stop_tokens       texts and tokens that end the answer; a text is not part of it
    ignore_eos              the model's own end does not end it
    json_schema             the answer is JSON of this schema, a dict or text ({"type": "object"}: any object)
    regex, choices          the answer is a text of this regular expression, or one of these texts
    n                       so many answers
    logprobs                also give log-probabilities of each token and of so many of the likeliest
    prompt_logprobs         the same of the prompt's tokens
    seed                    repeats the same tokens; None: another one each time
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: Mapping[str, object] | str | None = None
    regex: str | None = None
    choices: tuple[str, ...] | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_ranges(vars(self), _RANGES)
        if not self.repetition_penalty > 0:
            raise OptionError(f"repetition_penalty: expected more than 0, got {self.repetition_penalty!r}")
        if self.top_p == 0:
            raise OptionError("top_p: expected more than 0 and at most 1, got 0")
        if self.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens: expected at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if "" in self.stop:
            raise OptionError("stop: expected texts of at least one character")
        if self.allowed is not None and not self.allowed:
            raise OptionError("allowed: expected at least one token")
        if len(kinds := [kind for kind in KINDS if getattr(self, kind) is not None]) > 1:
            raise GuideError(f"{kinds[1]}: expected one of {', '.join(KINDS)}, got {kinds[0]} too")
        for name in ("ignore_eos", "min_tokens") if kinds else ():
            if getattr(self, name):
                raise GuideError(f"{name}: expected none where {kinds[0]} says when the answer ends")

    @property
    def guided(self) -> tuple[str, object] | None:
        """Which grammar the answer follows, if any."""
        return next(((kind, getattr(self, kind)) for kind in KINDS if getattr(self, kind) is not None), None)

    @property
    def penalises(self) -> bool:
        """Does it matter which tokens came before?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def cuts(self) -> bool:
        """Are tokens left out that could be drawn?"""
        return self.temperature > 0 and (self.top_k != 0 or self.top_p != 1 or self.min_p != 0)

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse tokens that the model does not have."""
        for name in ("logit_bias", "allowed", "stop_tokens"):
            if wrong := [t for t in getattr(self, name) or () if not (0 <= t < vocabulary and isinstance(t, Integral))]:
                raise OptionError(f"{name}: expected tokens from 0 to {vocabulary - 1}, got {wrong[0]!r}")
        if strange := [bias for bias in self.logit_bias.values() if not isinstance(bias, Real)]:
            raise OptionError(f"logit_bias: expected numbers, got {strange[0]!r}")


@dataclass
class Draw:
    """What a row of logits is for, but for its position."""

    settings: Sampling
    seed: int = 0
    answer: int = 0  # which of the n
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()  # generated before this row's token
    banned: tuple[int, ...] = ()  # tokens that would end the answer too early
    guide: Guide | None = None
    guesses: tuple[int, ...] = ()  # between the guide's place and this row

    def __post_init__(self) -> None:
        given = self.settings
        # Does the next row depend on this one's token? Does this one change logits? Is the next row for the same?
        self.waits = given.penalises or self.guide is not None
        self.changes = bool(self.banned or given.logit_bias or given.allowed is not None or given.penalises)
        self.lasts = not self.banned and not self.waits and given.logprobs is None


@dataclass(frozen=True)
class Rows:
    """The settings of all rows as tensors. What no row asks for is None, and costs nothing."""

    temperature: Tensor | None = None
    cuts: tuple[Tensor, Tensor, Tensor] | None = None  # top_k, top_p and min_p
    seed: Tensor | None = None
    counter: Tensor | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens, what is added
    allowed: tuple[Tensor, Tensor, Tensor] | None = None  # rows that allow some only; then rows and tokens
    guided: tuple[Tensor, Tensor] | None = None  # rows that follow a grammar, and a bit for each token they may take
    repetition: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens (each once), the penalty
    counted: tuple[Tensor, Tensor, Tensor] | None = None  # rows, tokens (each once), what is taken

    def further(self) -> Rows:
        """The same rows a position later."""
        return self if self.counter is None else replace(self, counter=self.counter + 1)


def rows_of(draws: Sequence[Draw], positions: Sequence[int], device: torch.device | str = "cpu") -> Rows:
    """Settings of many rows, put side by side; each row is about the token at its position."""
    pinned = torch.device(device).type == "cuda"  # so that copies wait for nothing

    def column(values: Sequence, dtype: torch.dtype = torch.float32) -> Tensor:
        given = torch.tensor(values, dtype=dtype)
        return (given.pin_memory() if pinned else given).to(device, non_blocking=True)

    def sparse(entries: list[tuple[int, int, float]]) -> tuple[Tensor, Tensor, Tensor] | None:
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return column(rows, torch.int64), column(tokens, torch.int64), column(values)

    parts: dict[str, object] = {}
    if changed := [(i, draw) for i, draw in enumerate(draws) if draw.changes]:
        for name, entries in (("bias", _biases), ("repetition", _repetitions), ("counted", _counts)):
            parts[name] = sparse([e for i, draw in changed for e in entries(i, draw)])
        if pairs := [(i, token) for i, draw in changed for token in draw.settings.allowed or ()]:
            some = sorted({i for i, _ in pairs})
            parts["allowed"] = tuple(column(c, torch.int64) for c in (some, *zip(*pairs, strict=True)))
    settings = [draw.settings for draw in draws]
    if any(temperature := [s.temperature for s in settings]):
        seeds = [(draw.seed + 2**63) % 2**64 - 2**63 for draw in draws]  # the lower 64 bits, as int64 holds them
        counters = [draw.answer << 32 | position for draw, position in zip(draws, positions, strict=True)]
        parts["seed"], parts["counter"] = column((seeds, counters), torch.int64)
        parts["temperature"] = column(temperature)
        if any(s.cuts for s in settings):
            kept = zip(*((s.top_k, s.top_p, s.min_p) if s.cuts else (0, 1.0, 0.0) for s in settings), strict=True)
            kinds = (torch.int64, torch.float32, torch.float32)
            parts["cuts"] = tuple(column(values, kind) for values, kind in zip(kept, kinds, strict=True))
    return Rows(**parts)  # type: ignore[arg-type]


def guided(rows: Rows, draws: Sequence[Draw], device: torch.device | str = "cpu") -> Rows:
    """The same rows with the masks of their grammars. Masks take the host long, so the device should have work now."""
    if not (some := [i for i, draw in enumerate(draws) if draw.guide is not None]):
        return rows
    pinned = torch.device(device).type == "cuda"
    masks = masks_of([(draws[i].guide, draws[i].guesses) for i in some], pinned)  # type: ignore[misc]
    places = torch.tensor(some, pin_memory=pinned)
    return replace(rows, guided=tuple(x.to(device, non_blocking=True) for x in (places, masks)))  # type: ignore[arg-type]


def _biases(row: int, draw: Draw) -> list[tuple[int, int, float]]:
    given = [(row, token, value) for token, value in draw.settings.logit_bias.items()]
    return given + [(row, token, float("-inf")) for token in draw.banned]


def _repetitions(row: int, draw: Draw) -> list[tuple[int, int, float]]:
    penalty = draw.settings.repetition_penalty
    return [] if penalty == 1 else [(row, t, penalty) for t in sorted({*draw.prompt, *draw.output})]


def _counts(row: int, draw: Draw) -> list[tuple[int, int, float]]:
    presence, frequency = draw.settings.presence_penalty, draw.settings.frequency_penalty
    if presence == 0 and frequency == 0:
        return []
    return [(row, token, presence + frequency * count) for token, count in Counter(draw.output).items()]


def adjust(logits: Tensor, rows: Rows) -> Tensor:
    """Logits with bias, allowed tokens and penalties, of which the likeliest is what temperature 0 takes. In float32,
    where there is anything to change."""
    if rows.bias is rows.repetition is rows.counted is rows.allowed is rows.guided is None:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if rows.repetition is not None:
        row, token, penalty = rows.repetition
        old = logits[row, token]
        logits[row, token] = torch.where(old > 0, old / penalty, old * penalty)
    if rows.counted is not None:
        row, token, taken = rows.counted
        logits[row, token] -= taken
    if rows.bias is not None:
        row, token, added = rows.bias
        logits.index_put_((row, token), added, accumulate=True)
    if rows.allowed is not None:
        some, row, token = rows.allowed
        barred = torch.zeros_like(logits, dtype=torch.bool)
        barred[some] = True
        barred[row, token] = False
        logits.masked_fill_(barred, float("-inf"))
    if rows.guided is not None:
        row, words = rows.guided
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
        barred = (bits & 1).flatten(1)[:, : logits.shape[1]] == 0
        logits[row] = logits[row].masked_fill(barred, float("-inf"))
    return logits


@functools.cache
def _way(device: str) -> Callable:
    """Triton is imported only where a GPU is."""
    return importlib.import_module(f"tessera.serve.sampling_{'kernels' if device == 'cuda' else 'aten'}").choose


def choose(logits: Tensor, rows: Rows) -> Tensor:
    """A token for each row; -1 where no token can be chosen, since its logits are NaN or all are barred."""
    logits = adjust(logits, rows)
    return _way(logits.device.type)(logits, rows.temperature, rows.seed, rows.counter, rows.cuts)


def logprobs(logits: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its token's log-probability, before any setting changes it; the `most` highest ones, and whose."""
    log = logits.float().log_softmax(-1)
    top, which = log.topk(most, dim=-1)
    return log.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(-1), top, which
