"""The dialect `spatial`: programs of tiles as MLIR text, both ways."""
