"""`tessera.Engine`: many requests to one model, computed together.

In: a causal language model (a module, a folder or an artifact) and prompts. Out: answers, whole or piece by piece.
Every call of `step` launches one batch: the scheduler chooses it, the runner sends it to the device. Then requests take
what came of the batch before, which the device has computed meanwhile; on a CPU, where that gains nothing, what came of
this one. A sequence that turns out to have ended is dropped a step late, and its surplus token with it.

Whoever waits for an answer drives the engine, so there is no thread of its own; a lock lets one step run at a time.
`submit` and `cancel` only leave a note, which the next step reads; a note to cancel is read at once where no step runs.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from tessera.serve import memory as memory_plan
from tessera.serve.cache import Cache
from tessera.serve.draft import Drafter, check_draft
from tessera.serve.guide import Guides
from tessera.serve.huggingface import HuggingFace, compare
from tessera.serve.meter import Meter
from tessera.serve.metrics import Metrics
from tessera.serve.models import Tokenizer, source_of
from tessera.serve.operators import FP8
from tessera.serve.packed import Packed, pack
from tessera.serve.programs import Program, Programs, kept_as
from tessera.serve.requests import Completion, Piece, Request
from tessera.serve.roofline import bytes_of, roofline
from tessera.serve.runner import Flight, Runner, Taken
from tessera.serve.sampling import Draw, Sampling, check_ranges
from tessera.serve.scheduler import Answer, Refused, Scheduler, Work
from tessera.serve.speculation import Speculation
from tessera.serve.stream import Stream
from tessera.serve.tokenizer import unshown
from tessera.util.errors import InputError, OptionError
from tessera.util.log import log

Prompt = str | Sequence[int]
DRAFTED = 4  # tokens that a draft guesses where nobody says how many
# The least and the most that options may be.
RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 2**16), "budget": (1, 2**20), "most_running": (1, 2**20), "most_waiting": (1, 2**40),
    "longest": (1, 2**40), "step_seconds": (1e-6, 1e6), "speculate": (0, 256),
}  # fmt: skip


class Engine:
    """A model that answers many requests at once.

    model         an nn.Module of transformers, one that follows `tessera.serve.programs.Paged`, a folder, or an
                  artifact that `export` wrote
    tokenizer     for prompts and answers as text; of a folder or an artifact its own
    memory        the cache's share of what the device has free (0.9), or its bytes ("8GB")
    block_size    tokens a block
    budget        tokens a step, at most
    most_running, most_waiting  sequences a step, and in the queue, at most; requests beyond the queue are refused
    longest       tokens of prompt and answer together; None: what the model's positions allow
    step_seconds  the asked time between tokens: prompts are computed in pieces that keep it
    reuse         compute equal beginnings of prompts once
    quantize      "int8", "int4" or "fp8": weights in fewer bits; the model that was given stays as it is
    cache_dtype   "fp8": keys and values in 8 bits; None: as the model computes them
    speculate     so many tokens are guessed from the text so far and verified together; 0: none
    draft         a smaller model of the same tokens, which guesses instead; as `model`
    deterministic  the same request gives the same bits alone, in a crowd and after preemption
    compiled      False runs the model as it is, to look for faults
    check         compare the books of cache and scheduler after every step
    """

    def __init__(
        self, model: nn.Module | str | Path, tokenizer: Tokenizer | None = None, *, memory: float | int | str = 0.9,
        block_size: int = 16, budget: int = 2048, most_running: int = 256, most_waiting: int = 4096,
        longest: int | None = None, step_seconds: float | None = None, reuse: bool = True, quantize: str | None = None,
        cache_dtype: str | None = None, speculate: int = 0, draft: nn.Module | str | Path | None = None,
        deterministic: bool = False, compiled: bool = True, check: bool = False, random_weights: bool = False,
        device: str | torch.device | None = None,
    ) -> None:  # fmt: skip
        if cache_dtype not in (None, "fp8"):
            raise OptionError(f"cache_dtype: expected 'fp8' or None, got {cache_dtype!r}")
        check_ranges(locals(), RANGES)
        memory_plan.bytes_of(memory, torch.device("cpu"))  # refused before the model is read
        with memory_plan.in_words():
            source = source_of(model, device, random_weights)
        self.model, self.tokenizer = source.model, tokenizer or source.tokenizer
        if isinstance(self.model, Packed):
            self.model.agree(deterministic, FP8 if cache_dtype else None, quantize, compiled)
        elif quantize is not None:
            if not isinstance(self.model, HuggingFace):
                raise OptionError("quantize: expected a model of transformers; tessera.quantize takes others")
            importlib.import_module("tessera.transforms.quantize").quantize(self.model.twin, quantize)
        self.longest = min((x for x in (longest, self.model.longest) if x is not None), default=None)
        where, kept = kept_as(self.model)
        wide = self.model.joined(where) if compiled and isinstance(self.model, HuggingFace) else None
        small = None if draft is None else source_of(draft, device, random_weights).model
        if small is not None:
            check_draft(small, self.model, self.longest)
            speculate = speculate or DRAFTED
        stored = FP8 if cache_dtype else kept
        self.memory = memory_plan.plan(
            [*self.model.layers(), *(() if small is None else small.layers())], block_size,
            memory_plan.bytes_of(memory, where), stored.itemsize, most_running, self.longest or 2**20, budget,
        )  # fmt: skip
        self.cache = Cache(block_size, self.memory.windows, self.memory.blocks, reuse)
        self.scheduler = Scheduler(self.cache, budget, most_running, most_waiting, self.longest, step_seconds)
        sizes = block_size, self.memory.blocks
        with memory_plan.in_words(self.memory, bytes_of(self.model)):
            self._programs = Programs(self.model, *sizes, compiled, deterministic, stored, budget, wide)
        self._runner = Runner(
            self._programs, self._draw, lambda work: self._owner[work.sequence.id].most_prompt(work),
            hurries=step_seconds is not None,
        )  # fmt: skip
        self._ahead = int(where.type == "cuda")  # steps that are launched before the tokens of one are read
        self._flights = deque[Flight]()  # steps under way
        drafts = None if small is None else Programs(small, *sizes, compiled, False, stored, budget)
        drafter = None if drafts is None else Drafter(drafts, self._draw)
        self._speculation, self._check = Speculation(speculate, drafter), check
        self.broken = False  # the device failed: nothing more can be computed in this process
        self._lock = threading.Lock()  # held while a step runs
        self._arrived: deque[Request] = deque()  # notes: appending needs no lock, so that even a destructor may
        self._cancelled: deque[Request] = deque()
        self._owner: dict[int, Request] = {}  # of every answer in the making
        self._guides = Guides(self.tokenizer, self.model.vocabulary, self.model.stops)
        self._numbers, self._meter = itertools.count(1), Meter(roofline(self._programs))
        self._metrics = self._meter.counts
        for programs in filter(None, (self._programs, drafts)):
            if compiled and not isinstance(programs.model, Packed):
                with memory_plan.in_words(self.memory, bytes_of(self.model)):
                    programs.compile()
        if isinstance(self.model, HuggingFace) and quantize is None and cache_dtype is None:
            compare(source.module, self._programs)  # type: ignore[arg-type]

    def warm(self, running: int = 1) -> None:
        """On a GPU, compile kernels and capture graphs now that `running` requests at once will need."""
        self._programs.warm(running)

    def export(self, path: str | Path, targets: str | Sequence[str] | None = None) -> None:
        """Write the programs, weights and tokenizer to one file: `Engine(path)` then compiles nothing. `targets` are
        those of `tessera.export`, by default this device's kind."""
        with self._lock:
            pack(self._programs, path, self.tokenizer, targets or self._programs.device.type)

    # --- asking ---

    def submit(
        self, prompt: Prompt, sampling: Sampling | None = None, *, deadline: float | None = None, priority: int = 0,
        salt: str = "", **settings: object,
    ) -> Stream:  # fmt: skip
        """Ask for an answer: pieces of it come by `for` or `async for`. Leaving the loop cancels the request.

        deadline   seconds from now, after which the request ends
        priority   a step more is worth ten seconds of waiting
        salt       only requests with the same salt share what was computed of equal beginnings
        settings   fields of `tessera.Sampling`, in place of those of `sampling`
        """
        check_ranges(locals(), {"priority": (-1e9, 1e9), "deadline": (-1e9, 1e9)})
        chosen = replace(sampling or Sampling(), **settings)  # type: ignore[arg-type]
        chosen.check_tokens(self.model.vocabulary)
        if chosen.stop:
            named = unshown(self.tokenizer, chosen.stop, self.model.vocabulary)
            chosen = replace(chosen, stop_tokens=(*chosen.stop_tokens, *named))
        tokens = self.tokens(prompt)
        now = time.monotonic()
        seed = secrets.randbits(63) if chosen.seed is None else chosen.seed
        decode = None if self.tokenizer is None else self._decode
        guides = [self._guides.guide(*chosen.guided) for _ in range(chosen.n)] if chosen.guided else ()
        request = Request(tokens, chosen, self.model.stops, seed, decode, now, guides)
        try:
            coming = sum(other.settings.n for other in list(self._arrived))
            self.scheduler.admits(len(tokens), chosen.max_tokens, chosen.n, coming)
        except Refused:
            self._metrics.refused += 1
            raise
        until = None if deadline is None else now + deadline
        for index in range(chosen.n):
            parent = request.answers[0] if index else None
            answer = Answer(
                next(self._numbers), list(tokens), chosen.max_tokens, now, priority, until, salt.encode(),
                reuse=chosen.prompt_logprobs is None, parent=parent, index=index,
            )  # fmt: skip
            request.answers.append(answer)
        self._arrived.append(request)
        return Stream(self, request)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **settings: object) -> Iterator[Piece]:
        """The pieces of an answer, as they come."""
        return iter(self.submit(prompt, sampling, **settings))  # type: ignore[arg-type]

    def generate(
        self, prompts: Prompt | Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None = None,
        **settings: object,
    ) -> list[Completion]:  # fmt: skip
        """All answers to all prompts, in order: those to the first prompt, then those to the second, …"""
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        if listed and isinstance(listed[0], int):
            listed = [cast("Prompt", listed)]
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(listed)
        streams = [self.submit(p, s, **settings) for p, s in zip(listed, each, strict=True)]  # type: ignore[arg-type]
        return [answer for stream in streams for answer in stream.whole()]

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens, which the model has."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("prompt: expected tokens, or an engine with a tokenizer; got text")
            prompt = self.tokenizer.encode(prompt)
        tokens = [int(token) for token in prompt]
        if wrong := [token for token in tokens if not 0 <= token < self.model.vocabulary]:
            raise InputError(f"prompt: expected tokens from 0 to {self.model.vocabulary - 1}, got {wrong[0]}")
        return tokens

    def _decode(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def cancel(self, request: Request) -> None:
        """End a request, wherever it is, before another step runs."""
        self._cancelled.append(request)
        self._sweep()

    def forsake(self, request: Request) -> None:
        """The same for destructors, which run anywhere: the next step ends it."""
        self._cancelled.append(request)

    # --- a step ---

    @property
    def busy(self) -> bool:
        """Is there anything to compute?"""
        return bool(self._arrived or self._owner)

    def drive(self, until: Callable[[], bool]) -> None:
        """Run a step, unless what the caller waits for has come meanwhile."""
        with self._lock:
            if not until():
                self._step()
        self._sweep()

    def step(self) -> None:
        """Launch one batch, and take what came of the one before."""
        self.drive(lambda: False)

    def _sweep(self) -> None:
        """Read notes to cancel. Whoever holds the lock instead does so after letting go of it: none is left lying."""
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                self._read_notes()
            finally:
                self._lock.release()

    def _read_notes(self) -> None:
        while self._arrived:
            request = self._arrived.popleft()
            self._metrics.requests += 1
            self._metrics.prompt_tokens += len(request.prompt)
            for answer in request.answers:
                self.scheduler.put(answer)
                self._owner[answer.id] = request
                self._speculation.begin(answer)
        while self._cancelled:
            for answer in self._cancelled.popleft().answers:
                if answer.ended is None:
                    self._end(answer, "cancelled")

    def _step(self) -> None:
        self._read_notes()
        if self._flights and (self._speculation.most or self._flights[-1].waits):
            self._land()
        ahead = self._ahead if self._launch() and self._metrics.steps else 0  # the second one may load kernels first
        while len(self._flights) > ahead:
            self._land()
        if self._check:
            self.scheduler.check()

    def _launch(self) -> bool:
        """Send the next batch to the device, if there is one."""
        start = time.monotonic()
        self._speculation.guess(self.scheduler.running, self._owner)
        batch = self.scheduler.schedule(start)
        for answer in batch.expired:
            self._ended(answer, "deadline")
        for work in batch.works:
            if work.first < work.sequence.prompt and not (request := self._owner[work.sequence.id]).begun:
                request.begun = True
                self._metrics.queued.add(start - request.arrival)
        try:
            self._speculation.fill(batch)
            flight = self._runner.launch(batch, start, self._flights[-1] if self._flights else None)
        except BaseException as error:
            self._failed(batch.works, error)
            return False
        self.scheduler.launched(batch)
        if batch.works:
            self._flights.append(flight)
        return bool(batch.works)

    def _land(self) -> None:
        """Hand out what came of the oldest batch under way."""
        flight, start = self._flights.popleft(), time.monotonic()
        try:
            taken = self._runner.land(flight)
        except BaseException as error:
            later, self._flights = self._flights, deque()
            self._failed([work for lost in (flight, *later) for work in lost.batch.works], error)
            return
        now = time.monotonic()
        for one in taken:
            if one.work.sequence.ended is None:
                self._take(one, now)
        self.scheduler.took(self._meter.step(flight, start, now, bool(self._owner)), flight.batch)

    def _draw(self, work: Work, guess: int) -> Draw:
        return self._owner[work.sequence.id].draw(work, guess)

    def _take(self, taken: Taken, now: float) -> None:
        """Hand a work's tokens to its request, and let the sequence go on or end."""
        answer = taken.work.sequence
        request = self._owner[answer.id]
        why = request.take(taken)
        if taken.work.samples:
            if drafted := taken.work.drafted:
                right = max(0, len(taken.tokens) - 1)
                self._speculation.learn(taken.work, right)
                self._metrics.drafted += drafted
                self._metrics.accepted += right
            self._meter.tokens(request, len(taken.tokens), now)
        if why == "error":
            self.cache.forget()  # what made it so may lie in blocks that others would find
            self._end(answer, "error", request.fault(answer))
            return
        self.scheduler.advance(taken.work, taken.tokens)
        if why is not None:
            self._end(answer, why)

    def _end(self, answer: Answer, why: str, error: str | None = None) -> None:
        self.scheduler.end(answer, why)
        self._ended(answer, why, error)

    def _ended(self, answer: Answer, why: str, error: str | None = None) -> None:
        request = self._owner.pop(answer.id)
        self._speculation.end(answer)
        self._metrics.ended[why] += 1
        request.end(answer, why, error)
        if not request.left:
            self._metrics.whole.add(time.monotonic() - request.arrival)

    def _failed(self, works: Sequence[Work], error: BaseException) -> None:
        """A step that raised: what it was to compute ends with the error, and the rest goes on."""
        log(0, f"serve: a step failed: {type(error).__name__}: {error}")
        self.broken |= isinstance(error, torch.AcceleratorError)
        self.cache.forget()  # blocks have names as soon as a step is under way
        for work in works:
            if work.sequence.ended is None:
                self._end(work.sequence, "error", f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            raise error

    # --- looking in ---

    @property
    def programs(self) -> dict[str, Program]:
        return self._programs.by_name

    def metrics(self) -> Metrics:
        """Counts since the engine began, and how things stand."""
        with self._lock:
            pools, now = self.cache.pools, copy.deepcopy(self._metrics)
        return replace(
            now, preemptions=self.scheduler.preemptions, reused_tokens=self.scheduler.reused,
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting) + len(self._arrived),
            blocks=sum(p.size for p in pools), used_blocks=sum(p.size - p.available for p in pools),
            cached_blocks=sum(p.cached for p in pools),
        )  # fmt: skip

    def timeline(self, path: str | Path) -> None:
        """Write the latest steps as a trace for Perfetto."""
        Path(path).write_text(json.dumps(self._meter.timeline()))

    def explain(self) -> str:
        """The cache's plan, and what the compiler did with both programs."""
        return "\n".join([*self.memory.lines(self.cache.block_size), *self._programs.explain()])
