"""Operators over few rows, such as one step of generation, where reading weights and caches is all the work.

limits     what the kernels take, and where they run
operators  what programs are rewritten to, and what it means in PyTorch
launch     which kernel carries an operator out
kernels    the Triton programs, and how they are launched

The compiler finds them in a program (`executors/rows`); what is here does without it, so that artifacts do, too.
"""
