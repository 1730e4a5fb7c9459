"""The strategies that tests try: each alone, crossed with features of a step, and beside others.

README's table says which; `python tests/distributed/strategies.py` writes it from here, and a test compares them.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- strategies: written by python tests/distributed/strategies.py -->", "<!-- end -->"

DATA = ("zero1", "zero2", "zero3", "hsdp")
PIPELINES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe")
ALONE = ("ddp", *DATA, "tensor", "sequence", "async-tp", "ring", "ulysses", "experts", *PIPELINES)
FEATURES = (
    "Adam", "SGD", "accumulate", "clip_norm", "checkpoint", "memory_budget", "autocast", "frozen", "batch size",
)  # fmt: skip

PAIRS = [
    *(
        (data, word)
        for data in DATA
        for word in ("sequence", "async-tp", "ring", "ulysses", "experts", *PIPELINES[1:4])
    ),
    *(("sequence", word) for word in ("ring", "ulysses", "experts", "1f1b", "zero-bubble")),
    *(("ring", word) for word in ("experts", "1f1b")),
    *(("experts", word) for word in ("ulysses", "1f1b", "interleaved", "zero-bubble")),
    *(("ddp", "tensor"), ("ddp", "gpipe"), ("zero3", "dualpipe")),
]
MORE = [
    ("zero3", "sequence", "1f1b"),
    ("zero3", "sequence", "ring"),
    ("zero3", "experts", "zero-bubble"),
    ("hsdp", "sequence", "experts"),
    ("zero3", "sequence", "ring", "interleaved"),
]

AXES = dict.fromkeys(PIPELINES, "pp")
AXES |= {
    "sequence": "tp",
    "async-tp": "tp",
    "tensor": "tp",
    "ring": "cp",
    "ulysses": "cp",
    "experts": "ep",
    "hsdp": "rep",
}
ORDER = ("rep", "dp", "ep", "cp", "tp", "pp")


def plan_of(words: tuple[str, ...]) -> dict[str, str]:
    """An axis for each word, outermost first; beside hsdp there is one of zero3."""
    plan = {AXES.get(word, "dp"): word for word in words}
    if "hsdp" in words:
        plan["dp"] = "zero3"
    return {axis: plan[axis] for axis in ORDER if axis in plan}


def model_for(words: tuple[str, ...]) -> str:
    """Experts have their own; the others see both, the one with tied weights and the one with grouped heads."""
    if "experts" in words:
        return "moe"
    return ("gpt", "llama")[sum(map(ALONE.index, words)) % 2]


def table() -> str:
    lines = ["| strategy | trains as one process does, also beside |", "| --- | --- |"]
    for word in ALONE:
        beside = [other for pair in PAIRS if word in pair for other in pair if other != word]
        lines.append(f"| `{word}` | {', '.join(beside)} |")
    more = ", ".join(" · ".join(words) for words in MORE)
    rest = f"Together: {more}. Each alone, with: {', '.join(FEATURES)} (autocast to bfloat16's precision)."
    return "\n".join([*lines, "", textwrap.fill(rest, 120)])


def page(text: str) -> str:
    """The page with its table as it is now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
