"""Microbenchmarks of the ops: `python -m pallas_kernels.bench --help`."""
