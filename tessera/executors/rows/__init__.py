"""Programs over few rows, such as one step of generation: how the operators of `ops/rows` are found in a program.

patterns   how that is found in a program
executor   the executor `rows`
"""
