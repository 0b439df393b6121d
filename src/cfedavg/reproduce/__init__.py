"""The paper's figures and claims, made again: experiments as grids of cells that can be stopped and resumed.

An `experiment` says what its cells are, `grid` measures those that are missing, `archive` keeps what each
gave in a sealed file, `figures` draws, and `claims` holds the paper against what was found.
"""
