"""Compiles calls of Mosaic GPU kernels to machine code for a GPU that need not be there; a process that `conftest.py`
starts.

Arguments: the description of the GPU; its compute capability; a pickled dict, name -> (op or function, arrays, static);
where to write what the assembler said; how many devices. A call that the kernel refuses there has the reason instead.
The optimized programs, by name, are written beside, in a file that ends in `.programs`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import paging
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.core import dispatch


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is printed inside the block, by libraries in C++ too."""
    said: list[str] = []
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield said
        finally:
            for stream, old in zip((1, 2), kept, strict=True):
                os.dup2(old, stream)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


def struct(sharding: NamedSharding, of: tuple[tuple[int, ...], str]) -> jax.ShapeDtypeStruct:
    """An array to be, from its shape and dtype."""
    return jax.ShapeDtypeStruct(of[0], jnp.dtype(of[1]), sharding=sharding)


def main(target: str, capability: str, cases: str, found: str, devices: str) -> None:
    dispatch._compute_capability = lambda: capability  # kernels are built for the GPU that dispatch sees
    topology = topologies.get_topology_desc(platform="cuda", target_config=Path(target).read_text(), topology=f"1x1x{devices}")
    mesh = topologies.make_mesh(topology, (int(devices),), ("tensor",))
    sharding, over = NamedSharding(mesh, PartitionSpec()), {"mesh": mesh} if mesh.size > 1 else {}
    results, programs = {}, {}
    for name, (op, arrays, static) in pickle.loads(Path(cases).read_bytes()).items():
        kernel = op if callable(op) else paging.implementation(op, "mosaic_gpu")
        function = functools.partial(kernel, **static, **over)
        structs = jax.tree.map(functools.partial(struct, sharding), arrays, is_leaf=lambda x: isinstance(x, tuple))
        try:
            with heard() as said:
                programs[name] = jax.jit(function).lower(**structs).compile().as_text()
        except NotImplementedError as refused:
            results[name] = str(refused)
            continue
        kernels = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", said[0], re.DOTALL)
        if not kernels:
            sys.exit(f"{name}: the assembler did not say what it did:\n{said[0]}")
        results[name] = [dict(zip(("spill_stores", "spill_loads", "registers"), map(int, kernel), strict=True)) for kernel in kernels]
    Path(found).write_bytes(pickle.dumps(results))
    Path(found + ".programs").write_bytes(pickle.dumps(programs))


if __name__ == "__main__":
    main(*sys.argv[1:])
