"""Answers compared field by field with OpenAI's published schema, from which its client's classes are generated."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic


def unlike(data: Any, kind: Any, where: str = "answer") -> list[str]:
    """What of `data` the schema does not have, misses or has otherwise."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return unlike(data, args[0], where)
    if origin in (Union, UnionType):
        tried = [unlike(data, one, where) for one in args if (one is NoneType) == (data is None)]
        return min(tried, key=len, default=[f"{where}: {data!r} is none of {args}"])
    if origin is Literal:
        return [] if data in args else [f"{where}: {data!r} is none of {args}"]
    if origin is list:
        if not isinstance(data, list):
            return [f"{where}: {data!r} is no list"]
        return [wrong for i, one in enumerate(data) for wrong in unlike(one, args[0], f"{where}[{i}]")]
    if origin is dict:
        return [wrong for key, one in data.items() for wrong in unlike(one, args[1], f"{where}[{key!r}]")]
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return _model(data, kind, where)
    right = kind in (Any, object) or isinstance(data, (int, float) if kind is float else kind)
    return (
        [] if right and not (isinstance(data, bool) and kind in (int, float)) else [f"{where}: {data!r} is no {kind}"]
    )


def _model(data: Any, kind: type[pydantic.BaseModel], where: str) -> list[str]:
    if not isinstance(data, dict):
        return [f"{where}: {data!r} is no object"]
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    wrong = [f"{where}.{name}: not in the schema" for name in data.keys() - fields.keys()]
    wrong += [f"{where}.{n}: missing" for n, field in fields.items() if field.is_required() and n not in data]
    return wrong + [
        one for n in data.keys() & fields.keys() for one in unlike(data[n], fields[n].annotation, f"{where}.{n}")
    ]
