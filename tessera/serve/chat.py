"""A conversation as text, by the template of a model, which came with it and is nobody's friend: it runs in jinja's
sandbox. What it may use besides jinja's own is what transformers offers to templates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}` stands around what the model itself has said, and changes nothing of it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(told: str) -> None:
    raise TemplateError(told)


def _json(
    value: object, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Unlike jinja's own, for readers who are no browsers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made


_compiled = functools.lru_cache(8)(lambda template: _environment().from_string(template))


def rendered(
    template: str, messages: Sequence[Mapping[str, object]], named: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """The conversation; `named` are tokens such as `bos_token`. What is None of a message is as if it were missing."""
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    none = {"tools": None, "documents": None}  # templates ask whether these are none, and not whether they are defined
    return _compiled(template).render(messages=given, add_generation_prompt=add_generation_prompt, **none, **named)
