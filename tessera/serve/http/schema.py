"""Bodies of requests, checked field by field, as messages to the engine.

In: JSON as OpenAI's clients send it, and fields of our own (`top_k`, `min_p`, `min_tokens`, `repetition_penalty`,
`ignore_eos`, `stop_token_ids`, `priority`, `timeout`; `regex` and `choices` in `response_format`). Out: an `Asked`.
What is wrong raises `HttpError`, which names the field. Fields that are not known, or that ask for what is not there,
are refused; some that change no answer are taken and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tessera.serve.http.errors import HttpError
from tessera.serve.http.wire import Message

IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
MESSAGE = ("role", "content", "name", "tool_call_id")  # what templates get
# What asks for nothing may be sent; anything else in these fields is refused.
NOTHING: dict[str, tuple] = {
    "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""), "tools": (None, []), "functions": (None, []),
    "tool_choice": (None, "none", "auto"), "modalities": (None, ["text"]), "audio": (None,), "prediction": (None,),
    "reasoning_effort": (None,), "web_search_options": (None,), "function_call": (None, "none", "auto"),
    "verbosity": (None, "medium"),
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    body: int = 4 << 20  # bytes
    body_seconds: float = 30.0  # that may pass until they are there
    prompt: int = 1 << 20  # characters, or tokens
    prompts: int = 64
    max_tokens: int = 1 << 17
    n: int = 16
    logprobs: int = 20
    stops: int = 16
    stop_length: int = 256
    bias: int = 1024
    timeout: float = 3600.0


@dataclass
class Asked:
    """A request that was understood."""

    prompts: list[Message]  # each `prompt` or `messages`
    settings: Message
    stream: bool = False
    usage: bool = False  # the stream is to end with counts
    priority: int = 0
    timeout: float | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return int(self.settings.get("n", 1))  # type: ignore[call-overload]


def _number(low: float, high: float, whole: bool = False) -> Callable[[object], bool]:
    def right(value: object) -> bool:
        kind = int if whole else (int, float)
        return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high  # NaN is neither

    right.__doc__ = f"an integer from {low} to {high}" if whole else f"a number from {low:g} to {high:g}"
    return right


def _flag(value: object) -> bool:
    """true or false"""
    return isinstance(value, bool)


def _settings(limits: Limits) -> dict[str, Callable[[object], bool]]:
    """Fields that are settings of `tessera.Sampling`, and what may stand there."""
    most = _number(1, limits.max_tokens, True)
    return {
        "max_tokens": most, "max_completion_tokens": most, "min_tokens": _number(0, limits.max_tokens, True),
        "temperature": _number(0, 2), "top_p": _number(1e-6, 1), "top_k": _number(0, 2**31, True),
        "min_p": _number(0, 1), "presence_penalty": _number(-2, 2), "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 100), "n": _number(1, limits.n, True),
        "seed": _number(-(2**63), 2**63 - 1, True), "ignore_eos": _flag,
    }  # fmt: skip


class Reader:
    """One body, read field by field; what is left in the end is unknown."""

    def __init__(self, body: object, served: str, limits: Limits, *given: str):
        """`given` are fields that somebody else reads."""
        if not isinstance(body, Mapping):
            raise HttpError("expected a JSON object")
        self.body, self.limits, self.left = body, limits, set(body) - set(given)
        name = self.take("model", lambda v: isinstance(v, str), "a text")
        if name is not None and name != served:
            raise HttpError(f"model: there is {served!r}, and no {name!r}", "model", 404, "model_not_found")

    def take(self, name: str, right: Callable[[object], bool], what: str | None = None) -> object:
        """The field's value, or None; refused unless `right`."""
        self.left.discard(name)
        value = self.body.get(name)
        if value is not None and not right(value):
            shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
            raise HttpError(f"{name}: expected {what or right.__doc__}, got {shown}", name)
        return value

    def settings(self) -> Message:
        given: Message = {}
        for name, right in _settings(self.limits).items():
            if (value := self.take(name, right)) is not None:
                if name == "max_completion_tokens" and "max_tokens" in given:
                    raise HttpError(f"{name}: expected it or max_tokens, not both", name)
                given["max_tokens" if name == "max_completion_tokens" else name] = value
        given["stop"] = self._stops()
        most = self.limits.bias
        given["stop_tokens"] = self.take("stop_token_ids", _tokens(most), f"a list of at most {most} tokens") or []
        what = f"at most {most} tokens, each with -100 to 100"
        given["logit_bias"] = self.take("logit_bias", self._biases, what) or {}
        return given | self._format()

    def _format(self) -> Message:
        """`response_format`, as `tessera.Sampling` has it. What the grammar itself may be, the engine says."""
        name = "response_format"
        match self.take(name, lambda v: isinstance(v, Mapping), "an object"):
            case None | {"type": "text"}:
                return {}
            case {"type": "json_object"}:
                return {"json_schema": {"type": "object"}}
            case {"type": "json_schema", "json_schema": {"name": str(), "schema": Mapping() as schema}}:
                return {"json_schema": schema}
            case {"type": "json_schema"}:
                where = f"{name}.json_schema"
                raise HttpError(f"{where}: expected an object with a name, a text, and a schema, an object", where)
            case {"type": "regex", "regex": str(regex)}:
                return {"regex": regex}
            case {"type": "choices", "choices": list(choices)} if all(isinstance(c, str) for c in choices):
                return {"choices": choices}
        kinds = "text, json_object, json_schema, regex with a regex, or choices with a list of texts"
        raise HttpError(f"{name}.type: expected {kinds}", f"{name}.type")

    def _stops(self) -> list[str]:
        most, length = self.limits.stops, self.limits.stop_length
        what = f"a text, or a list of at most {most} texts"
        given = self.take("stop", lambda v: isinstance(v, str) or _texts(v, most), what)
        stops = [given] if isinstance(given, str) else list(given or [])  # type: ignore[call-overload]
        if any(not stop or len(stop) > length for stop in stops):
            raise HttpError(f"stop: expected texts of 1 to {length} characters", "stop")
        return stops

    def _biases(self, value: object) -> bool:
        right = _number(-100, 100)
        return (
            isinstance(value, Mapping)
            and len(value) <= self.limits.bias
            and all(str(k).isascii() and str(k).isdecimal() and len(str(k)) < 10 and right(v) for k, v in value.items())
        )

    def asked(self, prompts: list[Message], settings: Message) -> Asked:
        """The rest of the body; nothing may be left that is not known."""
        stream = bool(self.take("stream", _flag))
        options = self.take(
            "stream_options",
            lambda v: isinstance(v, Mapping) and v.keys() <= set(_STREAMED) and all(map(_flag, v.values())),
            f"true or false for {' and '.join(_STREAMED)}",
        )
        if options is not None and not stream:
            raise HttpError("stream_options: expected only with stream", "stream_options")
        usage = bool((options or {}).get("include_usage"))  # type: ignore[attr-defined]
        priority = self.take("priority", _number(-8, 8, True)) or 0
        timeout = self.take("timeout", _number(0.001, self.limits.timeout))
        for name, harmless in NOTHING.items():
            self.take(name, lambda v, harmless=harmless: v in harmless, "nothing, since it is not supported")
        return Asked(prompts, settings, stream, usage, priority, timeout, self.done())  # type: ignore[arg-type]

    def done(self) -> list[str]:
        """Refuse what nobody has read; the fields that are ignored."""
        if unknown := sorted(self.left - set(IGNORED), key=str):
            raise HttpError(f"unknown field {unknown[0]!r}", str(unknown[0]), code="unknown_parameter")
        return sorted(self.left)


