"""The endpoints: a Starlette application over a `Remote` engine.

In: HTTP. Out: answers in OpenAI's form. Errors have one form, with the field at fault. A client that goes is cancelled:
leaving `_pieces` tells the engine so.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tessera.serve.http import schema
from tessera.serve.http.errors import HttpError
from tessera.serve.http.exposition import Exposition
from tessera.serve.http.guard import Guard, body_of, log_access
from tessera.serve.http.remote import Remote
from tessera.serve.http.replies import Reply, event
from tessera.serve.http.schema import Asked, Limits
from tessera.serve.http.wire import Message

GONE = 499  # the status of whom nobody waits for
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Pieces = AsyncGenerator[tuple[int, Message], None]


@dataclass
class Config:
    """What the server is told, beside the engine's options."""

    model: str
    version: str
    host: str = "127.0.0.1"
    port: int = 8000
    grace: float = 30.0  # seconds in which what runs may end when the server is told to stop
    keys: tuple[str, ...] = ()
    per_key: int = 1024  # requests of one key under way
    limits: Limits = field(default_factory=Limits)
    access_log: bool = True


class App:
    def __init__(self, remote: Remote, config: Config):
        self.remote, self.config = remote, config
        self.guard, self.exposition = Guard(config.keys, config.per_key), Exposition(remote)
        self.draining = False
        guarded = {
            "/v1/completions": ("POST", self.completions), "/v1/chat/completions": ("POST", self.chat),
            "/tokenize": ("POST", self.tokenize), "/detokenize": ("POST", self.detokenize),
            "/v1/models": ("GET", self.models), "/v1/models/{name:path}": ("GET", self.model),
        }  # fmt: skip
        open_to_all = {"/health": self.health, "/ready": self.ready, "/metrics": self.metrics, "/version": self.version}
        routes = [Route(path, _Guarded(self, path, handler), methods=[how]) for path, (how, handler) in guarded.items()]
        routes += [Route(path, handler) for path, handler in open_to_all.items()]
        self.starlette = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})
        self.starlette.router.redirect_slashes = False  # who asks another address is told so

    async def _read(self, request: Request, read: Callable[[object, str, Limits], T]) -> T:
        """A body, understood."""
        limits = self.config.limits
        body = await body_of(request.headers, request.stream(), limits.body, limits.body_seconds)
        return read(body, self.config.model, limits)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, await self._read(request, schema.completion), chats=False)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, await self._read(request, schema.chat), chats=True)

    async def _generate(self, request: Request, asked: Asked, chats: bool) -> Response:
        reply = Reply(chats, self.config.model, asked.n * len(asked.prompts), asked.settings["logprobs"] is not None)
        headers = {"cache-control": "no-cache"} if asked.stream else {}
        headers |= {"x-ignored-fields": ", ".join(asked.ignored)} if asked.ignored else {}
        pieces = self._pieces(asked, reply, request.state.salt)
        if asked.stream:
            first = await _unless_gone(request, anext(pieces, None))  # refusals come before the answer begins
            request.state.told["status"] = GONE  # until its end
            body = self._events(asked, reply, first, pieces, request.state.told)
            return StreamingResponse(body, media_type="text/event-stream", headers=headers)
        await _unless_gone(request, self._all(reply, pieces))
        request.state.told |= reply.usage
        return JSONResponse(reply.whole(), headers=headers)

    async def _all(self, reply: Reply, pieces: Pieces) -> None:
        async with contextlib.aclosing(pieces):
            async for index, piece in pieces:
                reply.take(index, piece)

    async def _events(
        self, asked: Asked, reply: Reply, item: tuple[int, Message] | None, pieces: Pieces, told: dict
    ) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in reply.opening(asked.usage):
                yield chunk
            async with contextlib.aclosing(pieces):
                while item is not None:
                    if (chunk := reply.chunk(*item, asked.usage)) is not None:
                        yield chunk
                    item = await anext(pieces, None)
            yield reply.closing(asked.usage)
        except HttpError as error:
            yield event(error.body)
        finally:
            told |= reply.usage
        del told["status"]  # it was read to its end

    async def _pieces(self, asked: Asked, reply: Reply, salt: str) -> Pieces:
        """Pieces of all answers to all prompts, as they come."""
        shared = {
            "op": "submit", "settings": asked.settings, "deadline": asked.timeout, "priority": asked.priority,
            "salt": salt, "most": self.config.limits.max_tokens,
        }  # fmt: skip
        left = asked.n * len(asked.prompts)
        async with contextlib.aclosing(self.remote.messages(*({**shared, **one} for one in asked.prompts))) as messages:
            async for place, message in messages:
                if message["op"] == "began":
                    reply.prompt_tokens += int(message["prompt_tokens"])  # type: ignore[call-overload]
                    continue
                yield place * asked.n + int(message["index"]), message  # type: ignore[call-overload]
                left -= message["finish"] is not None
                if not left:
                    return

    async def tokenize(self, request: Request) -> Response:
        answer = await self.remote.ask({"op": "tokenize", **await self._read(request, schema.tokens_of)})
        tokens: list[int] = answer["tokens"]  # type: ignore[assignment]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.remote.about.get("longest")})

    async def detokenize(self, request: Request) -> Response:
        answer = await self.remote.ask({"op": "detokenize", **await self._read(request, schema.text_of)})
        return JSONResponse({"prompt": answer["text"]})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.config.model:
            raise HttpError(f"there is no model {request.path_params['name']!r}", "model", 404, "model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> Message:
        kind = {"id": self.config.model, "object": "model", "created": 0, "owned_by": "tessera"}
        return {**kind, "max_model_len": self.remote.about.get("longest")}

    async def health(self, request: Request) -> Response:
        """Is the server alive? An engine that starts again does not make it less so."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """May requests be sent here?"""
        able = self.remote.ready.is_set() and not self.draining
        return JSONResponse({"ready": able}, 200 if able else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.exposition.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.config.version})


class _Guarded:
    """An endpoint for those who may ask: counted while they are answered, and told of in the log."""

    def __init__(self, app: App, path: str, handler: Handler):
        self.app, self.path, self.handler = app, path, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, start, number = Request(scope, receive, send), time.monotonic(), f"req-{secrets.token_hex(8)}"
        app, who = self.app, ""
        request.state.told = {}  # for the log
        with contextlib.ExitStack() as stack:
            try:
                who = app.guard.who(request.headers, request.client.host if request.client else "")
                stack.enter_context(app.guard.enter(who))
                request.state.salt = who
                response = await self.handler(request)
            except Exception as error:
                response = _refusal(error)
            response.headers["x-request-id"] = number
            status = GONE
            try:
                await _answered(response, scope, receive, send)
                status = request.state.told.pop("status", response.status_code)
            finally:
                app.exposition.requests[self.path, status] += 1
                if app.config.access_log:
                    seconds = round(time.monotonic() - start, 4)
                    told = {"id": number, "method": request.method, "path": self.path, "status": status}
                    whose = who[:8] if app.config.keys else who
                    log_access({**told, "seconds": seconds, "who": whose, **request.state.told})


async def _answered(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer. A stream that is left halfway is closed, so that nobody computes on."""
    if not isinstance(response, StreamingResponse):
        return await response(scope, receive, send)
    body: AsyncGenerator[bytes, None] = response.body_iterator  # type: ignore[assignment]
    async with contextlib.aclosing(body):
        await response(scope, receive, send)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client goes."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, watching = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        for task in (doing, watching):
            task.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


def _refusal(error: Exception) -> Response:
    """An error in OpenAI's form."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    told = error if isinstance(error, HttpError) else HttpError(f"{type(error).__name__}: {error}", status=500)
    return JSONResponse(told.body, told.status, told.headers)


async def _not_found(request: Request, error: Exception) -> Response:
    status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None) or {}
    what = f"expected {headers['Allow']}" if "Allow" in headers else "there is no such endpoint"
    told = HttpError(f"{request.method} {request.url.path}: {what}", status=status)
    return JSONResponse(told.body, status, headers)
