"""From a captured program to one that runs: pipelines as lists of stages, a run through one, what it gives."""
