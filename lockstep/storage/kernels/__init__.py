"""Loops over bytes that Numba compiles: memory, checksums, frames. Import a module of it where it is called, not above:

Numba takes half a second to load, and a job that prints its help needs none of it.
"""
