"""`python -m pallas_kernels.bench.top_k`."""

from pallas_kernels.bench.top_k.timings import main

main()
