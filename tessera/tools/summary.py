"""A run in a few lines: graphs, breaks, recompiles, seconds spent compiling, who ran how much."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from rich.table import Table

from tessera.inspection.explain import Explanation
from tessera.tools.session import Session


@dataclass(frozen=True)
class Summary:
    script: str
    exit_code: int
    seconds: float
    compile_seconds: float
    graphs: int
    breaks: int
    recompiles: int
    eager: int
    executors: dict[str, int]  # equations that each runs, over all programs

    @staticmethod
    def of(session: Session, explanation: Explanation) -> Summary:
        counts: Counter[str] = Counter()
        for region in (r for g in explanation.graphs for r in g.regions):
            counts[region.executor] += len(region.operators)
        return Summary(
            session.script,
            session.exit_code,
            session.seconds,
            sum(g.seconds for g in explanation.graphs),
            len(explanation.graphs),
            len(explanation.breaks),
            len(explanation.recompiles),
            len(explanation.eager),
            dict(counts),
        )

    def to_dict(self) -> dict:
        return asdict(self)

    def table(self) -> Table:
        table = Table(title="Tessera", show_header=False, title_justify="left")
        table.add_row("graphs", f"{self.graphs}" + (f", {self.eager} run eagerly" if self.eager else ""))
        table.add_row("graph breaks", str(self.breaks))
        table.add_row("recompiles", str(self.recompiles))
        table.add_row("compiling", f"{self.compile_seconds:.2f} s of {self.seconds:.2f} s, without TorchDynamo's part")
        ran = ", ".join(f"{name} {count}" for name, count in self.executors.items())
        table.add_row("equations by executor", ran or "none")
        return table
