"""Benchmarks of `top_k`: `python -m benchmarks.top_k --help`."""
