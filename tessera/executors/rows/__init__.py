"""Programs over few rows, such as one step of generation, where reading weights and caches is all the work.

limits     what the kernels take, and where they run
operators  what programs are rewritten to, and what it means in PyTorch
patterns   how that is found in a program
kernels    the Triton programs, and how they are launched
executor   the executor `rows`
"""
