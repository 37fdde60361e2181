"""Pallas TPU kernels without a TPU: interpreted on the CPU with race detection, their copies counted, and compiled
ahead of time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import prefill_fold, tile_copies

INTERPRET = pltpu.InterpretParams(detect_races=True)
RACE = "RACE DETECTED"
"""What the interpreter prints; that it does is tested beside gather_attention for TPU."""
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for what is interpreted: the interpreter compiles for longer than it runs."""
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Chips that kernels are compiled for, and a topology that has them."""

NO_COPIES = ("ENTRY", "parameter(", "custom-call(", "get-tuple-element(", "tuple(", "bitcast(")
"""Lines of a compiled program that name an array without making one."""


@contextlib.contextmanager
def counted_copies() -> Iterator[collections.Counter]:
    """Bytes that the copies of interpreted kernels read from HBM ("in") and write to it ("out") inside the block, and
    how many copies there are. Copies that a kernel makes itself, not those of its grid's blocks. It patches JAX's
    private interpreter."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    if jax.__version_info__ < (0, 11, 2) or jax.__version_info__ >= (0, 13):
        pytest.skip(f"copies are counted in the interpreter of jax 0.11.2 to 0.12, not of {jax.__version__}")
    found: collections.Counter = collections.Counter()
    read, hbm = interpreter.DMA.execute_read, ("any", "hbm")

    def execute_read(copy):
        before = copy.state
        read(copy)
        if copy.state == before:  # read already
            return
        source, target = (interpreter.TPU_MEMORY_SPACE_NAMES[int(x)] for x in (copy.src_memory_space, copy.dst_memory_space))
        way = "in" if source in hbm else "out" if target in hbm else "inside"
        found.update({way: copy.data_size, f"copies {way}": 1})

    with mock.patch.object(interpreter.DMA, "execute_read", execute_read):
        yield found


def compile_ahead(function: Callable, arrays, chip: str, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compile a call for one TPU of a kind, without one. arrays: positional arguments, as shapes. Skips without
    libtpu."""
    pytest.importorskip("libtpu")
    told = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # there is no TPU to ask, nor one to keep from other workers
    with mock.patch.dict(os.environ, told):
        device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
    lowered = jax.jit(function, donate_argnums=donate).trace(*arrays).lower(lowering_platforms=("tpu",))
    with warnings.catch_warnings(action="ignore"):  # what the cache of compiled programs keeps of this it cannot read without a TPU
        return lowered.compile()


def assert_not_copied(compiled: jax.stages.Compiled, *arrays: jax.ShapeDtypeStruct) -> None:
    """XLA makes no array of one of these shapes, neither for the layout that a kernel wants nor for an update that
    could be in place."""
    for array in arrays:
        shape = f"[{','.join(map(str, array.shape))}]"
        made = [line for line in compiled.as_text().splitlines() if shape in line.partition(" = ")[2].partition("(%")[0]]
        made = [line for line in made if not any(word in line for word in NO_COPIES)]
        assert not made, made


def assert_lowers(function: Callable, arrays: Iterable) -> None:
    """The call lowers for a TPU, to one kernel. arrays: positional arguments, as shapes."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1


def _positions_only(clean):
    return lambda copies: clean(dataclasses.replace(copies, length=jnp.int32(2**30)))


def _not_rescaled(fold):
    def change(partial, logits, values, terms):
        top, total, weighted = fold(partial, logits, values, terms)
        kept = jnp.exp(partial[0] - jnp.where(top == -jnp.inf, 0.0, top))
        return top, total, weighted + partial[2] * (1 - kept)

    return change


def _short_weights(weighted_sum):
    return lambda weights, values, terms: prefill_fold.product(weights.astype("bfloat16"), values, contract=0)


IN_TILES = {
    "NaN of tokens never written": (tile_copies.TileCopies, "clean", _positions_only),
    "weighted values not rescaled": (prefill_fold, "fold", _not_rescaled),
    "weights of 8 bits": (prefill_fold, "weighted_sum", _short_weights),
}
"""Mutants of kernels that fold tiles of keys: whose attribute, its name, and what makes the mutant of it."""
