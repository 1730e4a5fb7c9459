"""`tessera.report`: puts data, style and script into one HTML file that needs nothing else.

The page's parts stand beside this file. The user's source is data: it is written as JSON in which no `<` stands, the
script only ever sets text, and the page's own policy allows no script but this one and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from tessera.inspection.programs import state_of
from tessera.just_in_time.compiled import Compiled
from tessera.tools.profile import Profile, profile
from tessera.tools.report.collect import collect
from tessera.tools.report.shown import Report
from tessera.util.files import check_writable

# In the order in which they build on each other.
SCRIPTS = (
    "dom", "model", "list", "code", "align", "chart", "overview", "mesh", "program", "compare", "timeline",
    "memory", "roofline", "profile", "app",
)  # fmt: skip


def report(
    fast: Callable,
    path: str | Path | None = None,
    args: tuple | None = None,
    kwargs: dict[str, object] | None = None,
    steps: int = 5,
    backward: bool | None = None,
) -> Report:
    """Write an HTML report of a jitted function. A notebook shows what is returned; its `save` writes it too.

    path          the file; without it nothing is written
    args, kwargs  call it with these and measure `steps` steps (see `tessera.profile`); without either nothing is run,
                  and the report shows what was compiled by earlier calls
    """
    state = state_of(fast)
    if path is not None:
        check_writable(path)
    run = args is not None or kwargs is not None
    measured = profile(fast, *(args or ()), steps=steps, backward=backward, **(kwargs or {})) if run else None
    return write(path, [state], measured, getattr(state.backend, "name", type(fast).__name__))


def write(path: str | Path | None, states: Sequence[Compiled], measured: Profile | None, title: str) -> Report:
    """The report of everything these functions were compiled to."""
    made = Report(title, page(collect(states, measured, title)), path if path is None else Path(path))
    if path is not None:
        made.save(path)
    return made


def page(data: dict[str, object]) -> str:
    """The whole file."""
    return assembled("tessera.tools.report", "report", SCRIPTS, "()", str(data["title"]), embedded(data))


def assembled(package: str, name: str, scripts: Sequence[str], function: str, title: str, data: str) -> str:
    """A page of a package from its parts: markup, style, scripts that share one `function`, and data."""
    folder = files(package) / "page"
    style = (folder / f"{name}.css").read_text(encoding="utf-8")
    parts = "\n".join((folder / f"{part}.js").read_text(encoding="utf-8") for part in scripts)
    script = f'"use strict";\n({function} => {{\n{parts}\n}})();\n'
    values = {
        "TITLE": html.escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
        "STYLE_HASH": content_hash(style),
        "SCRIPT_HASH": content_hash(script),
    }
    pieces = (folder / f"{name}.html").read_text(encoding="utf-8").split("%%")
    # Every other piece is the name of a value: what is put in is never looked at again.
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def embedded(data: dict[str, object]) -> str:
    """JSON that can stand inside a script element whatever its strings say."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def content_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
