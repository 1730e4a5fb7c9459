"""Models of equal blocks: each block is mapped once, and the program is a chain of runs of such parts."""
