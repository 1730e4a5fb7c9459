"""Functional collectives: communication as operators that give new tensors."""

from __future__ import annotations

from tessera.torch_internals.lookup import symbol

_WHY = "collectives of imported programs"
all_reduce = symbol("torch.distributed._functional_collectives.all_reduce", _WHY)
all_gather_tensor = symbol("torch.distributed._functional_collectives.all_gather_tensor", _WHY)
reduce_scatter_tensor = symbol("torch.distributed._functional_collectives.reduce_scatter_tensor", _WHY)
all_to_all_single = symbol("torch.distributed._functional_collectives.all_to_all_single", _WHY)
