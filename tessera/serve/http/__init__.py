"""The server: HTTP in one process, the engine in another. They speak JSON over a pair of sockets, and nothing else."""
