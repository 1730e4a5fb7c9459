"""The project's own tests that need a GPU, a handful of them a case, run by pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import tessera
from tessera.tools.battery import handful as handful_plugin
from tessera.tools.battery.case import DETAILS, Case, Missing
from tessera.tools.battery.handful import VARIABLE

ROOT = Path(tessera.__file__).resolve().parents[1]
HANDFUL = 64  # to start a process takes as long as a dozen tests
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "--continue-on-collection-errors",
    "-m",
    "gpu",
]
PLUGINS = ("hypothesis", "expecttest")  # some test files import them


def cases(device: str) -> list[Case]:
    if device != "cuda":
        raise Missing("these tests need a GPU; `make test` runs the others")
    if find_spec("pytest") is None:
        raise Missing("pytest is not installed")
    if not (ROOT / "tests").is_dir():
        raise Missing(f"there is no folder of tests beside {ROOT / 'tessera'}")
    files = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "gpu" in p.read_text(encoding="utf-8")]
    names = [str(p.relative_to(ROOT)) for p in files]
    ran = subprocess.run(PYTEST + ["--collect-only", *names], cwd=ROOT, capture_output=True, text=True, check=False)
    collected = [
        line.partition("::")[0] for line in ran.stdout.splitlines() if "::" in line and line.startswith("tests")
    ]
    by_file = []
    for file, count in Counter(collected).items():
        parts = -(-count // HANDFUL)
        by_file += [Case("tests", f"{file} {i}/{parts}", 60.0 + count / parts, limit=400.0) for i in range(parts)]
    if not by_file:
        raise Missing(f"pytest collected nothing: {ran.stdout.strip()[-300:]} {ran.stderr.strip()[-300:]}")
    return by_file + [Case("tests", f"{name} 0/1", 10.0) for name in names if f"ERROR {name}" in ran.stdout]


def report(case: str, device: str) -> Iterator[tuple[str, str, str, float, str]]:
    file, handful = case.split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        chosen = {**os.environ, VARIABLE: handful}
        ran = subprocess.run(
            PYTEST + ["-p", handful_plugin.__name__, f"--junitxml={path}", file],
            cwd=ROOT,
            env=chosen,
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            yield (
                file,
                "error",
                f"pytest ended with code {ran.returncode}: {ran.stderr.strip()[-200:]}",
                0.0,
                ran.stdout[-DETAILS:],
            )
            return
        for test in xml.parse(path).getroot().iter("testcase"):
            yield outcome(test)


def outcome(test: xml.Element) -> tuple[str, str, str, float, str]:
    """One test as an outcome. A file that wants a package which is not here is skipped, and says so."""
    name = f"{test.get('classname', '')}::{test.get('name', '')}".lstrip(":")
    seconds = float(test.get("time", 0))
    for child in test:
        text = " ".join(filter(None, (child.get("message", ""), (child.text or "")[-600:])))
        line = " | ".join(part.strip() for part in text.splitlines() if part.strip())
        details = (child.text or "")[-DETAILS:]
        if child.tag == "skipped":
            return name, "skipped", line[:200], seconds, ""
        if absent := [p for p in PLUGINS if f"No module named '{p}'" in text]:
            return name, "skipped", f"{absent[0]} is not installed", seconds, ""
        if child.tag == "failure":
            return name, "wrong", line[-240:], seconds, details
        if child.tag == "error":
            return name, "error", line[-240:], seconds, details
    return name, "pass", "", seconds, ""
