"""What a notebook shows of something that renders in a terminal.

In: anything rich can print. Out: the same as a piece of HTML, with its colours.
"""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

WIDTH = 140  # characters: what a notebook's page holds
_PIECE = '<pre style="white-space:pre;overflow-x:auto;font-family:Menlo,Consolas,monospace">{code}</pre>'


def as_html(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
    console.print(what)
    return console.export_html(inline_styles=True, code_format=_PIECE)
