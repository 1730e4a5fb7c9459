"""From a program over whole values to the program of one rank of a mesh."""
