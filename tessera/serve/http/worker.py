"""What the engine's process does (`__main__.py`).

In: messages of `wire.py`; the first one holds the options of the engine. Out: pieces, as steps give them. One thread
reads and turns text into tokens, so that steps need not wait for that; the other one computes steps while there is
anything to compute, and sends. When the server goes, so does this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

import torch

from tessera.serve.engine import Engine
from tessera.serve.guide import GuideError
from tessera.serve.http.wire import Message, pack, receive
from tessera.serve.requests import Piece
from tessera.serve.runner import Logprob
from tessera.serve.sampling import Sampling
from tessera.serve.scheduler import Refused
from tessera.serve.stream import Stream
from tessera.serve.tokenizer import token_bytes
from tessera.util.errors import TesseraError
from tessera.util.garbage import freeze
from tessera.util.log import log
from tessera.util.phases import account

PRIMITIVES = "256"  # products of one shape that oneDNN keeps ready, 17 kB each: steps come in thousands of sizes
BEAT = 1.0  # seconds between two reports of the engine's counts
FIELDS = {field.name: field.name for field in dataclasses.fields(Sampling)} | {"stop_tokens": "stop_token_ids"}
FIELDS |= {name: name for name in ("prompt", "messages")}
_TUPLES = ("stop", "stop_tokens", "allowed", "choices")


class Worker:
    """`heard` is what the server says over `sock`."""

    def __init__(self, engine: Engine, sock: socket.socket, heard: BinaryIO):
        self.engine, self.sock, self.heard = engine, sock, heard
        self._streams: dict[int, Stream] = {}
        self._news = threading.Event()
        self._sending = threading.Lock()
        self._told = 0.0

    def send(self, *messages: Message) -> None:
        packed = b"".join(map(pack, messages))
        with self._sending:
            self.sock.sendall(packed)

    # --- reading ---

    def read(self) -> None:
        """Until the server goes."""
        while (message := receive(self.heard)) is not None:
            self._handle(message)
            self._news.set()

    def _handle(self, message: Message) -> None:
        doings: dict[object, Callable[[Message], None]] = {
            "submit": self._submit, "cancel": self._cancel, "tokenize": self._tokenize, "detokenize": self._detokenize,
        }  # fmt: skip
        try:
            doings[message["op"]](message)
        except Exception as error:  # whatever a request does, it hurts only itself
            known = isinstance(error, TesseraError | ValueError | TypeError)
            text = str(error) if isinstance(error, TesseraError) else f"{type(error).__name__}: {error}"
            param, text = ("response_format", text) if isinstance(error, GuideError) else _field(text, message)
            retry = isinstance(error, Refused) and error.retry
            told: Message = {"error": text, "retry": retry, "fault": not known, "param": param}
            self.send({"op": "refused", "id": message["id"], **told})

    def _submit(self, message: Message) -> None:
        settings: dict = dict(message["settings"])  # type: ignore[call-overload]
        settings |= {name: tuple(settings[name]) for name in _TUPLES if settings.get(name) is not None}
        settings["logit_bias"] = {int(token): value for token, value in settings.get("logit_bias", {}).items()}
        tokens = self._prompt(message)
        longest = min(self.engine.longest or 2**20, self.engine.cache.capacity())
        if settings.get("max_tokens") is None:
            settings["max_tokens"] = max(1, min(longest - len(tokens), int(message["most"])))  # type: ignore[call-overload]
        asked: dict = {name: message[name] for name in ("deadline", "priority", "salt")}
        stream = self.engine.submit(tokens, Sampling(**settings), **asked)
        self.send({"op": "began", "id": message["id"], "prompt_tokens": len(tokens)})
        self._streams[message["id"]] = stream  # type: ignore[index]

    def _prompt(self, message: Message) -> list[int]:
        if message.get("messages") is None:
            return self.engine.tokens(message["prompt"])  # type: ignore[arg-type]
        tokenizer = self.engine.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise Refused("messages: the model's tokenizer has no chat template; ask /v1/completions with a prompt")
        text = tokenizer.apply_chat_template(message["messages"], tokenize=False, add_generation_prompt=True)  # type: ignore[union-attr]
        return self.engine.tokens(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[union-attr, call-arg]

    def _cancel(self, message: Message) -> None:
        if (stream := self._streams.pop(message["id"], None)) is not None:  # type: ignore[call-overload]
            stream.close()

    def _tokenize(self, message: Message) -> None:
        self.send({"op": "answer", "id": message["id"], "tokens": self._prompt(message)})

    def _detokenize(self, message: Message) -> None:
        text = self._text(self.engine.tokens(message["tokens"]))  # type: ignore[arg-type]
        self.send({"op": "answer", "id": message["id"], "text": text})

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self.engine.tokenizer is None else self.engine.tokenizer.decode(tokens, skip_special_tokens=False)

    # --- computing ---

    def run(self) -> None:
        """Steps while there is anything to compute; what they give is sent at once."""
        while True:
            if self.engine.busy:
                self.engine.step()
            else:
                self._news.wait(BEAT)
                self._news.clear()
            self._hand_out()
            if self.engine.broken:
                return  # the server starts another process
            if time.monotonic() - self._told >= BEAT:
                self._told = time.monotonic()
                now = self.engine.metrics()
                plain = dataclasses.asdict(dataclasses.replace(now, ended={}))  # type: ignore[arg-type]
                self.send({"op": "beat", "metrics": {**plain, "ended": dict(now.ended)}})

    def _hand_out(self) -> None:
        news = []
        for number, stream in list(self._streams.items()):
            pieces, request = stream.request.pieces, stream.request
            while pieces:
                piece = pieces.popleft()
                if piece.tokens or piece.text or piece.finish:
                    news.append(self._message(number, piece, request.answers[0].cached or 0))
            if not request.left and not pieces:
                self._streams.pop(number, None)
                stream.close()
        if news:
            self.send(*news)

    def _message(self, number: int, piece: Piece, cached: int) -> Message:
        logprobs = [self._spelt(logprob) for logprob in piece.logprobs]
        return {
            "op": "piece", "id": number, "index": piece.index, "text": piece.text, "tokens": len(piece.tokens),
            "logprobs": logprobs, "finish": piece.finish, "error": piece.error, "cached": cached,
        }  # fmt: skip

    def _spelt(self, logprob: Logprob) -> Message:
        top = [[list(self._bytes(token)), value] for token, value in logprob.top]
        return {"bytes": list(self._bytes(logprob.token)), "logprob": logprob.value, "top": top}

    def _bytes(self, token: int) -> bytes:
        written = getattr(self.engine.tokenizer, "convert_ids_to_tokens", lambda token: None)(token)
        return token_bytes(self._text([token]), written)


def _field(text: str, message: Message) -> tuple[str | None, str]:
    """The field at fault, and what is wrong with it, both as the request calls it."""
    name, _, told = text.partition(":")
    field = FIELDS.get(name)
    if field == "prompt":
        field = "tokens" if message["op"] == "detokenize" else "messages" if message.get("messages") else "prompt"
    return field, text if field is None else f"{field}:{told}"


def end_with(sock: socket.socket) -> None:
    """When the server has gone, end at once: also while the model is compiled, or a step runs."""
    poll = select.poll()
    poll.register(sock, 0)  # that the other side has gone is told unasked
    poll.poll()
    os._exit(0)


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=end_with, args=(sock,), daemon=True).start()
    heard = sock.makefile("rb")
    options = receive(heard)
    if options is None:
        return 0
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", PRIMITIVES)  # 1024 without it; read at the first product
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    try:
        options.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        engine = Engine(**options)  # type: ignore[arg-type]
        engine.warm()  # for the first request; what a crowd needs is captured as it comes
    except (TesseraError, OSError, torch.OutOfMemoryError) as error:
        sock.sendall(pack({"op": "failed", "error": str(error)}))
        return 2
    log(0, f"serve: the engine started in {account()}")
    freeze()  # the model and the compiler stay: to walk over them again would make everybody wait for 0.3 s
    worker = Worker(engine, sock, heard)
    running, waiting = engine.scheduler.most_running, engine.scheduler.most_waiting
    worker.send({"op": "ready", "longest": engine.longest, "running": running, "waiting": waiting})
    threading.Thread(target=worker.read, daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has gone
        worker.run()
    return 0
