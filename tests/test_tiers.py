"""The tiers of the tests are what `tiers.py` says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
from tiers import HERE, QUICK, SWEEPS, SWEPT_FILES, chosen, covering, in_quick, rows_of, values_of

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
    """What the choice looks at: a name, tables of parameters, and a row of each."""

    name: str
    params: dict[str, object]
    tables: tuple[str, ...]

    @property
    def callspec(self) -> Case:
        return self

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (pytest.mark.parametrize(names, ()).mark for names in self.tables)


def crossed(*tables: list) -> list[Case]:
    """Cases of tables of two parameters each, and of a fixture that has parameters."""
    names = tuple(f"a{k}, b{k}" for k in range(len(tables) - 1))
    cases = []
    for rows in product(*tables):
        *pairs, fixture = rows
        params = {f"{p}{k}": value for k, pair in enumerate(pairs) for p, value in zip("ab", pair, strict=True)}
        cases.append(Case(str(rows), params | {"fixture": fixture}, names))
    return cases


@pytest.mark.parametrize(
    ("sizes", "count"), [((2, 2), 2), ((3, 4), 6), ((2, 2, 2, 2), 8), ((7, 1), 7), ((1, 9), 9), ((5, 2, 1), 5)], ids=str
)
def test_of_crossed_parameters_every_value_stays(sizes: tuple[int, ...], count: int) -> None:
    tables: list = [[(object(), "same") for _ in range(n)] for n in sizes[:-1]]
    cases = crossed(*tables, [object() for _ in range(sizes[-1])])
    kept = covering(cases, 2)
    assert len(kept) == count and set(kept) == set(covering(cases[::-1], 2))
    assert {row for case in kept for row in rows_of(case)} == {row for case in cases for row in rows_of(case)}


def test_words_choose_by_name() -> None:
    file, words = next((file, words) for file, words in QUICK.items() if words)
    assert in_quick(HERE / file, f"test_{words[0]}") and not in_quick(HERE / file, "test_")
    assert not in_quick(HERE / "gpu" / "test_tile_gpu.py", "test_anything")
