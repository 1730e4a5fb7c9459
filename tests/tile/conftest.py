"""Puts this folder on the path, so that its tests can import `kernels`, `tile_kernels` and `cutile_model`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
