"""Processes that load one artifact at the same time, and the memory of its weights that they share.

    python tests/artifact/processes.py model.tess [--count 50]

Each process loads the file, calls it on ones and waits; then /proc says of each how much of the file it has in memory
(Rss), and how much of that counts as its own, where a page that n processes see counts as 1/n for each (Pss). Pages
that are shared add up to the file once, not once a process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CHILD = """
import sys
import torch
import tessera

torch.set_num_threads(1)
m = tessera.load(sys.argv[1], compile=False, verify=False)
leaves = m.main.arguments.leaves.leaves
with torch.no_grad():
    y = m(*(torch.ones([n if isinstance(n, int) else 4 for n in leaf.shape], dtype=leaf.dtype) for leaf in leaves))
print(float(y.double().sum()), flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class Measured:
    answers: list[float]
    rss: list[int]  # kilobytes of the file in each process
    pss: list[int]  # of these, its own share
    seconds: float  # until all had answered


def measure(path: Path, files: list[Path], count: int) -> Measured:
    """`files`: those whose memory is asked for."""
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(path)]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)  # noqa: S603
        for _ in range(count)
    ]
    try:
        answers = [float(p.stdout.readline()) for p in running]  # type: ignore[union-attr]
        seconds = time.monotonic() - start
        memory = [_memory(p.pid, {str(f.resolve()) for f in files}) for p in running]
        return Measured(answers, [rss for rss, _ in memory], [pss for _, pss in memory], seconds)
    finally:
        for p in running:
            p.communicate("\n")


def _memory(pid: int, files: set[str]) -> tuple[int, int]:
    """Rss and Pss of the mappings of these files."""
    totals, inside = {"Rss:": 0, "Pss:": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a mapping: addresses, rights, offset, device, inode, path
            inside = len(words) > 5 and words[5] in files
        elif inside and words[0] in totals:
            totals[words[0]] += int(words[1])
    return totals["Rss:"], totals["Pss:"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=50)
    asked = parser.parse_args()
    got = measure(asked.path, [asked.path, *asked.path.parent.glob("*.safetensors")], asked.count)
    print(f"{asked.count} processes in {got.seconds:.1f} s, {len(set(got.answers))} different answers")
    print(f"the file in memory: {max(got.rss) / 1024:.1f} MB a process, {sum(got.pss) / 1024:.1f} MB all together")


if __name__ == "__main__":
    main()
