"""Tessera's transforms in the form the transforms suite calls: `--api tests/suites/transform_api.py:tessera_api`."""

from __future__ import annotations

from collections.abc import Callable

from tessera.func import api as transform_api


class tessera_api:  # noqa: N801 - the suite names an API in this form
    vjp = staticmethod(transform_api.vjp)
    jvp = staticmethod(transform_api.jvp)

    @staticmethod
    def grad(f: Callable, argnums: tuple[int, ...]) -> Callable:
        return transform_api.grad(f, argnums)

    @staticmethod
    def vmap(f: Callable, in_dims: tuple) -> Callable:
        return transform_api.vmap(f, in_dims, randomness="different")
