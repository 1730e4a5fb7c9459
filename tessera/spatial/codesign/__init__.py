"""What to change in a chip: sweeps over a machine's fields, each point compiled and simulated."""
