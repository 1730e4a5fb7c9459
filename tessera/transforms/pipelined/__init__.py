"""Pipelines of ranks: programs cut into stages, and the tables that say which rank does what when."""
