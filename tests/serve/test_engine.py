"""The engine gives what `model.generate` gives, ends every request once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from families import FAMILIES, differences, engine_of, expected, model, prompts_of, token_bytes

import tessera
from tessera.serve.engine import Engine
from tessera.serve.memory import Plan, in_words
from tessera.serve.sampling import Sampling
from tessera.serve.scheduler import Refused
from tessera.tools.llama import Llama, LlamaConfig
from tessera.util.errors import InputError, OptionError

GREEDY = Sampling(max_tokens=8, temperature=0)


class Letters:
    """A tokenizer of one token a letter, in which token 5 is written in two halves, as bytes are."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 60 for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 60) for token in token_ids)


def engine(name: str = "llama", **options: object) -> Engine:
    return Engine(model(name), **{"compiled": False, "check": True, "memory": 2**22, "block_size": 4, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate(name: str) -> None:
    draw = Random(0)
    assert [differences(name, engine_of(name, draw), draw, 6) for _ in range(2)] == [0, 0]


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_generate_under_more_settings(name: str) -> None:
    draw = Random(1)
    assert sum(differences(name, engine_of(name, draw), draw, 10) for _ in range(50)) == 0


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.sweep)])
def test_compiled_programs_write_the_pools_in_place(name: str) -> None:
    """Two programs, each compiled once for all sizes. Cache writes are operators of the final program, not copies."""
    fast = engine(name, compiled=True, budget=16, speculate=2)
    pools = [site.keys.data_ptr() for site in fast._programs.sites]
    draw = Random(3)
    assert sum(differences(name, fast, draw, 6) for _ in range(2)) == 0
    for program in fast.programs.values():
        final = program.stages[-1].trace
        writes = [eqn for eqn in final.equations if "paged_write" in str(eqn.op)]
        assert len(writes) == 4 and not final.mutations
        assert "1 graph, 0 graph breaks, 0 recompiles" in str(tessera.explain(program.call))
    assert pools == [site.keys.data_ptr() for site in fast._programs.sites]
    assert "blocks of 4 tokens" in fast.explain()


def test_a_given_model_stays_as_it_is() -> None:
    prompt = (5, 6, 7)
    before = expected("llama", prompt)
    theirs = model("llama")
    kept, implementation = dict(theirs.named_parameters()), theirs.config._attn_implementation
    served = engine(quantize="int8")
    served.generate([prompt], GREEDY)
    assert theirs.config._attn_implementation == implementation
    assert all(kept[name] is parameter for name, parameter in theirs.named_parameters())
    expected.cache_clear()
    assert expected("llama", prompt) == before


def test_a_seed_repeats_whatever_else_runs() -> None:
    wanted = Sampling(max_tokens=10, temperature=1.5, top_p=0.9, seed=11, n=2, frequency_penalty=0.3)
    prompts = prompts_of(Random(5), 5)
    alone = [answer.tokens for answer in engine().generate([prompts[0]], wanted)]
    crowd = engine(budget=7, speculate=3, reuse=False)
    ahead = engine(budget=9)
    ahead._ahead = 1  # penalties need the last token: then the step before lands first
    others = [ahead.submit(p, temperature=1.0, max_tokens=9) for p in prompts[1:]]
    assert [answer.tokens for answer in ahead.generate([prompts[0]], wanted)] == alone and len(others) == 4
    streams = [crowd.submit(p, temperature=1.0, max_tokens=9) for p in prompts[1:]]
    assert [answer.tokens for answer in crowd.generate([prompts[0]], wanted)] == alone
    assert alone[0] != alone[1] and all(stream.whole()[0].finish == "length" for stream in streams)


def test_deterministic_answers_are_equal_to_the_bit() -> None:
    """Alone, in crowds, cut into other chunks, after preemption, with and without reuse: one distinct answer."""
    answers, preempted, reused = zip(*(deterministic("llama", seed) for seed in (0, 3, 5)), strict=True)
    assert len(set(answers)) == 1 and any(preempted) and any(reused)


