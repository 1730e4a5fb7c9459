"""Answers in OpenAI's form, whole or as server-sent events.

In: pieces of the engine. Out: JSON. A `Reply` knows the kind (`completion` or `chat`) and puts pieces together.
"""

from __future__ import annotations

import codecs
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.serve.http.wire import Message
from tessera.serve.text import BROKEN

DONE = b"data: [DONE]\n\n"


def event(data: Message) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Choice:
    """One answer in the making."""

    text: str = ""
    logprobs: list[Message] = field(default_factory=list)
    finish: str | None = None
    offset: int = 0  # characters of the answer before the next token whose log-probability is told
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def place(self, token: bytes) -> int:
        """Where in the text the next token begins, perhaps within a character."""
        before, waits = self.offset, bool(self.decoder.getstate()[0])
        text = self.decoder.decode(token)
        self.offset += len(text)
        return before + (waits and text.startswith(BROKEN))  # what waited turns out to be no character


class Reply:
    def __init__(self, chats: bool, model: str, count: int, logprobs: bool):
        self.chats, self.model, self.wants_logprobs = chats, model, logprobs
        self.id = f"{'chatcmpl' if chats else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.choices = [Choice() for _ in range(count)]
        self.prompt_tokens = self.new_tokens = self.cached_tokens = 0

    @property
    def usage(self) -> Message:
        total = self.prompt_tokens + self.new_tokens
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.new_tokens, "total_tokens": total}
        return {**counts, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def _head(self, streamed: bool) -> Message:
        kind = "text_completion" if not self.chats else f"chat.completion{'.chunk' if streamed else ''}"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, likely: Sequence[Message], choice: Choice) -> Message | None:
        if not self.wants_logprobs:
            return None
        if self.chats:
            return {"content": [_chat_logprob(one) for one in likely], "refusal": None}
        return {
            "tokens": [_spelt(one["bytes"]) for one in likely],
            "token_logprobs": [one["logprob"] for one in likely],
            "top_logprobs": [{_spelt(t): v for t, v in one["top"]} for one in likely],  # type: ignore[union-attr]
            "text_offset": [choice.place(bytes(one["bytes"])) for one in likely],  # type: ignore[arg-type]
        }

    def take(self, index: int, piece: Message) -> None:
        """News of one answer."""
        choice = self.choices[index]
        self._count(piece)
        choice.text += str(piece["text"])
        choice.logprobs += piece["logprobs"]  # type: ignore[operator]
        choice.finish = piece["finish"] or choice.finish  # type: ignore[assignment]

    def _count(self, piece: Message) -> None:
        self.new_tokens += int(piece["tokens"])  # type: ignore[call-overload]
        if piece["finish"] and not piece["index"]:  # the first answer to a prompt
            self.cached_tokens += int(piece["cached"])  # type: ignore[call-overload]

    def whole(self) -> Message:
        choices = [self._choice(i, c) for i, c in enumerate(self.choices)]
        return {**self._head(False), "choices": choices, "usage": self.usage}

    def _choice(self, index: int, choice: Choice) -> Message:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        body: Message = {"message": message} if self.chats else {"text": choice.text}
        logprobs = self._logprobs(choice.logprobs, choice)
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": choice.finish}

    def opening(self, usage: bool) -> list[bytes]:
        """A chat begins with the role of whoever answers."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        count = len(self.choices) if self.chats else 0
        return [self._chunk(i, {"delta": delta}, None, None, usage) for i in range(count)]

    def chunk(self, index: int, piece: Message, usage: bool) -> bytes | None:
        """One piece as an event; None where it says nothing."""
        self._count(piece)
        finish: str | None = piece["finish"]  # type: ignore[assignment]
        if not piece["text"] and not finish and not piece["logprobs"]:
            return None
        choice = self.choices[index]
        delta = {"content": piece["text"]} if piece["text"] or not finish else {}
        body: Message = {"delta": delta} if self.chats else {"text": piece["text"]}
        likely: Sequence[Message] = piece["logprobs"]  # type: ignore[assignment]
        logprobs = self._logprobs(likely, choice) if likely else None
        return self._chunk(index, body, logprobs, finish, usage)

    def _chunk(self, index: int, body: Message, logprobs: Message | None, finish: str | None, usage: bool) -> bytes:
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}
        return event({**self._head(True), "choices": [choice], **({"usage": None} if usage else {})})

    def closing(self, usage: bool) -> bytes:
        return (event({**self._head(True), "choices": [], "usage": self.usage}) if usage else b"") + DONE


def _spelt(token: object) -> str:
    """A token's bytes as text; where they are no text, in OpenAI's spelling of bytes."""
    data = bytes(token)  # type: ignore[call-overload]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_logprob(one: Message) -> Message:
    def spelt(token: object, value: object) -> Message:
        return {"token": _spelt(token), "logprob": value, "bytes": token}

    return {**spelt(one["bytes"], one["logprob"]), "top_logprobs": [spelt(t, v) for t, v in one["top"]]}  # type: ignore[union-attr]
