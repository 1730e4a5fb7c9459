"""StableHLO programs become Traces: reading them (`parse`), what they are (`module`), what they mean (`operators`)."""
