"""What a co-design sweep found as one HTML page, which needs neither script nor network.

In: what `tessera.codesign` gives. Out: the page: every point over its time and its price, the front as a line, what one
percent buys, where more buys nothing, what to ask for. A point tells its name and figures where the pointer rests.
The price is the chip's area; where the machine's file has none, how many times its own of all fields together.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tessera.spatial.codesign.api import Codesign, told
from tessera.spatial.codesign.fields import DIALS
from tessera.spatial.codesign.points import Point
from tessera.tools.report.write import content_hash
from tessera.util.files import check_writable

WIDE, HIGH, EDGE = 760, 380, 48
STYLE = """
:root { --ink: #1b1f24; --paper: #ffffff; --line: #c9d1d9; --hot: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --hot: #fb923c; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--ink); background: var(--paper); font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.4rem 0 0.3rem; }
svg { width: 100%; border: 1px solid var(--line); } text { fill: var(--ink); font-size: 12px; }
circle { fill: var(--line); stroke: var(--ink); } .front circle { fill: var(--hot); }
polyline { fill: none; stroke: var(--hot); } table { border-collapse: collapse; } td { padding: 2px 14px 2px 0; }
"""  # noqa: E501


def write(found: Codesign, path: str | Path) -> None:
    check_writable(path)
    Path(path).write_text(page(found), encoding="utf-8")


def page(found: Codesign) -> str:
    policy = f"default-src 'none'; style-src '{content_hash(STYLE)}'"
    name = html.escape(found.machine.name)
    slopes = [(e.dial.name, str(e)) for e in found.elasticities]
    knees = [(k.dial.name, "beyond" if k.within else "not reached by", str(k.value)) for k in found.knees]
    asked = [(a.name, f"{a.gain:.1%}", told(a.point)) for a in found.asks]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{name} · co-design</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{name}</h1>\n<p>{html.escape(told(found.base))}</p>",
        *_section("The front", [_chart(found)] if found.points else []),
        *_section("What one percent buys", _table(slopes)),
        *_section("Where more buys nothing", _table(knees)),
        *_section("What to ask for", _table(asked)),
        f"<p>{len(found.machine.assumptions)} of {len(found.machine.sources)} numbers of the machine are assumed.</p>",
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _section(title: str, body: Iterable[str]) -> list[str]:
    body = list(body)
    return [f"<h2>{title}</h2>", *body] if body else []


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return ["<table>", *(f"<tr>{row}</tr>" for row in cells), "</table>"] if rows else []


def _chart(found: Codesign) -> str:
    fits = [p for p in found.points if p.fits]
    prices = {id(p): _price(found, p) for p in fits}
    across, up = _scale([p.seconds for p in fits], EDGE, WIDE - EDGE), _scale(prices.values(), HIGH - EDGE, EDGE)
    at = {id(p): (across(p.seconds), up(prices[id(p)])) for p in fits}
    line = " ".join(f"{at[id(p)][0]:.1f},{at[id(p)][1]:.1f}" for p in found.front)
    beaten = [p for p in fits if p not in found.front]
    unit = "mm²" if found.base.area is not None else "× its own of the fields"
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img">',
            f'<text x="{WIDE / 2}" y="{HIGH - 12}">time</text><text x="6" y="20">{unit}</text>',
            *(_dot(p, *at[id(p)]) for p in beaten),
            f'<g class="front"><polyline points="{line}"/>',
            *(_dot(p, *at[id(p)]) for p in found.front),
            "</g></svg>",
        ]
    )


def _price(found: Codesign, point: Point) -> float:
    if point.area is not None:
        return point.area
    own = {name: found.machine.value(name) for name in point.changes}
    return math.prod(own[n] / v if DIALS[n].less else v / own[n] for n, v in point.changes.items() if v and own[n])


def _scale(values: Iterable[float], low: float, high: float) -> Callable[[float], float]:
    """Places between two, each share of a value above the one before as far apart."""
    logs = [math.log(v) for v in values]
    least, wide = min(logs), max(logs) - min(logs) or 1.0
    return lambda value: low + (math.log(value) - least) / wide * (high - low)


def _dot(point: Point, x: float, y: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{html.escape(f"{point.name}: {told(point)}")}</title></circle>'
    )
