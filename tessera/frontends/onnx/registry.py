"""Which function is what operator, for which opsets.

    @operator("Relu")
    def relu(x):
        return torch.relu(x)

Inputs come by position (None where an optional one is missing), attributes by name. A function that asks for `context`
gets the node, its opset and a way to run graphs among its attributes. One result stands for itself; several are a
tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

MICROSOFT, ML, PREVIEW, TRAINING = "com.microsoft", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"
# Attributes of the first opsets that told a runtime about memory.
IGNORED = frozenset({"consumed_inputs"})


@dataclass(frozen=True, eq=False)
class Meaning:
    """What an operator computes, for opsets from `since` to `until`."""

    name: str
    domain: str
    since: int
    until: int
    function: Callable
    moves: bool  # only moves elements: of any type, and none is looked at
    random: bool
    sizes: tuple[int, ...]  # inputs of which it asks for the numbers alone
    interpreted: str  # why it never becomes equations; empty where it does
    attributes: frozenset[str]
    required: frozenset[str]
    wants_context: bool
    first_inputs: tuple[int, int | None] = field(default=(0, None))  # the fewest and the most inputs


_meanings: dict[tuple[str, str], list[Meaning]] = {}
LAST = 10**6


def operator(
    name: str,
    since: int = 1,
    until: int = LAST,
    *,
    domain: str = "",
    moves: bool = False,
    random: bool = False,
    sizes: tuple[int, ...] = (),
    interpreted: str = "",
) -> Callable[[Callable], Callable]:
    def declare(function: Callable) -> Callable:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "context"]
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        most = None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(places)
        meaning = Meaning(
            name,
            domain,
            since,
            until,
            function,
            moves,
            random,
            sizes,
            interpreted,
            frozenset(p.name for p in named),
            frozenset(p.name for p in named if p.default is p.empty),
            any(p.name == "context" for p in parameters),
            (sum(p.default is p.empty for p in places), most),
        )
        _meanings.setdefault((domain, name), []).append(meaning)
        return function

    return declare


def meaning_of(domain: str, name: str, version: int) -> Meaning | None:
    """The latest declaration that holds for this opset; what a user registered stands last."""
    for meaning in reversed(_meanings.get((domain, name), ())):
        if meaning.since <= version <= meaning.until:
            return meaning
    return None


def known() -> list[tuple[str, str]]:
    """Domains and names of all operators that have a function here."""
    return sorted(_meanings)


def forget(domain: str, name: str, function: Callable) -> None:
    """Take a declaration back; tests do."""
    _meanings[domain, name] = [m for m in _meanings[domain, name] if m.function is not function]
