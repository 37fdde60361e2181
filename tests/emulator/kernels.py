"""Whole Mosaic GPU kernels on emulated threads: those whose bodies are nothing but a stage of
`pallas_kernels.hopper.threads.lanes`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from emulator import lanes as emulated_lanes
from pallas_kernels.hopper.threads import lanes


@contextlib.contextmanager
def kernels(contested: Sequence[int] = ()):
    """Inside, `plgpu.kernel` runs on emulated threads, and nothing is compiled. What a kernel leaves unwritten is -99
    or NaN. References among its arguments hold afterwards what it wrote there. contested: numbers of the arguments of
    which several threads may write one word: one of them wins."""
    names = [f"arrays[{n}]" for n in contested]
    with jax.disable_jit(), mock.patch.object(plgpu, "kernel", functools.partial(_kernel, names)):
        yield


class _Axis:
    def __init__(self, name: str):
        self.name = name


def _kernel(
    contested, body, *, out_type=(), grid, grid_names, num_threads=1, thread_name=None, scratch_types=(), cluster=(), cluster_names=()
):
    outs = jax.tree.leaves(out_type)

    def launch(*inputs):
        arrays = [np.array(x[...] if isinstance(x, jax.Ref) else x) for x in inputs] + [
            np.full(x.shape, -99 if x.dtype == np.int32 else np.nan, x.dtype) for x in outs
        ]
        words = {f"scratch[{n}]": -(-math.prod(x.shape) * np.dtype(x.dtype).itemsize // 4) for n, x in enumerate(scratch_types)}

        def stage_of_all(arrays, scratch, **axes):
            with mock.patch.object(lanes, "stage", _stage(axes)), mock.patch.object(jax.lax, "axis_index", _Axis):
                body(*arrays, *scratch.values())

        def scalars(cell: int, cta: int) -> dict[str, int]:
            places = (*np.unravel_index(cell, grid), *(np.unravel_index(cta, cluster) if cluster else ()))
            return dict(zip((*grid_names, *cluster_names), map(int, places), strict=True))

        sizes = {"clusters": math.prod(grid), "ctas": math.prod(cluster), "threads": 128 * num_threads, "contested": contested}
        emulated_lanes.run_clusters(stage_of_all, **sizes, arrays=arrays, scratch_words=words, scalars=scalars)
        for given, array in zip(inputs, arrays, strict=False):
            if isinstance(given, jax.Ref):
                given[...] = array
        return jax.tree.unflatten(jax.tree.structure(out_type), map(jax.numpy.asarray, arrays[len(inputs) :]))

    return launch


def _stage(axes: dict):
    """In place of `lanes.stage`: runs at once."""

    def stage(**scalars: _Axis):
        def decorate(function):
            def run(arrays, scratch):
                for path, memory in jax.tree_util.tree_leaves_with_path(scratch):
                    memory.name = f"scratch{jax.tree_util.keystr(path)}"
                function(arrays, scratch, **{name: axes[axis.name] for name, axis in scalars.items()})

            return run

        return decorate

    return stage
