"""How a process starts: where its time goes, bytecode of others, the context of a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tessera.util import bytecode, cuda_context, phases


def seconds(line: str, name: str) -> float:
    match = re.search(rf"\b{name} ([\d.]+)", line)
    assert match is not None, line
    return float(match[1])


def test_phases_within_others_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_spent", {})
    monkeypatch.setattr(phases, "_BEGAN", time.monotonic())
    with phases.phase("outer"), phases.phase("inner"):
        time.sleep(0.2)
    with phases.phase("inner"):
        time.sleep(0.2)
    time.sleep(0.2)
    line = phases.account()
    assert seconds(line, "inner") >= 0.4 and seconds(line, "outer") < 0.1 and seconds(line, "other") >= 0.2
    assert float(line.split()[0]) >= 0.6


def test_a_phase_that_raises_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_spent", {})
    with pytest.raises(KeyError), phases.phase("outer"), phases.phase("inner"):
        raise KeyError
    assert phases._inner == []


def test_threads_count_no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_spent", {})
    done = []

    def work() -> None:
        with phases.phase("beside"):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done and phases._spent == {}


def test_the_account_begins_with_the_process() -> None:
    script = "import time; time.sleep(0.5); from tessera.util.phases import account; print(account())"
    begun = time.monotonic()
    line = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 0.5 <= float(line.split()[0]) <= time.monotonic() - begun + 0.1
    assert seconds(line, "python") >= 0.5


@pytest.mark.parametrize("writable", [False, True])
def test_bytecode_of_a_folder_that_takes_none_is_kept(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, cache = tmp_path / "site" / "large", tmp_path / "cache"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from large import part\n")
    (package / "part.py").write_text("x = 1\n")
    script = (
        "import os, sys; from tessera.util import bytecode\n"
        f"os.access = lambda path, mode: {writable}\n"
        "bytecode.keep('large'); print(bytecode.there('large'), sys.pycache_prefix); import large"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHONDONTWRITE") and k != "PYTHONPYCACHEPREFIX"}
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    env |= {"TESSERA_CACHE": str(cache), "PYTHONPATH": path}

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        ).stdout

    first, second = run().split(), run().split()
    prefix = None if writable else str(cache / bytecode.FOLDER)
    assert first == ["False", str(prefix)] and second[0] == "True"
    kept = list(cache.rglob("part.*.pyc")) if cache.exists() else []
    assert bool(kept) is not writable
    assert bool(list(package.rglob("*.pyc"))) is writable
    if not writable:
        assert (cache.stat().st_mode & 0o077, (cache / bytecode.FOLDER).stat().st_mode & 0o077) == (0, 0)


class Driver:
    """The calls that the CUDA driver got."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):  # noqa: ANN204
        def call(*args: object) -> int:
            self.calls.append(name)
            return 0

        return call


def test_a_context_is_made_beside_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    cuda_context.begin("cpu")
    assert not [thread for thread in threading.enumerate() if thread.name == "tessera-context"]
    cuda_context._make()
    assert driver.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"  # as the user chose


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_context._make()
