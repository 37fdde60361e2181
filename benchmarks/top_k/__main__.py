"""`python -m benchmarks.top_k`."""

from benchmarks.top_k.timings import main

main()
