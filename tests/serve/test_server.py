"""A real server process, asked by the openai client and by plain HTTP."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest

openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
parser = pytest.importorskip("prometheus_client.parser")

from fields import unlike  # noqa: E402
from served import Served, folder, serving  # noqa: E402

from tessera.serve.engine import Engine  # noqa: E402
from tessera.tools.cli import main  # noqa: E402

PROMPT = "the cat sat"
CHAT = [{"role": "user", "content": "größer?"}]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(where: Path) -> Iterator[Served]:
    keys = where.parent / "keys"
    keys.write_text("secret-1\nsecret-2\n")
    with serving(
        where, "--api-key-file", str(keys), "--max-body", "20000", "--most-waiting", "40", "--most-running", "16"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def engine(where: Path) -> Engine:
    return Engine(where, memory="16MB", compiled=False)


@pytest.fixture
def client(server: Served) -> Iterator:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-2", max_retries=0) as client:
        yield client


def post(server: Served, path: str, body: object, key: str = "secret-1", **more: object) -> object:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, content=json.dumps(body), headers=headers, timeout=60, **more)


def metrics(server: Served) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    found = parser.text_string_to_metric_families(text)
    return {s.name + "".join(f"/{v}" for v in s.labels.values()): s.value for f in found for s in f.samples}


def settled(server: Served) -> dict[str, float]:
    """The engine's counts once nothing runs any more. They come once a second, so two in a row must agree."""
    before = None
    for _ in range(40):
        now = metrics(server)
        idle = now.get("tessera_num_requests_running") == now.get("tessera_num_requests_waiting") == 0
        ended = {name: count for name, count in now.items() if name.startswith("tessera_request")}
        if idle and ended == before:
            return now
        before = ended
        time.sleep(1.2)
    raise AssertionError("something still runs")


def test_completions_are_those_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    asked = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 2}
    ours = client.completions.create(model="tiny", prompt=[PROMPT, [5, 6, 7]], **asked)
    wanted = engine.generate([PROMPT, [5, 6, 7]], **asked)
    assert [choice.text for choice in ours.choices] == [answer.text for answer in wanted]
    assert [choice.index for choice in ours.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in ours.choices} == {"length"}
    assert ours.usage.completion_tokens == 48 and ours.usage.prompt_tokens == len(engine.tokens(PROMPT)) + 3


