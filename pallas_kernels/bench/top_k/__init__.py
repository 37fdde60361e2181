"""Benchmarks of `top_k`: `python -m pallas_kernels.bench.top_k --help`."""
