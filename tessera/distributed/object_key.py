"""Arguments of a program on a mesh that are neither tensors nor numbers.

In: an object of the user's. Out: a key that tells programs apart by what the object says. One that holds tensors or
arrays is refused: nobody would tell the program that they are a part of the batch, and it would keep those of the first
call.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from torch import Tensor

from tessera.distributed.users_line import at_users_line
from tessera.util.errors import InputError

NUMBERS = (int, float, complex, str, bytes, type(None))
DEPTH = 4  # objects in objects


@at_users_line
def object_key(x: object) -> object:
    return _key(x, type(x).__name__, DEPTH)


def _key(x: object, name: str, depth: int) -> object:
    if isinstance(x, Tensor):
        raise InputError(
            f"{name}: expected tensors as arguments, or in lists, tuples, dicts and classes that "
            "torch.utils._pytree.register_dataclass was told of, got one inside of another object, which nobody would "
            "know to be a part of the batch"
        )
    if hasattr(x, "__array__") and getattr(x, "ndim", 0):
        raise InputError(f"{name}: expected tensors as arguments, got {type(x).__name__}: torch.as_tensor makes one")
    if depth and isinstance(x, (list, tuple, set, Mapping)):
        parts = x.items() if isinstance(x, Mapping) else enumerate(x)
        return type(x), *((repr(n), _key(v, f"{name}[{n!r}]", depth - 1)) for n, v in parts)
    if depth and not isinstance(x, (type, ModuleType)) and not callable(x) and hasattr(x, "__dict__"):
        return type(x), repr(x), *((n, _key(v, f"{name}.{n}", depth - 1)) for n, v in vars(x).items())
    return repr(x)
