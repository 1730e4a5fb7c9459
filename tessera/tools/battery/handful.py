"""A plugin of pytest: of all tests that were collected, run every N-th, beginning with the I-th."""

from __future__ import annotations

import os

VARIABLE = "TESSERA_HANDFUL"  # such as 2/8


def pytest_collection_modifyitems(config: object, items: list) -> None:
    index, _, count = os.environ.get(VARIABLE, "0/1").partition("/")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = marked[int(index) :: int(count)]
