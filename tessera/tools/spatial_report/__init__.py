"""One HTML page of a program for a spatial machine."""

from tessera.tools.spatial_report.write import page, write

__all__ = ["page", "write"]
