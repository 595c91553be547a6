"""The tests and the benchmarks on a machine with a GPU and no network: `make gpu`.

`make gpu-wheels` collects, on a machine with a network, the packages that the other one lacks.
"""
