"""What all tests share. Its being here puts this folder on the path, so that tests can import `programs`."""

from __future__ import annotations

import gc
import os

# A collector of garbage that goes through all that is being imported takes a fifth of the time until the first test.
# Later garbage goes when a file of tests is done, and Dynamo collects what is young after every compilation.
gc.disable()

# Tests look at how programs are compiled, and change it: what an earlier run left on disk would hide that.
os.environ.setdefault("TESSERA_PROGRAM_CACHE", "0")

import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

# Artifacts are tagged by whoever builds them: no test touches the user's own keys.
os.environ.setdefault("TESSERA_KEYS", str(Path(tempfile.mkdtemp(prefix="tessera-keys-")) / "keys"))


import pytest  # noqa: E402
import torch  # noqa: E402
from tiers import HERE, SWEPT_FILES, in_quick, sweep_rest, words_of  # noqa: E402

# Kernels are written for a GPU in many tests; where there is none to ask, it is this one.
if not torch.cuda.is_available():
    os.environ.setdefault("TESSERA_MACHINE", "h200")

torch.set_num_threads(1)  # tests run side by side


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the quick tier alone: a part of every folder (tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files outside the quick tier are not even imported, nor are files of sweeps where no sweep is asked for."""
    swept = any(collection_path == HERE / file for file in SWEPT_FILES)
    if swept and "not sweep" in config.getoption("markexpr"):
        return True
    test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("quick") and test and words_of(collection_path) is None else None


@pytest.hookimpl(tryfirst=True)  # marks come before pytest chooses by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sweep_rest(items)
    if config.getoption("quick"):
        chosen = [item for item in items if in_quick(item.path, getattr(item, "originalname", item.name))]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Once a file is done: its garbage goes, and what it leaves alive stays, like all that a test has thawed."""
    yield
    if nextitem is None or nextitem.path != item.path:
        freeze()


def freeze() -> None:
    """What is alive stays: Dynamo's own collections need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report leaks at the end


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup() -> None:
    """Random numbers are the same whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture
def fresh() -> None:
    """Nothing compiled before, and the same random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
