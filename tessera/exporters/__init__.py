"""Programs that leave: a Trace in another format."""