@pytest.mark.parametrize("name", ["mistral_window", "gemma2"])
def test_blocks_of_any_size_give_the_same_bits(name: str) -> None:
    """Also where a window begins within a block."""
    answers = set()
    for size in (1, 2, 4, 8, 16):
        served = engine(name, deterministic=True, block_size=size)
        (answer,) = served.generate([range(3, 33)], max_tokens=12, temperature=0.8, seed=5, logprobs=0)
        answers.add(tuple((logprob.token, logprob.value) for logprob in answer.logprobs))
    assert len(answers) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_more_deterministic_answers(name: str) -> None:
    assert len({deterministic(name, seed)[0] for seed in range(200)}) == 1


def deterministic(name: str, seed: int) -> tuple[tuple, int, int]:
    """One request beside others, with log-probabilities to the bit; preemptions, and tokens that were reused."""
    draw, prompt = Random(seed), tuple(range(3, 33))
    served = engine(
        name, deterministic=True, budget=draw.choice([5, 8, 24, 200]), reuse=seed % 2 == 0,
        speculate=draw.choice([0, 2]),
        memory=4 * 14 * token_bytes(name) if seed % 4 < 2 else 2**22,
    )  # fmt: skip
    served._ahead = int(seed % 3 > 0)
    crowd = [served.submit(p, GREEDY, priority=draw.randint(0, 2)) for p in prompts_of(draw, seed % 8)]
    crowd += [served.submit(prompt[:20], GREEDY, priority=2)]
    served.step()
    (answer,) = served.submit(prompt, max_tokens=12, temperature=0.8, seed=5, logprobs=0).whole()
    assert all(stream.whole()[0].finish == "length" for stream in crowd)
    told = tuple((logprob.token, logprob.value) for logprob in answer.logprobs)
    return told, served.scheduler.preemptions, served.scheduler.reused


def test_pieces_make_up_the_text_and_stop_texts_cut_it() -> None:
    served = engine(tokenizer=Letters())
    (whole,) = served.generate("ABCDEF", GREEDY)
    pieces = list(served.stream("ABCDEF", GREEDY))
    assert whole.text == "".join(chr(token + 60) for token in whole.tokens) == "".join(p.text for p in pieces)
    assert [p.finish for p in pieces] == [None] * 8 + ["length"]
    stop = whole.text[2:4]
    (cut,) = served.generate("ABCDEF", GREEDY, stop=(stop,))
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.finish == "stop"
    (later,) = served.generate("ABCDEF", GREEDY, stop=(stop,), min_tokens=5)
    place = whole.text.find(stop, 5)
    assert later.text == (whole.text if place < 0 else whole.text[:place]) and len(later.tokens) >= 5
    (first,) = served.generate("ABCDEF", GREEDY, stop=(whole.text[5],), min_tokens=5)
    assert first.text == whole.text[:5] and first.finish == "stop"