_STREAMED = ("include_usage", "include_obfuscation")


def _token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _tokens(most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(_token, value))


def _texts(value: object, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(isinstance(v, str) for v in value)


def prompts_of(value: object, limits: Limits, name: str = "prompt") -> list[Message]:
    """A text, tokens, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_token, value))):
        listed = [value]
    elif isinstance(value, list) and 0 < len(value) <= limits.prompts:
        listed = value
    else:
        raise HttpError(f"{name}: expected a text, tokens, or a list of at most {limits.prompts} of them", name)
    for one in listed:
        if not isinstance(one, str) and not (isinstance(one, list) and one and all(map(_token, one))):
            raise HttpError(f"{name}: expected a text or a list of tokens, got {type(one).__name__}", name)
        if not 0 < len(one) <= limits.prompt:
            raise HttpError(f"{name}: expected 1 to {limits.prompt} characters or tokens, got {len(one)}", name)
    return [{"prompt": one} for one in listed]


def _content(value: object) -> object:
    """Parts of type text as one text."""
    match value:
        case [*parts] if all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
            texts = [p.get("text") for p in parts]
            return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return value


def messages_of(value: object, limits: Limits) -> list[Message]:
    """A conversation as templates take it: every content one text."""
    if not isinstance(value, list) or not value:
        raise HttpError("messages: expected a list of at least one message", "messages")
    texts, length = [], 0
    for i, one in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise HttpError(f"{where}: expected an object with role and content", where)
        given = {name: value for name, value in one.items() if value not in (None, [])}
        given["content"] = _content(one.get("content"))
        if unknown := sorted(given.keys() - set(MESSAGE)):
            at = f"{where}.{unknown[0]}"
            raise HttpError(f"{at}: expected nothing, since it is not supported", at, code="unknown_parameter")
        for name in MESSAGE:
            if not isinstance(given.get(name, ""), str):
                told = "a text, or parts of type text" if name == "content" else "a text"
                raise HttpError(f"{where}.{name}: expected {told}", f"{where}.{name}")
        length += sum(map(len, given.values()))
        texts.append(given)
    if length > limits.prompt:
        raise HttpError(f"messages: expected at most {limits.prompt} characters, got {length}", "messages")
    return [{"messages": texts}]


def tokens_of(body: object, served: str, limits: Limits) -> Message:
    """`/tokenize`: a prompt or messages."""
    reader = Reader(body, served, limits, "prompt", "messages")
    reader.done()
    if "messages" in reader.body and "prompt" not in reader.body:
        return messages_of(reader.body["messages"], limits)[0]
    asked = prompts_of(reader.body.get("prompt"), limits)
    if len(asked) != 1 or "messages" in reader.body:
        raise HttpError("prompt: expected one prompt, or messages in its place", "prompt")
    return asked[0]


def text_of(body: object, served: str, limits: Limits) -> Message:
    """`/detokenize`: tokens."""
    reader = Reader(body, served, limits)
    what = f"a list of at most {limits.prompt} tokens"
    tokens = reader.take("tokens", _tokens(limits.prompt), what)
    reader.done()
    if tokens is None:
        raise HttpError(f"tokens: expected {what}", "tokens")
    return {"tokens": tokens}


def completion(body: object, served: str, limits: Limits) -> Asked:
    """`/v1/completions`."""
    reader = Reader(body, served, limits, "prompt")
    prompts = prompts_of(reader.body.get("prompt"), limits)
    settings = {"max_tokens": 16, **reader.settings()}
    settings["logprobs"] = reader.take("logprobs", _number(0, limits.logprobs, True))
    return reader.asked(prompts, settings)


def chat(body: object, served: str, limits: Limits) -> Asked:
    """`/v1/chat/completions`."""
    reader = Reader(body, served, limits, "messages")
    prompts = messages_of(reader.body.get("messages"), limits)
    settings = reader.settings()
    wanted = reader.take("logprobs", _flag)
    top = reader.take("top_logprobs", _number(0, limits.logprobs, True))
    if top is not None and not wanted:
        raise HttpError("top_logprobs: expected only with logprobs", "top_logprobs")
    settings["logprobs"] = (top or 0) if wanted else None
    return reader.asked(prompts, settings)
