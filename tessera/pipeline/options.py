"""What a user may ask of a compilation."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.executors import default
from tessera.executors.base import FusionExecutor, in_order
from tessera.transforms.fp8_recipe import FP8, Histories
from tessera.util.config import check_flags, config, parse_bytes
from tessera.util.errors import OptionError


@dataclass(frozen=True)
class Options:
    executors: tuple[str, ...] = ()
    recompute: str = "auto"
    memory_budget: int | None = None
    cuda_graph: str = "off"  # replay programs as CUDA graphs: off · on · auto (where it pays)
    offload: str = "none"  # where large tensors wait for backward: none (where they are) · host
    precision: FP8 | None = None  # products of linear layers in 8 bits
    histories: Histories | None = field(default=None, compare=False)  # what delayed scales are made from

    @staticmethod
    def of(
        executors: str | list[str] | tuple[str, ...] | None,
        recompute: str | None,
        memory_budget: str | int | None,
        cuda_graph: bool | str = False,
        offload: str | None = None,
        precision: str | FP8 | None = None,
    ) -> Options:
        recipe = FP8.of(precision)
        where = config.offload if offload is None else offload
        policy = recompute or config.recompute
        check_flags({"offload": where, "recompute": policy})
        if cuda_graph not in (True, False, "auto"):
            raise OptionError(f"cuda_graph: expected True, False or 'auto', got {cuda_graph!r}")
        listed = config.executors if executors is None else executors
        if not isinstance(listed, (str, list, tuple)):
            raise OptionError(f"executors: expected a list of names, got {listed!r}")
        names = default.named(listed) if isinstance(listed, str) else tuple(listed)
        in_order(names)  # an unknown name is refused here, where the user wrote it
        budget = memory_budget if memory_budget is not None else config.memory_budget or None
        if policy == "auto":  # where kernels are fused, arithmetic run again costs less than memory read again
            policy = "cheap" if any(isinstance(e, FusionExecutor) for e in in_order(names)) else "views"
        graph = cuda_graph if isinstance(cuda_graph, str) else "on" if cuda_graph else "off"
        histories = Histories(recipe.length) if recipe is not None and recipe.history == "delayed" else None
        size = None if budget is None else parse_bytes(budget, "memory_budget")
        return Options(names, policy, size, graph, where, recipe, histories)
