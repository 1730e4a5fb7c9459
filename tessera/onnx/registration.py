"""Operators of your own."""

from __future__ import annotations

from collections.abc import Callable

from tessera.frontends.onnx.registry import LAST, operator


def register(
    name: str, *, domain: str, since: int = 1, until: int = LAST, interpreted: str = "", random: bool = False
) -> Callable[[Callable], Callable]:
    """Declare what an operator means: a function over torch tensors, inputs by position and attributes by name.

    since, until  the opsets of its domain that it holds for
    interpreted   why it must run outside of programs, such as "it asks a server"; empty: it becomes part of them
    random        two calls give different results
    """
    return operator(
        name, since, until, domain="" if domain == "ai.onnx" else domain, interpreted=interpreted, random=random
    )
