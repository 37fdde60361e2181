"""Times `kvjax.model.identity.fingerprint`: `python tools/time_fingerprint.py --gigabytes 15`.

Makes bfloat16 matrices of a size found in 7B models on the default device, as many as the given number of gigabytes
holds.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from kvjax.model.identity import fingerprint

WIDTH, INNER = 3584, 18_944


def main() -> None:
    """Print seconds, GB/s and how much the peak of the host's memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=15.0, help="size of the weights, in units of 10**9 bytes")
    count = max(1, round(parser.parse_args().gigabytes * 1e9 / (2 * WIDTH * INNER)))
    made = jax.jit(lambda key: jax.random.bits(key, (INNER, WIDTH), "uint16").view(jnp.bfloat16))
    params = jax.block_until_ready([made(key) for key in jax.random.split(jax.random.key(0), count)])
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = SimpleNamespace(config=None, params=params)
    size = sum(leaf.nbytes for leaf in params)
    for what in ("first", "again"):
        started, worked = time.perf_counter(), time.process_time()
        fingerprint(model)
        seconds, busy = time.perf_counter() - started, time.process_time() - worked
        print(f"{what}: {size / 1e9:.2f} GB in {seconds:.3f} s ({busy:.3f} s of a core), {size / 1e9 / seconds:.2f} GB/s")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 2**20
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores; the host's peak grew by {more:.2f} GiB")


if __name__ == "__main__":
    main()
