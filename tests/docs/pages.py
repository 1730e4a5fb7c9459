"""The Python of a page: its ```python blocks, run in order in one namespace, in a process of their own.

A block after `<!-- not run: reason -->` is left out. A ```text block right after a Python block is what that block
prints; `...` stands for anything, and places such as `mlp.py:12` may differ. It is compared on the PyTorch that
`constraints.txt` names: others name a value otherwise here and there. The blocks are written to a file at the lines
where they stand in the page, so that an error names the page's own line, and Triton finds the source of kernels.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.metadata
import io
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
PLACE = re.compile(r"[\w/.-]+\.py:\d+")
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    line: int  # of its first line of code, from one
    code: str
    printed: str | None  # what the page says it prints


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page that are run."""
    found: list[Block] = []
    end = -1  # where the last block ended, if a text block may follow
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start(2)) + 1
        between = text[end : fence.start()]
        if fence[1] == "text" and end >= 0 and not between.strip():
            found[-1] = Block(found[-1].line, found[-1].code, fence[2])
        end = -1
        marked = NOT_RUN.fullmatch(text[: fence.start()].rstrip().rpartition("\n")[2])
        if fence[1] == "python" and not marked:
            found.append(Block(line, fence[2], None))
            end = fence.end()
    return found


def run_blocks(found: list[Block], path: str) -> None:
    """Run blocks as the file `path`; raise where one fails or prints something else than the page says."""
    lines: list[str] = []
    for block in found:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    Path(path).write_text("\n".join(lines) + "\n")
    scope = _module("page", path)
    for block in found:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (block.line - 1) + block.code, path, "exec"), scope)
        if block.printed is not None and pinned() and not same(block.printed, out.getvalue()):
            told = f"the page says it prints\n{block.printed}\nit printed\n{out.getvalue()}"
            raise AssertionError(f"line {block.line}: {told}")


def pinned() -> bool:
    """This is the PyTorch that everything written down was seen on."""
    version = importlib.metadata.version("torch").partition("+")[0]
    return f"torch=={version}" in (ROOT / "constraints.txt").read_text().splitlines()


def same(told: str, printed: str) -> bool:
    return doctest.OutputChecker().check_output(PLACE.sub("place", told), PLACE.sub("place", printed), SAME)


def run_script(path: str, arguments: list[str]) -> None:
    """Run a script as `python path arguments` does."""
    sys.argv = [path, *arguments]
    exec(compile(Path(path).read_text(), path, "exec"), _module("__main__", path))


def _module(name: str, path: str) -> dict[str, object]:
    """The namespace of a new module, found by its name: TorchDynamo looks globals up there."""
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    return module.__dict__


def apart(folder: Path, work: Callable[..., None], *args: object) -> str:
    """Run `work(*args)` in a process of its own, in `folder`; what it printed, or an AssertionError with it.

    The process is forked from a server that has imported Tessera: an import a page would be most of the time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tessera.api", "tessera.tools.report"])  # `import tessera` alone loads nothing
    log = folder / "output.txt"
    process = context.Process(target=_child, args=(str(folder), str(log), work, args))
    process.start()
    process.join(timeout=180)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"did not end within 180 s:\n{log.read_text()}")
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


def _child(folder: str, log: str, work: Callable[..., None], args: tuple) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    import torch  # here, so that collecting tests does not import it

    torch.set_num_threads(1)
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
