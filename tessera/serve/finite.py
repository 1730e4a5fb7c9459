"""Does a JSON schema have an end? One whose required parts require the schema itself again is satisfied by no value,
but a parser would follow it for ever.

In: a schema as JSON. Out: whether some finite value may satisfy it, as far as references go: the least fixed point over
all schemas that are referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Known = Callable[[str], bool]  # has what a reference points at an end?
_OPAQUE = ("enum", "const", "default", "examples")  # values, not schemas


def has_end(schema: dict) -> bool:
    targets = {ref: _target(schema, ref) for ref in _references(schema)}
    endless = {ref for ref, target in targets.items() if target is not None}  # until the contrary is shown

    def known(ref: str) -> bool:
        return ref not in endless

    while ending := {ref for ref in endless if _ends(targets[ref], known)}:
        endless -= ending
    return _ends(schema, known)


def _ends(schema: object, known: Known) -> bool:
    if not isinstance(schema, dict):
        return schema is not False
    if isinstance(ref := schema.get("$ref"), str) and not known(ref):
        return False
    if "enum" in schema or "const" in schema:
        return True
    some = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    if not all(any(_ends(one, known) for one in listed) for listed in some):
        return False
    if not all(_ends(one, known) for one in _listed(schema.get("allOf"))):
        return False
    kinds = schema.get("type")
    if isinstance(kinds, list) and len(kinds) > 1:
        return any(_ends({**schema, "type": kind}, known) for kind in kinds)
    kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
    return all(_ends(part, known) for part in _required(schema, kind))


def _required(schema: dict, kind: object) -> Iterator[object]:
    """Parts that a value of this type cannot do without."""
    if kind == "object":
        properties = schema.get("properties")
        wanted = _listed(schema.get("required"))
        yield from (x for name, x in properties.items() if name in wanted) if isinstance(properties, dict) else ()
    if kind == "array":
        least = schema.get("minItems", 0)
        first = _listed(schema.get("prefixItems"))
        yield from first[: least if isinstance(least, int) else 0]
        if isinstance(least, int) and least > len(first):
            yield schema.get("items", True)


def _listed(value: object) -> list:
    return value if isinstance(value, list) else []


def _parts(schema: object) -> Iterator[dict]:
    """All objects in a schema."""
    if isinstance(schema, dict):
        yield schema
    inner = [x for key, x in schema.items() if key not in _OPAQUE] if isinstance(schema, dict) else _listed(schema)
    for one in inner:
        yield from _parts(one)


def _references(schema: dict) -> set[str]:
    return {ref for part in _parts(schema) if isinstance(ref := part.get("$ref"), str)}


def _target(schema: dict, ref: str) -> object:
    """What a reference within the schema points at; None where that is nothing, or elsewhere."""
    if not ref.startswith("#"):
        return None
    at: object = schema
    for step in ref[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, dict) else None
    return at


def levels(schema: dict) -> int:
    """How deep whoever follows references, each of them once, gets at most."""
    return _depth(schema) + sum(_depth(_target(schema, ref)) for ref in _references(schema))


def _depth(schema: object) -> int:
    inner = schema.values() if isinstance(schema, dict) else _listed(schema)
    return isinstance(schema, dict) + max(map(_depth, inner), default=0)


def counted(schema: object) -> int:
    """How many properties a schema names, in all of its parts."""
    return sum(len(x) for part in _parts(schema) if isinstance(x := part.get("properties"), dict))
