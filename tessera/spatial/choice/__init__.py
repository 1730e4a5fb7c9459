"""How chips share a program, chosen: by a cost model, an integer program and dynamic programming."""
