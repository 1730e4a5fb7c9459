"""TorchInductor's packages, which programs are compared with: imported when one is made or opened."""

from __future__ import annotations

from typing import Any

from tessera.torch_internals.lookup import symbol

_WHY = "comparing artifacts with TorchInductor's packages"


def aoti_compile_and_package(*args: Any, **kwargs: Any) -> Any:
    return symbol("torch._inductor.aoti_compile_and_package", _WHY)(*args, **kwargs)


def aoti_load_package(*args: Any, **kwargs: Any) -> Any:
    return symbol("torch._inductor.aoti_load_package", _WHY)(*args, **kwargs)
