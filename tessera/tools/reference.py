"""The reference pages: every public name of `tessera`, and every flag.

In: signatures and docstrings; the fields of `Config` with the comments beside them. Out: `docs/reference.md` and
`docs/flags.md`, which a test compares with the code, so that they are always true and nothing is missing.
`python -m tessera.tools.reference` writes them again.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from types import ModuleType

import tessera
from tessera.inspection import CheckReport, Explanation, Stage, Stages
from tessera.tools.profile import Profile
from tessera.util import config as flags

DOCS = Path(__file__).parents[2] / "docs"

# Where a name stands on the page; a name that no group has comes under the last heading.
GROUPS: dict[str, tuple[str, ...]] = {
    "Compile": ("jit", "train_step", "optim", "Buckets", "quantize", "FP8", "backend"),
    "Many ranks": ("mesh", "shard", "experts", "save_state", "load_state"),
    "Deploy": ("export", "load", "to_exported"),
    "Serve": ("Engine", "Sampling"),
    "Other formats": ("stablehlo", "from_jax"),
    "Transforms": (
        "grad", "value_and_grad", "grad_and_value", "vjp", "jvp", "linearize", "vmap", "jacrev", "jacfwd", "hessian",
        "checkpoint", "custom_vjp",
    ),
    "Control flow": ("cond", "while_loop", "scan"),
    "See through it": ("trace", "stages", "edit", "explain", "check", "reproduce", "profile", "report"),
    "Spatial machines": ("machine", "map_onto", "simulate", "codesign"),
    "Extend": ("register_operator", "register_kernel", "register_executor", "ops"),
    "Flags": ("config", "override"),
    "Everything else": ("Trace",),
}  # fmt: skip
GIVEN = (Stages, Stage, Explanation, CheckReport, Profile)  # what functions of the page give back


class _Bare(str):
    """An annotation as it was written: without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(fn: object) -> str:
    """The parameters of a function as its author wrote them, one a line where they are many."""
    parsed = inspect.signature(fn)  # type: ignore[arg-type]
    parameters = [p.replace(annotation=_bare(p.annotation)) for p in parsed.parameters.values() if p.name != "self"]
    parsed = parsed.replace(parameters=parameters, return_annotation=_bare(parsed.return_annotation))
    text = str(parsed).replace("<factory>", "...")
    if len(text) < 80:
        return text
    parts = [str(p).replace("<factory>", "...") for p in parameters]
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and "*" not in parts and not any(part.startswith("*") for part in parts[:i]):
            parts.insert(i, "*")
    ending = text.rpartition(") -> ")[2]
    return "(\n    " + ",\n    ".join(parts) + f",\n) -> {ending}"


def _bare(annotation: object) -> object:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def prose(doc: str | None) -> str:
    """A docstring as Markdown: lines of `name  what it is` become a list, indented code a block."""
    lines: list[str] = []
    for line in inspect.cleandoc(doc or "").splitlines():
        option = re.match(r"^(\w+(?:, \w+)*) {2,}(\S.*)$", line)
        if option:
            lines.append(f"- `{option[1]}`: {option[2]}")
        elif lines and lines[-1].startswith("- `") and line.startswith("  "):  # goes on below what it belongs to
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return re.sub(r"^(?!- )(.+)\n(?=- `)", r"\1\n\n", "\n".join(lines), flags=re.M)


def function_entry(name: str, fn: object) -> str:
    return f"### `{name}`\n\n```py\n{name}{signature(fn)}\n```\n\n{prose(inspect.getdoc(fn))}\n"


