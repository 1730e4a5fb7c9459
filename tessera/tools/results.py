"""Results of a run by name, and beside those of another.

In: what a model gives: tensors, arrays of strings, numbers, None, and lists and dicts of such. Out: each of them under
a name of its own, and how two runs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from tessera.exporters.onnx.compare import Difference, compare

Results = dict[str, object]


def flat(name: str, value: object) -> Results:
    """`{"y.0": …, "y.1": …}` of a list called y."""
    if isinstance(value, (list, tuple)):
        return {key: x for i, item in enumerate(value) for key, x in flat(f"{name}.{i}", item).items()}
    if isinstance(value, Mapping):
        return {key: x for k, item in value.items() for key, x in flat(f"{name}.{k}", item).items()}
    return {name: value}


def told(value: object) -> object:
    """What is said of a result: the shape of a tensor, anything else as it is."""
    return list(value.shape) if isinstance(value, (torch.Tensor, np.ndarray)) else value


def differences(mine: Results, theirs: Results, other: Callable[[], Results]) -> list[Difference]:
    """Of every result. `other` draws other random numbers: of what they decide the type alone is compared."""
    found = [_difference(name, mine, theirs) for name in {**mine, **theirs}]
    if not any(d.problem for d in found):
        return found
    drawn = other()
    random = {name for name in mine if _difference(name, mine, drawn).problem}
    return [_of_types(d, mine, theirs) if d.name in random else d for d in found]


def _of_types(difference: Difference, mine: Results, theirs: Results) -> Difference:
    x, y = mine[difference.name], theirs.get(difference.name)
    alike = all(isinstance(z, torch.Tensor) for z in (x, y)) and (x.dtype, x.shape) == (y.dtype, y.shape)  # type: ignore[union-attr]
    said = f"{difference.name} (random numbers: the type alone)"
    return Difference(said, "") if alike else difference


def _difference(name: str, mine: Results, theirs: Results) -> Difference:
    if name not in mine or name not in theirs:
        return Difference(name, f"expected {_there(name, theirs)}, got {_there(name, mine)}")
    got, expected = mine[name], theirs[name]
    if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
        return compare(name, got, expected)
    if isinstance(got, np.ndarray) and isinstance(expected, np.ndarray):
        return Difference(name, "" if np.array_equal(got, expected) else _of_strings(got, expected))
    same = type(got) is type(expected) and got == expected
    return Difference(name, "" if same else f"expected {expected!r}, got {got!r}")


def _there(name: str, results: Results) -> str:
    return "a result of this name" if name in results else "none"


def _of_strings(got: np.ndarray, expected: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"expected strings of {expected.shape}, got {got.shape}"
    at = np.argwhere(got != expected)
    place = tuple(int(i) for i in at[0])
    where = f"{len(at)} of {got.size} strings differ; the first is {list(place)}"
    return f"{where}: expected {expected[place]!r}, got {got[place]!r}"