class Marked(Letters):
    """One token more is written `<end>`, and shown to nobody."""

    def __init__(self, end: int) -> None:
        self.end = end

    def encode(self, text: str) -> list[int]:
        return [self.end] if text == "<end>" else super().encode(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        written = "" if skip_special_tokens else "<end>"
        return "".join(written if token == self.end else super(Marked, self).decode([token]) for token in token_ids)


def test_a_stop_text_may_be_a_token_that_no_text_shows() -> None:
    (whole,) = engine(tokenizer=Letters()).generate("ABCDEF", GREEDY)
    end = whole.tokens[3]
    served = engine(tokenizer=Marked(end))
    (stopped,) = served.generate("ABCDEF", GREEDY, stop="<end>")
    first = whole.tokens.index(end)
    assert stopped.finish == "stop" and stopped.tokens == whole.tokens[: first + 1]
    assert stopped.text == whole.text[:first]
    (later,) = served.generate("ABCDEF", GREEDY, stop=("<end>",), min_tokens=6)
    assert end not in later.tokens[:6]
    (other,) = engine(tokenizer=Marked(10_000)).generate("ABCDEF", GREEDY, stop="<end>", min_tokens=2)
    assert other.tokens == whole.tokens  # the model has no such token


def test_end_tokens_end_unless_told_otherwise() -> None:
    prompt = (9, 10, 11)
    tokens = expected("llama", prompt)
    end = tokens[2]
    first = tokens.index(end)
    (stopped,) = engine().generate([prompt], GREEDY, stop_tokens=(end,))
    assert stopped.tokens == tokens[: first + 1] and stopped.finish == "stop"
    (later,) = engine().generate([prompt], GREEDY, stop_tokens=(end,), min_tokens=6)
    assert end not in later.tokens[:6] and len(later.tokens) >= 6


def test_log_probabilities_are_the_models() -> None:
    prompt = [9, 10, 11, 12, 13, 14]
    (answer,) = engine(budget=4).generate([prompt], GREEDY, logprobs=3, prompt_logprobs=2)
    whole = torch.tensor([[*prompt, *answer.tokens]])
    with torch.no_grad():
        log = model("llama")(whole).logits[0].log_softmax(-1)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    for position, given in enumerate([*answer.prompt_logprobs[1:], *answer.logprobs]):
        assert given is not None and given.token == whole[0, position + 1]
        assert given.value == pytest.approx(log[position, given.token].item(), abs=1e-4)
        assert [t for t, _ in given.top] == log[position].topk(len(given.top)).indices.tolist()
    assert [len(p.top) for p in answer.logprobs] == [3] * 8


def test_leaving_a_loop_cancels() -> None:
    served = engine()
    for _ in served.stream((1, 2, 3), max_tokens=40):
        break
    assert not served.busy and served.metrics().used_blocks == 0
    stream = served.submit((1, 2, 3), max_tokens=40)
    served.step()
    del stream
    gc.collect()
    served.step()
    assert not served.busy and served.metrics().ended == {"cancelled": 2}


def test_many_at_once_by_async_for() -> None:
    served = engine(budget=64)
    prompts = prompts_of(Random(8), 7)

    async def ask(prompt: tuple[int, ...]) -> list[int]:
        return [token async for piece in served.submit(prompt, GREEDY) for token in piece.tokens]

    async def leave() -> None:
        async for _ in served.submit((1, 2, 3), max_tokens=60):  # more than the others' steps get done
            break

    async def everybody() -> list:
        return await asyncio.gather(leave(), *(ask(prompt) for prompt in prompts))

    answers = asyncio.run(everybody())
    assert answers[1:] == [expected("llama", prompt)[:8] for prompt in prompts]
    assert not served.busy and served.metrics().used_blocks == 0
    assert served.metrics().ended == {"length": 7, "cancelled": 1}


def test_a_deadline_ends_a_request() -> None:
    (answer,) = engine().submit((1, 2, 3), max_tokens=50, deadline=0.0).whole()
    assert (answer.finish, answer.tokens) == ("deadline", [])


def test_a_failing_step_ends_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine()
    run = served._programs.run
    monkeypatch.setattr(served._programs, "run", lambda *_: 1 / 0)
    (failed,) = served.generate([(1, 2, 3)], GREEDY)
    assert failed.finish == "error" and "ZeroDivisionError" in str(failed.error)
    monkeypatch.setattr(served._programs, "run", run)
    assert served.generate([(1, 2, 3)], GREEDY)[0].tokens == expected("llama", (1, 2, 3))[:8]


def test_a_step_ahead_changes_no_answer_and_a_surplus_token_is_dropped() -> None:
    """Some end by a token that is only seen when the next step is under way."""
    prompts = prompts_of(Random(4), 6)
    ends = [expected("llama", prompt)[3] for prompt in prompts]
    settings = [Sampling(max_tokens=8, temperature=0, stop_tokens=(end,), logprobs=1) for end in ends]
    plain, ahead = engine(), engine()
    ahead._ahead = 1
    told = [served.generate(prompts, settings) for served in (plain, ahead)]
    assert [(a.tokens, a.finish) for a in told[0]] == [(a.tokens, a.finish) for a in told[1]]
    for one, other in zip(*told, strict=True):  # steps hold other sequences, and a product rounds by its rows
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert all(a.token == b.token and a.value == pytest.approx(b.value, abs=1e-5) for a, b in pairs)
    assert "stop" in {answer.finish for answer in told[1]}
    assert plain.metrics().new_tokens == ahead.metrics().new_tokens and not ahead.busy
    assert ahead.metrics().used_blocks == 0


def test_the_first_token_waits_for_no_second_step() -> None:
    """Which may load kernels first. Later ones do not land at once."""
    served = engine()
    served._ahead = 1
    for early in (True, False):
        stream = served.submit((1, 2, 3), GREEDY)
        served.step()
        assert bool(stream.request.pieces) is early
        assert len(stream.whole()[0].tokens) == 8


def test_sequences_that_give_way_while_a_step_is_under_way_keep_its_token() -> None:
    prompts = [tuple(range(first, first + 12)) for first in (3, 20, 40)]
    tight = engine(memory=4 * 14 * token_bytes("llama"))
    tight._ahead = 1
    answers = tight.generate(prompts, max_tokens=12, temperature=0)
    assert [a.tokens for a in answers] == [expected("llama", prompt) for prompt in prompts]
    assert tight.scheduler.preemptions > 0 and tight.metrics().used_blocks == 0


def test_a_step_that_fails_as_it_lands_ends_all_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left in the cache is not found by anybody: the same prompt is computed again."""
    served, prompt = engine(), tuple(range(3, 20))
    served._ahead = 1
    land = served._runner.land
    monkeypatch.setattr(served._runner, "land", lambda flight: 1 / 0)
    (failed,) = served.generate([prompt], GREEDY)
    assert failed.finish == "error" and "ZeroDivisionError" in str(failed.error) and not served._flights
    monkeypatch.setattr(served._runner, "land", land)
    assert served.generate([prompt], GREEDY)[0].tokens == expected("llama", prompt)[:8]
    assert served.metrics().reused_tokens == 0 and served.metrics().used_blocks == 0


def test_a_device_that_fails_ends_what_ran_and_stays_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever drives the engine then starts another process."""
    served = engine()
    launch = served._runner.launch

    def fails(*args: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(served._runner, "launch", fails)
    (failed,) = served.generate([(3, 4, 5)], GREEDY)
    assert failed.finish == "error" and "illegal memory access" in str(failed.error) and served.broken
    monkeypatch.setattr(served._runner, "launch", lambda *args: 1 / 0)
    assert served.generate([(3, 4, 5)], GREEDY)[0].finish == "error" and served.broken
    monkeypatch.setattr(served._runner, "launch", launch)
    assert served.metrics().used_blocks == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_logits_that_are_no_numbers_end_their_request_alone(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    served = engine()
    served._ahead = ahead
    run = served._programs.run

    def spoilt(name: str, given: object, *more: bool) -> torch.Tensor:
        logits = run(name, given, *more).clone()  # type: ignore[arg-type]
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(served._programs, "run", spoilt)
    prompt = tuple(range(3, 20))
    first, second = served.submit(prompt, GREEDY), served.submit((4, 5, 6), max_tokens=1, temperature=0)
    served.step()
    assert [s.whole()[0].finish for s in (first, second)] == ["error", "length"]
    monkeypatch.setattr(served._programs, "run", run)
    assert served.generate([prompt], GREEDY)[0].tokens == expected("llama", prompt)[:8]
    assert served.metrics().reused_tokens == 0  # nobody finds what may have made it so


def test_requests_that_cannot_be_are_refused_at_once() -> None:
    served = engine(most_waiting=2)
    with pytest.raises(Refused, match=r"60 tokens of prompt and up to 8 more are 68; the model's positions hold 64"):
        served.submit([1] * 60, GREEDY)
    with pytest.raises(InputError, match="from 0 to 63, got 64"):
        served.submit([64], GREEDY)
    with pytest.raises(OptionError, match="logit_bias"):
        served.submit([1], logit_bias={99: 1.0})
    with pytest.raises(InputError, match="tokenizer"):
        served.submit("text")
    streams = [served.submit([1], GREEDY) for _ in range(2)]
    with pytest.raises(Refused) as refused:
        served.submit([1], GREEDY)
    assert refused.value.retry and served.metrics().refused == 2
    assert len([stream.whole() for stream in streams]) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0), ("budget", 2**30), ("block_size", 0), ("most_running", 0), ("most_waiting", 0), ("longest", 0),
        ("step_seconds", 0), ("step_seconds", float("nan")), ("speculate", -1), ("device", "tpu"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^{name}: expected "):
        Engine(model("llama"), **{"memory": "1MB", "compiled": False, name: value})  # type: ignore[arg-type]


def test_memory_that_runs_out_says_what_took_it() -> None:
    """At the weights, or at the pools; other errors stay what they are."""
    with pytest.raises(OptionError, match="memory: CUDA out of memory: while weights"), in_words():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
    some = Plan((0,), (10,), (100,), 5000)
    told = "weights take 7 bytes, the cache 1,000 of 5,000 offered; .*quantize"
    with pytest.raises(OptionError, match=told), in_words(some, 7):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …")
    with pytest.raises(RuntimeError, match="shapes"), in_words(some, 7):
        raise RuntimeError("shapes")


def test_memory_that_holds_no_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(OptionError, match=r"100 bytes are offered .* 2,048"):
        engine(memory=100)
    with pytest.raises(OptionError, match="expected a share, bytes or text"):
        engine(memory="much")


def test_a_timeline_is_written(tmp_path: Path) -> None:
    served = engine()
    served.generate([(1, 2, 3)], GREEDY)
    served.timeline(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["name"] for event in events] == ["mixed", *["decode"] * 7]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_of_ones_own(compiled: bool) -> None:
    torch.manual_seed(0)
    own = Llama(LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, hidden=48, vocab=40)).eval()

    def plainly(tokens: list[int]) -> list[int]:
        for _ in range(6):
            tokens = [*tokens, int(own(torch.tensor([tokens]))[0, -1].argmax())]
        return tokens[-6:]

    prompts = [[1, 2, 3, 4, 5], [7], [1, 2, 3, 9]]
    served = Engine(own, memory=2**18, block_size=2, budget=4, compiled=compiled)
    assert [a.tokens for a in served.generate(prompts, max_tokens=6, temperature=0)] == [plainly(p) for p in prompts]


WRONG = (
    {"max_tokens": 1.5}, {"max_tokens": None}, {"logprobs": 1.5}, {"logprobs": True}, {"prompt_logprobs": 0.5},
    {"n": 1.5}, {"min_tokens": 0.5}, {"seed": "x"}, {"seed": 1.5}, {"seed": 2**80}, {"temperature": None},
    {"temperature": "1"}, {"temperature": float("nan")}, {"top_k": 2**70}, {"top_k": 1.5}, {"top_p": None},
    {"min_p": "0"}, {"presence_penalty": None}, {"frequency_penalty": "1"}, {"logit_bias": {1: "a"}},
    {"logit_bias": {1.5: 2.0}}, {"allowed": (1.5,)}, {"stop_tokens": (1.5,)}, {"priority": "x"}, {"priority": None},
    {"priority": float("nan")}, {"deadline": "x"}, {"deadline": float("nan")},
)  # fmt: skip


def test_settings_of_a_wrong_kind_are_refused_before_they_spoil_the_step_of_others() -> None:
    served = engine()
    stream = served.submit((1, 2, 3), GREEDY)
    for wrong in WRONG:
        with pytest.raises(OptionError, match=next(iter(wrong))):
            served.submit((4, 5), **{"max_tokens": 4, **wrong})
    assert stream.whole()[0].tokens == expected("llama", (1, 2, 3))[:8]
    (answer,) = served.generate((1, 2, 3), max_tokens=np.int64(8), temperature=np.float32(0), logit_bias={1: 0})
    assert answer.tokens == expected("llama", (1, 2, 3))[:8]
