"""When requests arrive at a server, how long they are, and what became of them.

In: a rate, lengths, or a file of what once arrived. Out: `Arrival`s; and over HTTP a `Result` for each, from any server
that speaks OpenAI's completions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles
from types import ModuleType

from tessera.util.errors import InputError, OptionError

BURST = 8  # requests that come together


@dataclass(frozen=True)
class Arrival:
    at: float  # seconds from the start
    prompt: list[int]
    out: int


@dataclass
class Result:
    """One request: seconds to its first token, between its tokens, and altogether."""

    status: int = 0
    first: float = 0.0
    between: list[float] = field(default_factory=list)
    whole: float = 0.0
    tokens: int = 0
    error: str = ""


def times(count: int, rate: float, bursty: bool, draw: Random) -> Iterator[float]:
    """Poisson arrivals, or the same rate in bursts; without a rate, all at once."""
    now = 0.0
    for i in range(count):
        if rate and (not bursty or i % BURST == 0):
            now += draw.expovariate(rate / (BURST if bursty else 1))
        yield now


def arrivals(
    count: int, rate: float, lengths: tuple[int, int], shared: int = 0, bursty: bool = False, spread: float = 0.0,
    vocabulary: int = 10_000, seed: int = 0,
) -> list[Arrival]:  # fmt: skip
    """Requests of about `lengths` tokens in and out, give or take the share `spread`; all begin alike."""
    draw = Random(seed)

    def about(length: int) -> int:
        return max(1, round(length * (1 + spread * draw.uniform(-1, 1))))

    common = [draw.randrange(1, vocabulary) for _ in range(shared)]
    return [
        Arrival(at, common + [draw.randrange(1, vocabulary) for _ in range(about(lengths[0]))], about(lengths[1]))
        for at in times(count, rate, bursty, draw)
    ]


def replayed(path: Path, vocabulary: int = 10_000) -> list[Arrival]:
    """Lines of JSON: `at` in seconds, `prompt_tokens`, `output_tokens`."""
    draw, arrivals = Random(0), []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            prompt = [draw.randrange(1, vocabulary) for _ in range(int(entry["prompt_tokens"]))]
            arrivals.append(Arrival(float(entry["at"]), prompt, int(entry["output_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}:{number}: expected at, prompt_tokens and output_tokens: {error!r}") from None
    return arrivals


async def drive(
    url: str, model: str, key: str, requests: list[Arrival], client: str = "httpx"
) -> tuple[list[Result], float]:
    """Send every request at its time; what came of each, and how long all of them took. `client`: httpx, which any
    server is asked by, or the client of openai."""
    async with _asking(url, key) if client == "httpx" else _asking_as_openai(url, key) as events:
        start = time.perf_counter()

        async def ask(arrival: Arrival) -> Result:
            await asyncio.sleep(max(0.0, start + arrival.at - time.perf_counter()))
            return await _one(events, model, arrival)

        results = await asyncio.gather(*(ask(arrival) for arrival in requests))
        return list(results), time.perf_counter() - start


Events = Callable[[dict], AsyncIterator[dict]]  # the body of a request -> its events


@contextlib.asynccontextmanager
async def _asking(url: str, key: str) -> AsyncIterator[Events]:
    httpx = _needed("httpx")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)

    async def events(body: dict) -> AsyncIterator[dict]:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                yield {"status": answer.status_code, "error": (await answer.aread()).decode()[:200]}
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, headers=headers) as client:
        yield events


@contextlib.asynccontextmanager
async def _asking_as_openai(url: str, key: str) -> AsyncIterator[Events]:
    openai = _needed("openai")

    async def events(body: dict) -> AsyncIterator[dict]:
        more = {"extra_body": {"ignore_eos": body.pop("ignore_eos")}}
        try:
            async for chunk in await client.completions.create(**body, **more):
                yield chunk.model_dump()
        except openai.APIStatusError as error:
            yield {"status": error.status_code, "error": str(error)[:200]}
        except openai.APIError as error:  # within a stream
            yield {"status": 500, "error": str(error)[:200]}

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=600) as client:
        yield events


async def _one(events: Events, model: str, arrival: Arrival) -> Result:
    body = {
        "model": model, "prompt": arrival.prompt, "max_tokens": arrival.out, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    result, start = Result(200), time.perf_counter()
    last: float | None = None
    async for news in events(body):
        now = time.perf_counter()
        if "error" in news:
            result.status, result.error = news.get("status", 500), str(news["error"])[:200]
        elif news["choices"]:
            if last is None:
                result.first = now - start
            else:
                result.between.append(now - last)
            last = now
        if news.get("usage"):
            result.tokens = news["usage"]["completion_tokens"]
    result.whole = time.perf_counter() - start
    return result


def served_model(url: str, key: str) -> str:
    """The name of the first model that a server has."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    httpx = _needed("httpx")
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=60)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{url}: expected a server that answers: {error}") from None
    if answer.status_code != 200:
        raise InputError(f"{url}/v1/models: expected 200, got {answer.status_code}: {answer.text[:200]}")
    return answer.json()["data"][0]["id"]


def _needed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise OptionError(f"expected the package {package}, which is not installed: pip install {package}") from None


def percentile(values: list[float], share: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[share - 1]
