"""What is frozen for a process's life is let go of at its end."""

import subprocess
import sys

import pytest


def test_libraries_report_no_leaks_at_the_end() -> None:
    pytest.importorskip("triton")
    code = "import triton._C.libtriton; from tessera.util.garbage import freeze; freeze()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "leaked" not in ended.stderr