def test_a_stream_makes_up_the_answer(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 20, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0] for c in chunks if c.choices]
    assert "".join(p.delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert pieces[0].delta.role == "assistant" and pieces[-1].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and chunks[-1].choices == []
    streamed = [one for p in pieces if p.logprobs for one in p.logprobs.content]
    assert streamed == whole.choices[0].logprobs.content and len(streamed) == 20
    assert all(len(one.top_logprobs) == 2 for one in streamed)


def test_usage_says_what_was_found_in_the_cache(client: openai.OpenAI) -> None:
    asked: dict = {"model": "tiny", "prompt": [[7, 8, 9] * 20, [9, 7, 7] * 20], "max_tokens": 2, "n": 2}
    first, again = (client.completions.create(**asked).usage for _ in range(2))
    *_, streamed = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    told = [usage.prompt_tokens_details.cached_tokens for usage in (first, again, streamed.usage)]
    assert told == [0, 96, 96] and first.prompt_tokens == 120  # whole blocks of 16, and never the last token


def test_tokens_that_are_parts_of_characters_are_told_apart(client: openai.OpenAI, engine: Engine) -> None:
    """Their bytes are their own, no two have one name, and offsets are places in the text."""
    asked = {"model": "tiny", "max_tokens": 40, "temperature": 1, "seed": 3}
    chat = client.chat.completions.create(**asked, messages=CHAT, logprobs=True, top_logprobs=4).choices[0]
    told = b"".join(bytes(one.bytes) for one in chat.logprobs.content)
    assert told.decode(errors="replace") == chat.message.content and "\ufffd" in chat.message.content
    assert all(len({top.token for top in one.top_logprobs}) == 4 for one in chat.logprobs.content)
    whole = client.completions.create(**asked, prompt=PROMPT, logprobs=4).choices[0]
    chunks = client.completions.create(**asked, prompt=PROMPT, logprobs=4, stream=True)
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [o for one in logprobs for o in one.text_offset] == whole.logprobs.text_offset
    assert all(len(top) == 4 for top in whole.logprobs.top_logprobs)
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or whole.text[offset:].startswith(token.strip("\ufffd"))


def test_stops_are_found_across_tokens_streamed_and_whole(client: openai.OpenAI, engine: Engine) -> None:
    """At every place of a text, of several lengths, among others: what comes before is the answer, no letter more."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0}
    (full,) = engine.generate(PROMPT, max_tokens=40, temperature=0)
    crossed = 0
    for start, length in itertools.product(range(0, len(full.text) - 3, 2), (2, 3)):
        stop = full.text[start : start + length]
        if "\ufffd" in stop:
            continue
        wanted = full.text[: full.text.index(stop)]
        whole = client.completions.create(**asked, stop=["@@@", stop]).choices[0]
        chunks = [c.choices[0] for c in client.completions.create(**asked, stop=stop, stream=True)]
        assert whole.text == "".join(c.text for c in chunks) == wanted, stop
        assert whole.finish_reason == chunks[-1].finish_reason == "stop"
        assert len(whole.logprobs.tokens) == sum(len(c.logprobs.tokens) for c in chunks if c.logprobs)
        crossed += not any(stop in token for token in whole.logprobs.tokens)
    assert crossed > 2


def test_stops_and_bias(client: openai.OpenAI, engine: Engine) -> None:
    (full,) = engine.generate(PROMPT, max_tokens=20, temperature=0)
    stop = full.text[3:5]
    cut = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (full.text[: full.text.index(stop)], "stop")
    forced = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, logit_bias={"70": 100}, extra_body={"top_k": 1}
    )
    assert forced.choices[0].text == engine.tokenizer.decode([70] * 3)  # type: ignore[union-attr]


def test_many_clients_at_once(server: Served, engine: Engine) -> None:
    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret-1", max_retries=0) as client:
            ask = client.completions.create
            answers = [ask(model="tiny", prompt=[i, i + 1], max_tokens=8, temperature=0) for i in range(1, 17)]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    wanted = engine.generate([[i, i + 1] for i in range(1, 17)], max_tokens=8, temperature=0)
    assert asyncio.run(everybody()) == [answer.text for answer in wanted]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "wishes": 3}, 400, "wishes"),
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("/v1/completions", {"prompt": "a", "model": "huge"}, 404, "model"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"1": 10**400}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, 400, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, None),
        ("/v1/completions", {"prompt": ["a"] * 41}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": "\udc00"}, 400, None),
        ("/v1/completions", {"prompt": [5, 10**7]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 600}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": [1] * 600}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, 400,
         "stream_options"),
        ("/v1/completions", {"prompt": "a", "timeout": 0.001, "max_tokens": 400}, 408, None),
        ("/v1/completions", [], 400, None),
        ("/v1/completions", {"prompt": "a" * 30000}, 413, None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400,
         "messages[0].content"),
        ("/v1/chat/completions", {"messages": [*CHAT, {"role": "user", "content": "a", "wishes": 1}]}, 400,
         "messages[1].wishes"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, 400,
         "messages[0].tool_calls"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, 400,
         "messages[0].tool_calls"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 5}, 400,
         "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "zq" * 400}]}, 400, "messages"),
        ("/detokenize", {"tokens": "no"}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "wishes": 1}, 400, "wishes"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ("/v1/models", {}, 405, None),
        ("/v1/nothing", {}, 404, None),
        ("/v1/completions/", {}, 404, None),
    ],
)  # fmt: skip
def test_errors_have_one_form(server: Served, path: str, body: object, status: int, param: str | None) -> None:
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"] and error["param"] == param
    named, colon, _ = error["message"].partition(": ")
    assert named == param or not colon or param is None  # in the request's own words


def test_keys(server: Served) -> None:
    for key in ("-", "secret", "secret-11"):
        assert post(server, "/v1/completions", {"prompt": "a"}, key).status_code == 401
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").json() == {"ready": True}
    assert "secret" not in "\n".join(server.log) and PROMPT not in "\n".join(server.log)


def test_a_full_queue_says_when_to_come_again(server: Served) -> None:
    asked = {"prompt": [[1]] * 20, "max_tokens": 400, "n": 2}
    headers = {"authorization": "Bearer secret-1"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**asked, "stream": True}, headers=headers) as first:
        lines = first.iter_lines()  # to drop it would close the connection
        next(lines)
        answer = post(server, "/v1/completions", asked)
        assert answer.status_code == 429 and answer.headers["retry-after"]
    settled(server)


def test_tokens_and_text(server: Served, engine: Engine) -> None:
    text = "größer ☃"
    tokens = post(server, "/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == engine.tokens(text) and tokens["count"] == len(tokens["tokens"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = post(server, "/tokenize", {"messages": CHAT}).json()["tokens"]
    assert post(server, "/detokenize", {"tokens": chat}).json()["prompt"] == "<user>größer?\n<assistant>"


def test_whoever_goes_is_cancelled(server: Served) -> None:
    before = settled(server).get("tessera_request_success_total/cancelled", 0)
    body = {"prompt": PROMPT, "max_tokens": 480, "stream": True}
    headers = {"authorization": "Bearer secret-1"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, headers=headers, timeout=0.1)
    now = settled(server)
    assert now["tessera_request_success_total/cancelled"] == before + 2 and now["tessera_kv_cache_usage_ratio"] == 0


def test_metrics_add_up(server: Served) -> None:
    before = settled(server)
    post(server, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 6})
    now = settled(server)
    grown = {name: now[name] - before.get(name, 0) for name in now}
    assert grown["tessera_generation_tokens_total"] == 6 and grown["tessera_prompt_tokens_total"] == 3
    assert grown["tessera_time_to_first_token_seconds_count"] == grown["tessera_request_queue_time_seconds_count"] == 1
    assert grown["tessera_inter_token_latency_seconds_count"] == 5
    assert grown["tessera_e2e_request_latency_seconds_bucket/+Inf"] == 1
    line = json.loads(next(line for line in reversed(server.log) if line.startswith('{"time"')))
    assert line["path"] == "/v1/completions" and line["status"] == 200 and line["completion_tokens"] == 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: Served, engine: Engine) -> None:
    def curl(body: dict) -> str:
        command = ["curl", "-sSN", "-w", "%{http_code}", "-H", "Authorization: Bearer secret-1", "--data-binary", "@-"]
        asked = {**body, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
        to = f"{server.url}/v1/completions"
        return subprocess.run(
            [*command, to], input=json.dumps(asked), capture_output=True, text=True, check=True
        ).stdout

    (wanted,) = engine.generate(PROMPT, max_tokens=6, temperature=0)
    whole = curl({})
    assert whole.endswith("200") and json.loads(whole[:-3])["choices"][0]["text"] == wanted.text
    *events, end = curl({"stream": True}).splitlines()
    told = [json.loads(line[6:])["choices"][0]["text"] for line in events if line.startswith("data: {")]
    assert "".join(told) == wanted.text and events[-2:] == ["data: [DONE]", ""] and end == "200"
    assert curl({"n": 0}).endswith("400")


def test_a_server_is_measured_and_looked_at(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--requests 12 --rate 40 --input-tokens 9 --output-tokens 5 --shared-prefix 20 --vocabulary 200"
    assert main(["bench", "serve", "--url", server.url, "--key", "secret-1", "--json", *asked.split()]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["requests"]["note"] == "0 refused or failed" and rows["throughput"]["value"] > 0
    assert 0 < rows["first token, p50"]["value"] <= rows["first token, p99"]["value"]
    time.sleep(1.2)
    settled(server)
    assert main(["top", server.url, "--json", "--every", "0.1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["running"] == 0 and "new tokens/s" in shown


def test_broken_http_hurts_nobody(server: Served) -> None:
    address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    for sent in (
        b"\x00\xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{",
        b"GET",
    ):
        with socket.create_connection(address) as sock:
            sock.sendall(sent)
    deep = httpx.post(f"{server.url}/v1/completions", content=b"[" * 9000, headers={"authorization": "Bearer secret-1"})
    assert deep.status_code == 400 and httpx.get(f"{server.url}/health").status_code == 200


def children(process: int) -> list[int]:
    """Processes that this one has started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.sweep  # two starts of an engine
def test_an_engine_that_is_killed_comes_back_and_sigterm_drains(where: Path) -> None:
    with serving(where) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=480, stream=True)
        next(stream)
        (worker,) = children(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine ended"):
            list(stream)
        again = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)  # waits for the new engine
        assert again.usage.completion_tokens == 4 and metrics(server)["tessera_engine_starts_total"] == 2
        stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=300, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(60) == 0
        assert not Path(f"/proc/{worker}").exists()


