"""A picture of `tessera bench models`: `python -m tessera.tools.bench.picture run.json [more.json] picture.svg`.

In: what runs wrote with `--json`; where two hold the same job the later one counts. Out: an SVG with a bar a job, the
time of eager and of Tessera as shares of TorchInductor's in the same run. Nothing but text, for any page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

LABEL, BARS, ROW, TOP = 250, 430, 34, 58  # pixels: names, the longest bar, a job's height, the title's
MOST = 2.0  # times Inductor's: a longer bar is cut and says its number
COLOURS = {"eager": "#b8bec9", "tessera": "#1f6feb"}


def picture(runs: Sequence[dict]) -> str:
    """The SVG of some runs of one machine."""
    rows = {(row["job"], row["size"]): row for run in runs for row in run["rows"]}
    shown = [row for row in rows.values() if row["to"].get("inductor")]
    height = TOP + ROW * len(shown) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + BARS + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LABEL + BARS + 60}" height="{height}" fill="#ffffff"/>',
        _text(16, 22, f"Time relative to TorchInductor, {_machine(runs[-1])}", size=15),
        _text(16, 42, "shorter is faster; the line is TorchInductor, the grey bar eager PyTorch", fill="#57606a"),
    ]
    for i, row in enumerate(shown):
        lines += _row(row, TOP + ROW * i)
    line = LABEL + BARS / MOST
    lines.append(
        f'<line x1="{line}" x2="{line}" y1="{TOP - 4}" y2="{height - 24}" stroke="#24292f" stroke-dasharray="4 3"/>'
    )
    lines.append(_text(line - 10, height - 8, "1.0", fill="#57606a"))
    return "\n".join((*lines, "</svg>\n"))


def _row(row: dict, y: int) -> list[str]:
    ours, inductor = row["to"]["inductor"], row["seconds"][row["best"]["inductor"]]
    shares = {"eager": row["seconds"]["eager"] / inductor if "eager" in row["seconds"] else None, "tessera": ours}
    lines = [_text(16, y + 19, f"{row['job']}  {row['size']}")]
    for who, top, thick in (("eager", y + 3, 8), ("tessera", y + 12, 14)):
        share = shares[who]
        if share is not None:
            length = BARS * min(share, MOST) / MOST
            lines.append(
                f'<rect x="{LABEL}" y="{top}" width="{length:.0f}" height="{thick}" fill="{COLOURS[who]}">'
                f"<title>{who} {share:.2f}</title></rect>"
            )
    longest = BARS * min(ours, MOST) / MOST
    return [*lines, _text(LABEL + longest + 6, y + 23, f"{ours:.2f}")]


def _text(x: float, y: float, text: str, fill: str = "#24292f", size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{fill}" font-size="{size}">{escape(text)}</text>'


def _machine(run: dict) -> str:
    machine = run["machine"]
    return f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch']}"


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise SystemExit("expected one or more JSON files of `tessera bench models` and the name of a picture")
    *runs, out = map(Path, argv)
    out.write_text(picture([json.loads(path.read_text()) for path in runs]))


if __name__ == "__main__":
    main(sys.argv[1:])
