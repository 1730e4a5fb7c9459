"""PyTorch's own pass that orders collectives among what is computed, for comparison.

In: a graph whose nodes have values in their `meta`, and what each node takes. Out: the graph in its order. It prices
what it calls compute by a roofline of the GPU at hand; there is none here, so that price is replaced by the same table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.fx

from tessera.torch_internals.lookup import symbol

_WHY = "comparing the order of exchanges with PyTorch's"
_schedule = symbol("torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing", _WHY)
_flop_registry = symbol("torch.utils.flop_counter.flop_registry", _WHY)
_config = symbol("torch._inductor.config", _WHY)
_AUTOFIX = "overlap_scheduling_autofix_cycles"  # it may order in circles, which it can mend
_FIXES = {f"aten_distributed_optimizations.{_AUTOFIX}": True}
_SCHEDULING = "torch._inductor.fx_passes.overlap_scheduling"
OPTIONS: dict[str, Any] = {
    "compute_estimator": "analytical",
    "collective_bucketing": False,  # equations stay the same: what is joined is joined before
    "pre_bucketing_fsdp_collectives": False,
    "max_off_bucket_gb": None,
}


def ordered(
    gm: torch.fx.GraphModule, taken: Callable[[torch.fx.Node], float], compute: Collection[object]
) -> torch.fx.GraphModule:
    """`taken` gives the seconds of a node, `compute` are the operators that hide exchanges."""

    def estimate(node: torch.fx.Node, size: int | None = None) -> float:
        return 1e3 * taken(node)

    known = inspect.signature(_schedule).parameters
    options = {name: value for name, value in OPTIONS.items() if name in known}
    with _priced(estimate, compute):
        return _schedule(gm, custom_runtime_estimation=estimate, **options)


@contextmanager
def _priced(estimate: Callable, compute: Collection[object]) -> Iterator[None]:
    """Its prices are ours, its logs go nowhere, groups are names without ranks."""
    logs = "torch._inductor.fx_passes.node_runtime_estimation"
    with (
        mock.patch.dict(_flop_registry, {op: None for op in compute if op not in _flop_registry}),
        mock.patch(f"{_SCHEDULING}.estimate_roofline_runtime_ms", estimate),
        mock.patch(f"{_SCHEDULING}.get_group_name", lambda node: node.args[-1]),
        mock.patch(f"{logs}._log_compute_estimations"),
        mock.patch(f"{logs}._log_collective_benchmarks"),
        mock.patch("torch.distributed.get_world_size", lambda *_: 1),
        _config.patch(_FIXES if hasattr(_config.aten_distributed_optimizations, _AUTOFIX) else {}),
    ):
        yield
