"""How operators of a trace are lowered, by family."""
