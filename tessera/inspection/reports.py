"""What is told of each compiled graph, as data: `explain` fills it in, `render` shows it, the report draws it."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.inspection.memory import Memory
from tessera.util.units import counted


@dataclass(frozen=True)
class RegionReport:
    """What one executor took at once: a fused region, or the single operators it runs."""

    executor: str
    fused: bool
    operators: tuple[str, ...]
    results: tuple[str, ...]
    lines: tuple[str, ...]  # the user's lines it comes from
    why: str = ""

    def __repr__(self) -> str:
        return f"<RegionReport {self.executor}: {_few(self.operators)}>"


@dataclass(frozen=True)
class UnfusedReport:
    """Equations in no fused region, for one reason."""

    reason: str
    results: tuple[str, ...]
    operators: tuple[str, ...]
    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<UnfusedReport: {_few(self.operators)}>"


@dataclass(frozen=True)
class GraphReport:
    name: str
    compile_id: str
    operators: int
    location: str  # the user's first line in the graph
    called_at: str  # the user's line whose call made it be compiled
    inputs: tuple[str, ...]
    guards: tuple[str, ...]
    break_reason: str
    break_line: str
    break_advice: str
    recompile_reason: str
    recompile_guard: str
    recompile_change: str
    recompile_advice: str
    eager_reason: str
    executors: tuple[str, ...]
    regions: tuple[RegionReport, ...]
    equations: dict[str, int]
    saved_bytes: int
    saved: tuple[str, ...]
    offloaded: dict[str, int]  # saved tensors that wait on the host, and their bytes
    offload_note: str
    seconds: float
    from_cache: bool  # its programs came from disk
    unfused: tuple[UnfusedReport, ...]
    memory: tuple[Memory, ...]
    fp8: tuple[str, ...] = ()  # which layers multiply in 8 bits, which do not and why
    repeats: int = 0  # calls of blocks that equal another one, which was traced for them
    mesh: tuple[str, ...] = ()  # what ranks send, by axis, and what was gathered for want of a rule
    blocks: tuple[str, ...] = ()  # blocks that were traced by themselves though others look alike, and why
    cuda_graph: str = ""  # how often the program was captured and replayed, or why it is not

    def __repr__(self) -> str:
        return f"<GraphReport of {self.name}: {counted(self.operators, 'operator')}>"


def _few(operators: tuple[str, ...]) -> str:
    first = ", ".join(operators[:3])
    return first if len(operators) <= 3 else f"{first} and {len(operators) - 3} more"
