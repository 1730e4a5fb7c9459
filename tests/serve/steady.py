"""Many requests at random moments: some cancelled, also while they are admitted, some malformed, some half read. Also a
script:

    PYTHONPATH=. python tests/serve/steady.py 10000          an engine in this process
    PYTHONPATH=. python tests/serve/steady.py 10000 http     a real server process, over HTTP

What ends how depends on the clock; that everything ends once, and that nothing is left behind, does not.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))

from tessera.serve.engine import Engine
from tessera.util.errors import TesseraError

CANCELLED, MALFORMED, HALF_READ = 0.30, 0.05, 0.02  # shares of all requests
AT_ONCE = 48  # requests under way
BODIES = ({"prompt": "a", "temperature": 9}, {"prompt": []}, {"prompt": "a", "wishes": 1}, {"prompt": [10**6]}, [])


def held(process: int | str = "self") -> dict[str, int]:
    """What a process holds: bytes of memory, threads, files."""
    root = Path(f"/proc/{process}")
    pages = int((root / "statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(list((root / "task").iterdir())),
        "files": len(list((root / "fd").iterdir())),
    }


def kind_of(draw: Random) -> str:
    shares = {"cancelled": CANCELLED, "malformed": MALFORMED, "half read": HALF_READ}
    return draw.choices([*shares, "whole"], [*shares.values(), 1 - sum(shares.values())])[0]


async def crowd(ask: object, draw: Random, count: int, early: object) -> Counter[str]:
    """`ask(kind)` for `count` kinds; `early` is called after a tenth of them. How often each came to which end."""
    gate, ends = asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(number: int) -> None:
        kind = kind_of(draw)
        async with gate:
            if number == count // 10:
                early()  # type: ignore[operator]
            task = asyncio.create_task(ask(kind))  # type: ignore[operator]
            if kind == "cancelled":
                asyncio.get_running_loop().call_later(draw.random() * 0.3, task.cancel)
            try:
                ends[f"{kind}: {await task}"] += 1
            except asyncio.CancelledError:
                ends[f"{kind}: cancelled"] += 1

    await asyncio.gather(*(one(i) for i in range(count)))
    return ends


class Engines:
    """Requests to an engine in this process."""

    def __init__(self, engine: Engine, seed: int = 0):
        self.engine, self.draw, self.answers = engine, Random(seed), 0

    async def ask(self, kind: str) -> str:
        draw = self.draw
        prompt = [draw.randrange(2, 64) for _ in range(draw.randint(1, 30))]
        if kind == "malformed":
            prompt = draw.choice([[], [999], [1] * 70])
        try:
            stream = self.engine.submit(
                prompt, max_tokens=draw.randint(1, 12), n=draw.choice([1, 1, 2]), temperature=draw.choice([0.0, 1.0]),
                priority=draw.randint(0, 2), deadline=draw.choice([None, None, 0.5]),
                presence_penalty=draw.choice([0.0, 0.5]),
            )  # fmt: skip
        except TesseraError:
            assert kind == "malformed"
            return "refused"
        assert kind != "malformed"
        self.answers += stream.request.settings.n
        ends = 0
        async for piece in stream:
            ends += piece.finish is not None
            assert piece.finish != "error", piece.error
            if kind == "half read":
                await asyncio.sleep(draw.random() / 10)
                return "left"
        assert ends == stream.request.settings.n, "an answer did not end once"
        return "whole"


def in_process(engine: Engine, count: int) -> tuple[Counter[str], dict[str, int]]:
    """The ends, and how much more this process holds than after a tenth of the requests (files: than before). Raises
    AssertionError where anything is left."""
    asked, before, after = Engines(engine), held(), {}
    threads = threading.active_count()

    def early() -> None:
        gc.collect()
        after.update(held())

    ends = asyncio.run(crowd(asked.ask, asked.draw, count, early))
    engine.step()  # reads the notes of streams that were dropped
    facts = engine.metrics()
    assert not engine.busy and facts.used_blocks == facts.running == facts.waiting == 0
    assert sum(facts.ended.values()) == asked.answers and "error" not in facts.ended
    assert sum(ends.values()) == count and threading.active_count() == threads
    gc.collect()
    now = held()
    # Libraries start threads of their own at the first request, and keep them.
    return ends, {"files": now["files"] - before["files"], **{k: now[k] - after[k] for k in ("threads", "memory")}}


async def over_http(url: str, processes: list[int], count: int) -> tuple[Counter[str], list[dict[str, int]]]:
    """The ends, and what each of the server's processes holds more than after a tenth of the requests (files: than
    before)."""
    import httpx

    draw, early, before = Random(0), list[dict[str, int]](), [held(p) for p in processes]
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(kind: str) -> str:
            if kind == "malformed":
                answer = await client.post("/v1/completions", json=draw.choice(BODIES))
                assert answer.status_code == 400 and answer.json()["error"]["message"]
                return "refused"
            body = {
                "prompt": [draw.randrange(200) for _ in range(draw.randint(1, 60))],
                "max_tokens": draw.randint(1, 16),
            }
            body |= {"n": draw.choice([1, 1, 2]), "temperature": draw.choice([0, 1]), "stream": kind == "half read"}
            if kind != "half read" and draw.random() < 0.5:
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code in (200, 429), answer.text
                done = answer.status_code == 200
                assert not done or all(choice["finish_reason"] for choice in answer.json()["choices"])
                return "whole" if done else "refused"
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                assert answer.status_code in (200, 429)
                ends = 0
                async for line in answer.aiter_lines():
                    ends += '"finish_reason":"length"' in line
                    assert '"error"' not in line or answer.status_code == 429, line
                    if kind == "half read":
                        await asyncio.sleep(draw.random() / 5)
                        return "left"
            assert answer.status_code == 429 or ends == body["n"], "an answer did not end once"
            return "whole" if answer.status_code == 200 else "refused"

        ends = await crowd(ask, draw, count, lambda: early.extend(held(p) for p in processes))
    await asyncio.sleep(3)  # the server closes what the client has closed
    more = []
    for process, then, was in zip(processes, before, early, strict=True):
        now = held(process)
        more.append({"files": now["files"] - then["files"], **{k: now[k] - was[k] for k in ("threads", "memory")}})
    return ends, more


if __name__ == "__main__":
    number, start = int(sys.argv[1]), time.monotonic()
    if "http" in sys.argv:
        import httpx
        from served import folder, serving

        with tempfile.TemporaryDirectory() as where, serving(folder(Path(where) / "tiny"), "--no-access-log") as server:
            pid = server.process.pid
            workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found, more = asyncio.run(over_http(server.url, [pid, *map(int, workers)], number))
            text = httpx.get(f"{server.url}/metrics").text
        # Many a client cancels before its request is sent; of the others, status 499 says how many the server has seen.
        told = ("tessera_kv", "tessera_num_requests", "tessera_request_s", "tessera_http_requests_total")
        print("\n".join(line for line in text.splitlines() if line.startswith(told)))
    else:
        from families import model, token_bytes

        served = Engine(model("llama"), block_size=4, budget=64, memory=600 * token_bytes("llama"), compiled=False)
        found, more = in_process(served, number)
    print(f"{number} requests in {time.monotonic() - start:.0f} s: {dict(found)}\nmore is held: {more}")
