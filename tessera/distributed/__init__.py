"""Programs on many ranks: plans, process groups, and the interpreter that runs all ranks in one process."""
