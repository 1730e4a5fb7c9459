"""The comparison of schedules for products: every candidate is a kernel that can be written."""

from __future__ import annotations

import pytest
import torch

from tessera.tools.bench.products import FUNCTIONS, candidates, kernel

pytest.importorskip("triton")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_candidate_is_written(name: str) -> None:
    function, products, shapes = FUNCTIONS[name]
    given = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes(256)]
    texts = {kernel(function, given, s).compiled.source for s in candidates(products)}  # type: ignore[attr-defined]
    assert all(text.count("tl.dot(") == products for text in texts)
    assert sum("TensorDescriptor" in text for text in texts) >= 5
