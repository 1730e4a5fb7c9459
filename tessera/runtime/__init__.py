"""What stands around a compiled trace when it runs: autograd, aliasing, dispatch. Importing this folder registers how
copies to the host run on CUDA."""

from tessera.runtime import transfer

__all__ = ["transfer"]