@pytest.mark.sweep  # a start of an engine
@pytest.mark.parametrize(("grace", "signals"), [("1", 1), ("300", 2)])
def test_what_does_not_end_in_time_is_told_so(where: Path, grace: str, signals: int) -> None:
    """After the grace, or a second signal, every connection has an answer: a stream its error, the others a status."""
    asked = {"prompt": PROMPT, "max_tokens": 490, "n": 16, "ignore_eos": True}
    with serving(where, "--grace", grace) as server, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(post, server, "/v1/completions", {**asked, "stream": i % 2 == 0}) for i in range(4)]
        while metrics(server).get("tessera_num_requests_running", 0) < 1:
            time.sleep(0.1)
        time.sleep(1)  # all four have come
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        answers = [one.result() for one in waiting]
        assert [answer.status_code for answer in answers] == [200, 503, 200, 503]
        assert all("the server stops" in answer.text for answer in answers)
        assert server.process.wait(60) == 0 and not [line for line in server.log if "Traceback" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: expected a folder with a config.json"),
        (["{where}", "--draft", "nowhere"], "nowhere: expected a folder with a config.json"),
        (["{where}", "--port", "{taken}"], "free port"),
        (["{where}", "--port", "99999"], "free port"),
        (["{where}", "--memory", "1KB"], "memory"),
        (["{where}", "--budget", "0"], "budget: expected 1 to 1048576, got 0"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line(
    where: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        named = {"where": where, "taken": taken.getsockname()[1]}
        given = [a.format(**named) for a in arguments]
        assert main(["serve", *given, "--device", "cpu", *([] if "--port" in given else ["--port", "0"])]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_server_does_without_torch() -> None:
    """Neither what answers requests nor the command that starts it."""
    code = "import sys, tessera.serve.http.main, tessera.tools.serve; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("path", "asked", "whole", "chunk"),
    [
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 2}, "Completion", "Completion"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 2}, "chat.ChatCompletion",
         "chat.ChatCompletionChunk"),
    ],
)  # fmt: skip
def test_answers_are_openais_field_by_field(server: Served, path: str, asked: dict, whole: str, chunk: str) -> None:
    def schema(name: str) -> type:
        return functools.reduce(getattr, name.split("."), openai.types)

    asked = {**asked, "max_tokens": 4, "n": 2}
    answer = post(server, path, asked).json()
    assert not unlike(answer, schema(whole))
    assert unlike({**answer, "wishes": 1}, schema(whole)) == ["answer.wishes: not in the schema"]
    streamed = post(server, path, {**asked, "stream": True, "stream_options": {"include_usage": True}}).text
    events = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert events[-1] == "[DONE]" and len(events) > 8
    for event in events[:-1]:
        given = json.loads(event)
        for choice in given["choices"]:  # the client's class of whole answers stands for pieces too, but for their end
            if path == "/v1/completions" and choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"
        assert not unlike(given, schema(chunk))
    wrong = post(server, path, {**asked, "n": 0}).json()
    assert wrong.keys() == {"error"} and not unlike(wrong["error"], openai.types.shared.ErrorObject)


