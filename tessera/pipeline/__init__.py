"""From a captured program to one that runs."""
