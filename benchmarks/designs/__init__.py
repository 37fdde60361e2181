"""Other designs that were measured, and what was found: one script each, `python -m benchmarks.designs.NAME`."""
