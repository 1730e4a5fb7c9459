"""What `tessera.report` gives: a notebook shows the page itself, a prompt says in a line what was written.

In: the text of a page. Out: HTML for a notebook's cell. The page stands in a frame without rights: its script runs, but
reaches neither the notebook nor what the notebook's server knows. A page that is too long for a notebook's file is a
link.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

HEIGHT = 640  # pixels; the page scrolls inside
LONGEST = 20_000_000  # characters of a page that a notebook keeps


@dataclass(frozen=True, repr=False)
class Report:
    """A report that was written, or only made, if `path` is None."""

    title: str
    page: str
    path: Path | None = None

    def save(self, path: str | Path) -> None:
        """Write the page; it needs no other file."""
        Path(path).write_text(self.page, encoding="utf-8")

    def __repr__(self) -> str:
        where = f"in {self.path}" if self.path else "not written; `save` writes it"
        return f"<Report of {self.title}: {len(self.page) / 1e6:.1f} MB, {where}>"

    def _repr_html_(self) -> str:
        title = html.escape(f"Tessera's report of {self.title}")
        if len(self.page) > LONGEST:
            return f"<p>{title} is too long for a notebook: {self._link()}</p>"
        style = f"width: 100%; height: {HEIGHT}px; border: 1px solid #8884; border-radius: 4px"
        rights = 'sandbox="allow-scripts" referrerpolicy="no-referrer"'
        page = html.escape(self.page).encode("ascii", "xmlcharrefreplace").decode()  # however the notebook is encoded
        return f'<iframe title="{title}" {rights} style="{style}" srcdoc="{page}"></iframe>'

    def _link(self) -> str:
        if self.path is None:
            return "<code>save</code> writes it to a file"
        return f'<a href="{html.escape(self.path.resolve().as_uri())}">{html.escape(str(self.path))}</a>'