def class_entry(name: str, cls: type) -> str:
    """A class: what it is, and its public methods and properties with a docstring of their own."""
    parts = [f"### `{name}`\n\n{prose(cls.__doc__)}\n"]
    own = [base for base in reversed(cls.__mro__) if base.__module__.startswith("tessera.")]
    for method, member in ((m, member) for base in own for m, member in vars(base).items()):
        if method.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            parts.append(f"- `.{method}`: {first_paragraph(member)}")
        elif callable(member) or isinstance(member, staticmethod | classmethod):
            shown = " ".join(signature(getattr(cls, method)).split()).replace("( ", "(").replace(", )", ")")
            parts.append(f"- `.{method}{shown}`: {first_paragraph(member)}")
    return "\n".join(parts) + "\n"


def first_paragraph(member: object) -> str:
    return " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())


def module_entry(name: str, module: ModuleType) -> str:
    parts = [f"### `{name}`\n\n{prose(module.__doc__)}\n"]
    for own in getattr(module, "__all__", ()):
        member = getattr(module, own)
        if inspect.isclass(member) or inspect.isfunction(member):
            parts.append(f"- `{name}.{own}`: {first_paragraph(member)}")
    return "\n".join(parts) + "\n"


def entry(name: str) -> str:
    """What the page says about one public name."""
    value, shown = getattr(tessera, name), f"tessera.{name}"
    if isinstance(value, ModuleType):
        return module_entry(shown, value)
    if inspect.isclass(value):
        title, rest = class_entry(shown, value).split("\n\n", 1)
        return f"{title}\n\n```py\n{shown}{signature(value).removesuffix(' -> None')}\n```\n\n{rest}"
    if inspect.isfunction(value):
        return function_entry(shown, value)
    return f"### `{shown}`\n\n{prose(type(value).__doc__)}\n"  # a value, such as the flags


def groups() -> dict[str, list[str]]:
    """Every public name once, under its heading."""
    public = [name for name in tessera.__all__ if not name.startswith("__")]
    by_title = {title: [name for name in names if name in public] for title, names in GROUPS.items()}
    placed = {name for names in by_title.values() for name in names}
    by_title[list(GROUPS)[-1]] += sorted(set(public) - placed)
    return by_title


def reference() -> str:
    """The page of public names."""
    parts = [
        "# Reference\n",
        "Every public name of `tessera`, from its signature and docstring; `tessera.onnx` has [a page](onnx.md).\n",
        "This page is generated: `python -m tessera.tools.reference` writes it.\n",
    ]
    for title, names in groups().items():
        parts += [f"## {title}\n", *(entry(name) for name in names)]
    parts += ["## What functions give back\n", *(class_entry(cls.__name__, cls) for cls in GIVEN)]
    return "\n".join(parts).rstrip("\n") + "\n"


def comments() -> dict[str, str]:
    """The comment beside every field of `Config`."""
    source = inspect.getsource(flags)
    lines = source.splitlines()
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Config").body
    return {
        node.target.id: lines[(node.end_lineno or node.lineno) - 1].partition("# ")[2]
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def flag_table() -> str:
    """The page of flags."""
    descriptions = comments()
    rows = [
        f"| `{field.name}` | `TESSERA_{field.name.upper()}` | `{field.default!r}` | {descriptions[field.name]} |"
        for field in dataclasses.fields(flags.Config)
    ]
    return FLAGS + "\n".join(rows) + "\n"


FLAGS = """# Flags

All flags stand in `tessera/util/config.py`. Each can be set in three ways: an environment variable, read when Tessera
is imported; `tessera.config.strict = True`; or, for a while,

```python
import tessera

with tessera.override(strict=True, verify=True):
    assert tessera.config.strict
```

An unknown flag, or a value that a flag does not have, is refused, and the message lists what there is. Arguments of
`tessera.jit` come before flags. `TESSERA_CACHE` names the folder for programs, kernels and tuned schedules
(`~/.cache/tessera`).

This page is generated: `python -m tessera.tools.reference` writes it.

| flag | environment | default | what it does |
| --- | --- | --- | --- |
"""


PAGES = {"reference.md": reference, "flags.md": flag_table}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make())
        print(f"wrote {DOCS / name}")
