"""The picture of model benchmarks: a bar a job, the later run counts, and it is XML that parses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tessera.tools.bench import picture


def run(**ratios: float) -> dict:
    rows = [
        {
            "job": job,
            "size": "2x<4",
            "seconds": {"eager": 3.0, "inductor": 2.0, "tessera": 2.0 * ratio},
            "best": {"eager": "eager", "inductor": "inductor"},
            "to": {"eager": 2.0 * ratio / 3.0, "inductor": ratio},
        }
        for job, ratio in ratios.items()
    ]
    return {"machine": {"gpu": "NVIDIA H200", "torch": "2.11"}, "rows": rows}


def test_a_bar_a_job() -> None:
    root = ElementTree.fromstring(picture.picture([run(first=0.5, second=0.9), run(second=0.8)]))
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert titles == ["eager 1.50", "tessera 0.50", "eager 1.50", "tessera 0.80"]
    widths = {e[0].text: float(e.attrib["width"]) for e in root.iter() if e.tag.endswith("rect") and len(e)}
    assert widths["tessera 0.50"] < widths["tessera 0.80"] < widths["eager 1.50"]


def test_files(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run(one=0.7)))
    picture.main([str(tmp_path / "run.json"), str(tmp_path / "out.svg")])
    assert "first" not in (tmp_path / "out.svg").read_text() and "0.70" in (tmp_path / "out.svg").read_text()
    with pytest.raises(SystemExit, match="JSON"):
        picture.main([])
