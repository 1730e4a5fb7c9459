"""JAX is the reference here, and each of its programs runs once: XLA need not make them fast."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
