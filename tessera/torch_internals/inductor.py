"""TorchInductor, for the executor that hands regions to it. Importing this loads it, which takes seconds."""

from __future__ import annotations

from tessera.torch_internals.lookup import symbol

_WHY = "the inductor executor"
compile_fx_inner = symbol("torch._inductor.compile_fx.compile_fx_inner", _WHY)
select_decomp_table = symbol("torch._inductor.decomposition.select_decomp_table", _WHY)
make_fx = symbol("torch.fx.experimental.proxy_tensor.make_fx", _WHY)