# --- structured output ---

structured = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance")


class Pet(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "mat"]
    legs: int = pydantic.Field(ge=0, le=4)


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    name: str = pydantic.Field(max_length=6)
    happy: bool
    pets: list[Pet] = pydantic.Field(max_length=2)


DEEP = functools.reduce(lambda inner, _: {"items": inner}, range(400), {})
WIDE = {"properties": dict.fromkeys(map(str, range(1001)), {})}
SCHEMA = {"name": "person", "strict": True, "schema": Person.model_json_schema()}


@structured
def test_the_client_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    """`parse` builds the schema from a class, and reads the answer by it."""
    answer = client.chat.completions.parse(
        model="tiny", messages=CHAT, response_format=Person, max_tokens=400, n=3, seed=1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)


@structured
def test_streams_validate_too(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 400, "seed": 2, "n": 2}
    chosen = {"type": "json_schema", "json_schema": SCHEMA}
    texts, ends = ["", ""], []
    for chunk in client.chat.completions.create(**asked, response_format=chosen, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert ends == ["stop"] * 2 and all(Person.model_validate_json(text) for text in texts)
    whole = client.chat.completions.create(**asked, response_format=chosen)
    assert [choice.message.content for choice in whole.choices] == texts


@structured
def test_many_grammars_at_once(server: Served) -> None:
    formats = [
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "regex", "regex": "[a-f]{4}(0|1)"},
        {"type": "choices", "choices": ["yes", "größer"]},
        {"type": "text"},
    ]
    rights = [
        Person.model_validate_json,
        lambda text: re.fullmatch("[a-f]{4}(0|1)", text),
        lambda text: text in ("yes", "größer"),
        lambda text: text is not None,
    ]

    async def everybody() -> list:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret-1", max_retries=0) as client:
            ask = client.chat.completions.create
            asked = {"model": "tiny", "messages": CHAT}
            most = [400, 400, 400, 9]
            return await asyncio.gather(
                *(ask(**asked, seed=i, max_tokens=most[i % 4], response_format=formats[i % 4]) for i in range(16))
            )

    for i, answer in enumerate(asyncio.run(everybody())):
        assert rights[i % 4](answer.choices[0].message.content), answer
        assert answer.choices[0].finish_reason == ("stop" if i % 4 < 3 else "length")


@structured
def test_any_json_object(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": CHAT, "max_tokens": 300, "seed": 11, "logit_bias": {"92": 20}}  # 92: }
    answer = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@structured
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("json", "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "regex"}, "response_format.type"),
        ({"type": "choices", "choices": [1]}, "response_format.type"),
        ({"type": "choices", "choices": []}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}, "response_format"),
        ({"type": "regex", "regex": "(a"}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_names_the_field(client: openai.OpenAI, given: object, param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(
                model="tiny", messages=CHAT, max_tokens=5, stream=stream, extra_body={"response_format": given}
            )
        assert raised.value.param == param and raised.value.type == "invalid_request_error"


def test_the_log_says_what_starting_took(server: Served) -> None:
    (line,) = [line for line in server.log if "the engine started in" in line]
    assert all(f"{phase} " in line for phase in ("python", "imports", "weights", "tokenizer", "cache", "other"))
