"""`python -m benchmarks.top_k`."""

from benchmarks.run import main
from benchmarks.top_k.timings import HELP, bench

if __name__ == "__main__":
    main(bench, help=HELP)
