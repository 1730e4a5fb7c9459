"""A pipeline as text: each stage with when it applies, what it needs and why it stands there.

In: the name of a kind of compilation, and executors. Out: lines of a table. `tessera pipeline` prints it, and
`python -m tessera.pipeline.table` writes the tables of `docs/design.md`, which a test compares with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tessera.executors.base import in_order
from tessera.executors.default import WITH_KERNELS
from tessera.pipeline.lists import PIPELINES
from tessera.pipeline.stage import Stage, expanded
from tessera.util.errors import OptionError

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
BEGIN, END = "<!-- {kind}: written by python -m tessera.pipeline.table -->", "<!-- end -->"


def table(kind: str, executors: Iterable[str] = WITH_KERNELS) -> str:
    """One line a stage: its title, when it applies, what it is given, why it stands there."""
    if kind not in PIPELINES:
        raise OptionError(f"no pipeline called {kind!r}; there are {', '.join(PIPELINES)}")
    stages = expanded(PIPELINES[kind], in_order(executors))
    rows = [("stage", "if", "needs", "why here"), *(_cells(stage) for stage in stages)]
    title, when, needs = (max(len(row[i]) for row in rows) for i in range(3))
    return "\n".join(f"{row[0]:{title}}  {row[1]:{when}}  {row[2]:{needs}}  {row[3]}" for row in rows)


def _cells(stage: Stage) -> tuple[str, str, str, str]:
    when = stage.when.__name__.replace("_", " ") if stage.when else ""
    return stage.title, when, " ".join(stage.needs), stage.why


def page(text: str) -> str:
    """The page with its tables as they are now."""
    for kind in PIPELINES:
        begin = BEGIN.format(kind=kind)
        if begin in text:
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}\n\n```text\n{table(kind)}\n```\n\n{END}{rest.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
