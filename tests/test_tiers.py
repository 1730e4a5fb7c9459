"""The tiers of the tests are what `tiers.py` says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import pytest
from tiers import HERE, QUICK, SWEEPS, SWEPT_FILES, chosen, covering, in_quick, values_of

FOLDERS = {path.parent for path in HERE.rglob("test_*.py")} - {HERE / "gpu"}


def test_every_folder_is_in_the_quick_tier() -> None:
    assert {(HERE / file).parent for file in QUICK} == FOLDERS


def test_every_entry_chooses_something() -> None:
    for file, words in QUICK.items():
        text = (HERE / file).read_text()
        assert all(re.search(rf"def test_\w*{word}", text) for word in words), (file, words)


def test_every_sweep_is_a_test() -> None:
    for test in SWEEPS:
        file, name = test.split("::")
        assert f"def {name}(" in (HERE / file).read_text(), test


def test_files_of_sweeps_hold_nothing_else() -> None:
    for file in SWEPT_FILES:
        assert "\npytestmark = pytest.mark.sweep\n" in (HERE / file).read_text(), file


@pytest.mark.parametrize("first", [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
@pytest.mark.parametrize("second", "abcdef")
def test_a_part_of_a_sweep_has_every_value(first: float, second: str, request: pytest.FixtureRequest) -> None:
    cases = [item for item in request.session.items if getattr(item, "originalname", "") == request.node.originalname]
    kept = chosen(cases, 6)
    assert {value for case in kept for value in values_of(case)} == {
        value for case in cases for value in values_of(case)
    }
    assert len(cases) < 36 or len(kept) <= 18


@dataclass(eq=False)
class Case:
    """What the choice looks at: a name, and which value of each parameter a case has."""

    name: str
    indices: dict[str, int]

    @property
    def callspec(self) -> Case:
        return self


def crossed(*sizes: int) -> list[Case]:
    return [Case(str(at), {f"p{k}": n for k, n in enumerate(at)}) for at in product(*map(range, sizes))]


@pytest.mark.parametrize(
    ("sizes", "count"), [((2, 2), 2), ((3, 4), 6), ((2, 2, 2, 2), 8), ((7, 1), 7), ((9,), 9), ((), 1)]
)
def test_of_crossed_parameters_every_value_stays(sizes: tuple[int, ...], count: int) -> None:
    cases = crossed(*sizes)
    kept = covering(cases, 2)
    assert len(kept) == count and set(kept) == set(covering(cases[::-1], 2))
    assert {value for case in kept for value in case.indices.items()} == {
        (f"p{k}", i) for k, n in enumerate(sizes) for i in range(n)
    }


def test_words_choose_by_name() -> None:
    file, words = next((file, words) for file, words in QUICK.items() if words)
    assert in_quick(HERE / file, f"test_{words[0]}") and not in_quick(HERE / file, "test_")
    assert not in_quick(HERE / "gpu" / "test_tile_gpu.py", "test_anything")
