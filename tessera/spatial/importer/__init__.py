"""From a Trace to a graph of homes: what is computed, before it is cut into tiles."""
