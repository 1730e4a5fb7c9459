"""From a region of a trace to a tile kernel. Nothing else in `tile` sees a Trace."""
