"""Structured output: every answer follows its grammar, and grammars that nobody can follow are refused in time."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from served import folder

from tessera.serve.engine import Engine
from tessera.serve.finite import has_end
from tessera.serve.guide import LIMITS, GuideError
from tessera.serve.sampling import Sampling

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("guided") / "tiny")


@pytest.fixture(scope="module")
def engine(where: Path) -> Engine:
    return Engine(where, memory="16MB", compiled=False, check=True)


def is_person(text: str) -> bool:
    found = json.loads(text)
    assert found.keys() == {"name", "age", "tags"}
    assert isinstance(found["name"], str) and len(found["name"]) <= 6
    assert type(found["age"]) is int and 0 <= found["age"] <= 120
    assert len(found["tags"]) <= 2 and set(found["tags"]) <= {"a", "b"}
    return True


def test_every_answer_follows_its_grammar(engine: Engine) -> None:
    """Different grammars side by side, several answers each, beside one that follows none."""
    choices = ("größer", 'a "b"\n', "☃")
    settings = [
        Sampling(max_tokens=300, json_schema=PERSON, n=4, seed=1),
        Sampling(max_tokens=300, regex=r"[0-9]{3}-[a-c]{2,5}", n=3, seed=2),
        Sampling(max_tokens=300, choices=choices, n=3, temperature=2.0, seed=3),
        Sampling(max_tokens=9, temperature=0),
        Sampling(max_tokens=300, json_schema=json.dumps(PERSON), temperature=0, logprobs=1, presence_penalty=1.0),
    ]
    alone = engine.generate(["the cat"], settings[3])[0].tokens
    answers = engine.generate(["the cat"] * len(settings), settings)
    assert all(answer.finish == "stop" for answer in (*answers[:10], answers[11]))
    assert all(is_person(answer.text) for answer in (*answers[:4], answers[11]))
    assert len({answer.text for answer in answers[:4]}) > 1
    assert all(re.fullmatch(r"[0-9]{3}-[a-c]{2,5}", answer.text) for answer in answers[4:7])
    assert all(answer.text in choices for answer in answers[7:10])
    assert answers[10].tokens == alone and answers[10].finish == "length"


def test_any_object_and_recursion_with_an_end(engine: Engine) -> None:
    tree = {"type": "object", "properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["x"]}
    tree["additionalProperties"] = False
    for answer in engine.generate(["the cat"], max_tokens=400, json_schema=tree, n=4, seed=5):
        inner = json.loads(answer.text)
        while inner is not None:
            assert inner.keys() == {"x"}
            inner = inner["x"]
    for answer in engine.generate(["the cat"], max_tokens=150, json_schema={"type": "object"}, n=2, seed=7):
        assert answer.finish == "length" or isinstance(json.loads(answer.text), dict)


def test_stops_and_lengths_still_end_an_answer(engine: Engine) -> None:
    (cut,) = engine.generate("the cat", max_tokens=2, json_schema=PERSON)
    assert cut.finish == "length" and len(cut.tokens) == 2
    (stopped,) = engine.generate("the cat", max_tokens=300, json_schema=PERSON, stop='"age"', seed=1)
    assert stopped.finish == "stop" and '"name"' in stopped.text and '"age"' not in stopped.text


@pytest.mark.parametrize("drafted", [False, True])
def test_guesses_change_nothing(where: Path, engine: Engine, drafted: bool) -> None:
    """Masks are those of the places that are verified, so the same seed gives the same answers."""
    draft = where if drafted else None
    guessing = Engine(where, memory="16MB", compiled=False, check=True, speculate=4, draft=draft)
    items = {"type": "array", "items": {"enum": ["once", "upon"]}, "minItems": 8, "maxItems": 10}
    asked = {"max_tokens": 400, "json_schema": items, "n": 2, "seed": 4, "temperature": 0.7}
    plain, guessed = engine.generate("once upon", **asked), guessing.generate("once upon", **asked)
    assert [answer.tokens for answer in guessed] == [answer.tokens for answer in plain]
    assert all(8 <= len(json.loads(answer.text)) <= 10 for answer in guessed)
    assert guessing.metrics().accepted > 10 and guessing.metrics().steps < engine.metrics().steps


def test_preemption_keeps_the_place(where: Path) -> None:
    tight = Engine(where, memory=30 * 2 * 2 * 32 * 4 * 4, block_size=4, budget=16, compiled=False, check=True)
    code = "[a-z]{20}-[0-9]{20}"
    streams = [tight.submit("the cat", max_tokens=60, regex=code, seed=i) for i in range(4)]
    answers = [answer for stream in streams for answer in stream.whole()]
    assert tight.metrics().preemptions > 0
    assert all(answer.finish == "stop" and re.fullmatch(code, answer.text) for answer in answers)


ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}
CHAIN = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(900)} | {"a900": {"type": "string"}}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema: Invalid type: nonsense"),
        ({"json_schema": "{"}, "json_schema: expected JSON"),
        ({"json_schema": "[]"}, "json_schema: expected an object"),
        ({"json_schema": {"type": {1, 2}}}, "json_schema: expected JSON"),
        ({"json_schema": {"$ref": "#"}}, "^json_schema: no value satisfies it.*without end"),
        ({"json_schema": ENDLESS}, "without end"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema: Resource"),
        ({"json_schema": {"$defs": CHAIN, "$ref": "#/$defs/a0"}}, "at most 500 levels"),
        ({"json_schema": '{"not":' * 5000 + "{}" + "}" * 5000}, "at most 500 levels"),
        ({"json_schema": {"enum": ["x" * 100_000]}}, "at most 65536 characters"),
        ({"json_schema": {"properties": {f"p{i}": {} for i in range(1001)}}}, "at most 1000 properties"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema: Unsatisfiable"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema: Unimplemented keys"),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": ""}, "regex: no text but the empty one"),
        ({"regex": "(a{0})?"}, "regex: no text but the empty one"),
        ({"regex": "a" * 70_000}, "regex: expected at most"),
        ({"choices": ()}, "choices: expected at least one"),
        ({"choices": ("a", "")}, "choices: expected at least one"),
        ({"choices": ("a",), "regex": "a"}, "choices: expected one of"),
        ({"choices": ("a",), "ignore_eos": True}, "ignore_eos"),
        ({"choices": ("a",), "min_tokens": 2}, "min_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_time(engine: Engine, asked: dict, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(GuideError, match=message):
        engine.submit("the cat", **{"max_tokens": 5, **asked})
    assert time.monotonic() - start < 2 and not engine.busy


def test_a_grammar_that_becomes_too_hard_ends_its_own_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "step_lexer_fuel", 3000)
    hard = engine.submit("the cat", max_tokens=100, seed=3, regex="((.*a.{20}|.*e.{30}|.*o.{40}|.*t.{50}){5}){5}")
    (plain,), (guided,) = engine.generate("the cat", max_tokens=8), hard.whole()
    assert plain.finish == "length" and len(plain.tokens) == 8
    assert guided.finish == "error" and "the grammar became too hard" in str(guided.error)


def test_a_guide_needs_a_tokenizer_that_can_be_read() -> None:
    from families import model

    with pytest.raises(GuideError, match="fast tokenizer"):
        Engine(model("llama"), memory="1MB", compiled=False).submit([1, 2], regex="a")


def test_which_schemas_have_an_end() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
    node["required"] = ["next"]
    assert has_end({"$defs": {"n": node}, "$ref": "#/$defs/n"})
    assert has_end({"type": "object", "properties": {"x": {"$ref": "#"}}})
    assert has_end({"type": "array", "items": {"$ref": "#"}})
    assert has_end({"type": ["object", "null"], "properties": {"x": {"$ref": "#"}}, "required": ["x"]})
    assert not has_end({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
    assert not has_end({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    assert not has_end({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]})
    assert has_end({"properties": {"enum": {"$ref": "#/$defs/s"}}, "$defs": {"s": {"type": "string"}}})
