"""The tiers of the tests are what `tiers.py` says."""

from __future__ import annotations

import re

from tiers import HERE, QUICK, in_quick

FOLDERS = {path.parent for path in HERE.rglob("test_*.py")} - {HERE / "gpu"}


def test_every_folder_is_in_the_quick_tier() -> None:
    assert {(HERE / file).parent for file in QUICK} == FOLDERS


def test_every_entry_chooses_something() -> None:
    for file, words in QUICK.items():
        text = (HERE / file).read_text()
        assert all(re.search(rf"def test_\w*{word}", text) for word in words), (file, words)


def test_words_choose_by_name() -> None:
    file, words = next((file, words) for file, words in QUICK.items() if words)
    assert in_quick(HERE / file, f"test_{words[0]}") and not in_quick(HERE / file, "test_")
    assert not in_quick(HERE / "gpu" / "test_tile_gpu.py", "test_anything")
