"""Inputs that catch real bugs in paged attention, and the error measure; shared by the suites of all ops."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import cuda_kernels
import jax
import jax.numpy as jnp
import numpy as np
import paging
import pytest
import tpu_kernels
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.core import dispatch

ROW_ERROR = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}


@dataclasses.dataclass
class Paged:
    """Arguments of an attention op as `paging` has it. Pages that no table names and tokens past a row's length hold
    NaN; page 0 is never named, the last page (which a -1 would wrap to) always is."""

    q: jnp.ndarray
    k: jnp.ndarray
    v: jnp.ndarray
    page_table: jnp.ndarray
    lengths: jnp.ndarray
    sm_scale: float

    @property
    def arrays(self) -> tuple:
        return self.q, self.k, self.v, self.page_table, self.lengths


def make_paged(
    seed: int = 0,
    *,
    lengths: tuple[int, ...] = (0, 1, 15, 16, 17, 40, 95, 96),
    num_queries: int = 1,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 32,
    page_size: int = 16,
    width: int = 6,
    dtype: str = "float32",
    keys: str = "random",
    hole: bool = False,
) -> Paged:
    """Ragged sequences on permuted pages, the last two sharing their first full page.

    keys: "random" (logits with a standard deviation of 4: softmax is peaked, not flat), "equal", "huge" (logits in the
    thousands), "denormal". hole: the last row has no second page.
    """
    rng = np.random.default_rng(seed)
    used = [-(-n // page_size) for n in lengths]
    num_pages = sum(used) + 4
    free = list(rng.permutation(np.arange(1, num_pages - 1)))
    free.insert(0, num_pages - 1)
    table = np.full((len(lengths), width), -1, np.int32)
    for row, n in enumerate(used):
        table[row, :n] = [free.pop() for _ in range(n)]
    if len(lengths) > 1 and min(lengths[-2:]) >= page_size:
        table[-1, 0] = table[-2, 0]
    table[np.argmax(used), 1 if max(used) > 1 else 0] = num_pages - 1

    pool = np.full((2, num_pages, kv_heads, page_size, head_dim), np.nan, np.float32)
    for row, length in enumerate(lengths):
        for page in range(used[row]):
            tokens = min(page_size, length - page * page_size)
            pool[:, table[row, page], :, :tokens] = rng.standard_normal((2, kv_heads, tokens, head_dim))
    if hole:
        table[-1, 1] = -1
    q = 4 * rng.standard_normal((len(lengths), num_queries, kv_heads * group, head_dim)).astype(np.float32)
    if keys == "equal":
        pool[0] = np.where(np.isnan(pool[0]), np.nan, np.float32(0.5))
    elif keys == "huge":
        q, pool[0] = 256 * np.round(q), np.round(2 * pool[0])  # integers: dot products are exact, so near ties are ties
    elif keys == "denormal":
        pool[0] *= np.float32(1e-40)
    q, k, v = (jnp.asarray(x.astype(jnp.dtype(dtype))) for x in (q, *pool))
    return Paged(q, k, v, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), head_dim**-0.5)


def random_blocks(seed: int, batch: int, kv_heads: int, num_blocks: int, width: int) -> jnp.ndarray:
    """Per KV head a list of distinct blocks in no order with -1 strewn in; the last row lists nothing for its first
    head."""
    rng = np.random.default_rng(seed)
    ids = np.full((batch, kv_heads, width), -1, np.int32)
    for row in range(batch):
        for head in range(kv_heads):
            count = min(num_blocks, width - 2)
            places = rng.permutation(width)[:count]
            ids[row, head, places] = rng.permutation(num_blocks)[:count]
    ids[-1, 0] = -1
    return jnp.asarray(ids)


def lists_for(paged: Paged, listed: int, block_size: int, per_query: bool = False) -> jnp.ndarray:
    """`random_blocks` of so many places, for each row, or for each of its queries: `[B, K, W]` or `[B, T, K, W]`."""
    num_blocks = paged.page_table.shape[1] * paged.k.shape[2] // block_size
    lead = paged.q.shape[: 1 + per_query]
    found = random_blocks(1, int(np.prod(lead)), paged.k.shape[1], num_blocks, listed)
    return found.reshape(*lead, *found.shape[1:])


def tiles_apart(paged: Paged, blocks, block_size: int) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    """k and v with the tiles of a page in another frame for each KV head, NaN in all other tiles; and the
    `block_frames` of `blocks` `[B, K, W]`."""
    rng, (pages, heads, page_size, _) = np.random.default_rng(4), paged.k.shape
    frame_of, pools = np.stack([rng.permutation(pages + 3)[:pages] for _ in range(heads)], 1).astype(np.int32), []
    for x in (paged.k, paged.v):
        pools.append(np.full((pages + 3, *x.shape[1:]), np.nan, x.dtype))
        pools[-1][frame_of, np.arange(heads)] = x
    blocks, table = np.asarray(blocks), np.asarray(paged.page_table)
    page = np.maximum(blocks, 0) * block_size // page_size
    there = (blocks >= 0) & (page < table.shape[1])
    ids = np.take_along_axis(table, np.minimum(page, table.shape[1] - 1).reshape(len(page), -1), axis=1).reshape(page.shape)
    return *map(jnp.asarray, pools), jnp.asarray(np.where(there & (ids >= 0), frame_of[ids, np.arange(heads)[:, None]], -1))


def assert_rows_close(out, ref, tolerance: float) -> None:
    """||out - ref|| / ||ref|| of every row (last axis) within the tolerance; rows that are 0 in `ref` are exactly 0."""
    assert out.shape == ref.shape
    assert out.dtype == ref.dtype
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert np.isfinite(out).all()
    norm = np.linalg.norm(ref, axis=-1)
    error = np.linalg.norm(out - ref, axis=-1)
    worst = np.max(np.divide(error, norm, out=np.zeros_like(error), where=norm > 0), initial=0)
    assert worst <= tolerance, f"worst row is off by {worst:.2e} of its norm, allowed {tolerance:.0e}"
    assert (error[norm == 0] == 0).all(), "a row with nothing to read is not 0"


def assert_lse_close(lse, ref) -> None:
    """Within 1e-5 absolute, or relative where values are large; -inf exactly where the reference has it."""
    assert lse.dtype == jnp.float32
    assert lse.shape == ref.shape
    np.testing.assert_allclose(np.asarray(lse, np.float64), np.asarray(ref, np.float64), rtol=1e-5, atol=2e-5)


def assert_chunk_close(found, ref, starts, lengths, tolerance: float) -> None:
    """(out, lse) of a chunk: close where a query is one of the sequence, finite everywhere. A sequence of length 0 has
    no padding."""
    starts, lengths, found, ref = jax.tree.map(np.asarray, (starts, lengths, found, ref))
    position = starts[:, None] + np.arange(ref[0].shape[1])
    meant = (position < lengths[:, None]) | (lengths[:, None] == 0)
    assert [x.shape for x in found] == [x.shape for x in ref]
    assert np.isfinite(found[0].astype(np.float32)).all(), "padding gave infinite or NaN values"
    assert_rows_close(*(np.where(meant[..., None, None], x, x.dtype.type(0)) for x in (found[0], ref[0])), tolerance)
    assert_lse_close(*(np.where(meant[..., None], x, x.dtype.type(0)) for x in (found[1], ref[1])))


def assert_same_bits(a, b) -> None:
    """Equal bit for bit, NaN and signed zero included."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes(), f"{(a != b).sum()} of {a.size} values differ"


def ragged_lists(seed: int, shape: tuple[int, int, int], num_blocks: int, width: int) -> jnp.ndarray:
    """Per tile and head a list of distinct blocks, of any length from none to `width`, in no order, -1 strewn in."""
    rng = np.random.default_rng(seed)
    ids = np.full((*shape, width), -1, np.int32)
    for place in np.ndindex(*shape):
        count = min(int(rng.integers(0, width + 1)), num_blocks)
        ids[(*place, rng.permutation(width)[:count])] = rng.permutation(num_blocks)[:count]
    ids[-1, -1, 0] = -1
    return jnp.asarray(ids)


def tiles_with_lists(paged: Paged, starts, *, window, block_size: int, query_tile: int, lists: int) -> tuple[tuple, dict]:
    """Positional arguments and keywords of block_sparse_attention; lists: how wide. Two of the blocks that are listed
    do not exist."""
    batch, num_queries, num_heads = paged.q.shape[:3]
    num_blocks = paged.page_table.shape[1] * paged.k.shape[2] // block_size + 2
    blocks = ragged_lists(1, (batch, -(-num_queries // query_tile), num_heads), num_blocks, lists)
    keywords = {"blocks": blocks, "block_size": block_size, "query_tile": query_tile, "window": window}
    return (*paged.arrays[:4], jnp.asarray(starts, jnp.int32), paged.lengths), {"sm_scale": paged.sm_scale, **keywords}


def chunk_checker(arguments: Callable, reference: Callable, slack: float = 1) -> Callable:
    """(op, case) -> asserts that out and LSE of a chunk are the reference's. slack: times the rounding of the
    results."""
    expected = functools.cache(lambda case: reference(*arguments(case)[0], **arguments(case)[1]))

    def run(op: Callable, case: str) -> None:
        arrays, keywords = arguments(case)
        assert_chunk_close(op(*arrays, **keywords), expected(case), *arrays[-2:], slack * ROW_ERROR[arrays[0].dtype.name])

    return run


def assert_all_same_bits(some, others, rows=slice(None)) -> None:
    """Those rows of all results of two calls are equal bit for bit."""
    for a, b in zip(some, others, strict=True):
        assert_same_bits(a[rows], b[rows])


def moved_pages(k, v, table) -> tuple[jnp.ndarray, ...]:
    """The same tokens on other pages."""
    order, table = np.random.default_rng(9).permutation(k.shape[0]), np.asarray(table)
    moved = np.where(table >= 0, np.argsort(order)[table], -1).astype(np.int32)
    return *(jnp.asarray(np.asarray(x)[order]) for x in (k, v)), jnp.asarray(moved)


def assert_chunk_bits_stand(against: str, op: Callable, arrays: tuple) -> None:
    """What a row gets from a chunk of 8 rows keeps its bits: called again; on a wider table; beside other queries,
    pages and lengths from nothing to full tables; with its tokens on other pages; whatever is written after it, or
    never."""
    q, k, v, table, starts, lengths = map(np.asarray, arrays)
    once = op(*arrays)
    if against == "again":
        assert_all_same_bits(once, op(*arrays))
    elif against == "a wider table":
        assert_all_same_bits(once, op(q, k, v, np.pad(table, ((0, 0), (0, 7)), constant_values=-1), starts, lengths))
    elif against == "company":
        full = table.shape[1] * k.shape[2]
        for kept, length in itertools.product((5, 6), (0, full)):
            others = np.arange(8) != kept
            changed = op(
                np.where(others[:, None, None, None], -q, q),
                *(k, v, np.where(others[:, None], table[-1], table)),
                *(np.where(others, max(length - q.shape[1], 0), starts), np.where(others, length, lengths)),
            )
            assert_all_same_bits(once, changed, kept)
    elif against == "other pages":
        k, v, table = moved_pages(k, v, table)
        assert_all_same_bits(once, op(q, k, v, table, starts, lengths))
    elif against == "later tokens":
        assert_all_same_bits(once, op(q, k, v, table, starts, np.minimum(lengths, starts + q.shape[1])), 7)
    else:
        raise ValueError(against)


def huge_pool(num_pages: int, page: tuple[int, ...], named: dict[int, np.ndarray]) -> jnp.ndarray:
    """A float16 pool that is zero but for a few pages. Memory is taken only by what is touched: no copy is made on the
    way into JAX."""
    size = num_pages * int(np.prod(page))
    try:
        memory = mmap.mmap(-1, 2 * size)
    except OSError:
        pytest.skip(f"no address space for {2 * size} bytes")
    pool = np.frombuffer(memory, np.float16).reshape(num_pages, *page)
    for number, content in named.items():
        pool[number] = content
    array = jax.dlpack.from_dlpack(pool)
    assert array.unsafe_buffer_pointer() == pool.ctypes.data
    return array


def must_fail(check: Callable[..., None], op: Callable, cases: dict) -> None:
    """Run a suite's own check over all its cases on a mutant; at least one has to fail, and none may crash
    otherwise."""
    for case in cases:
        try:
            check(op, case)
        except AssertionError:
            return
    pytest.fail("the suite accepts this mutant")


@pytest.fixture(scope="session")
def tools():
    """The functions of this file, for test modules to use."""

    class Tools:
        huge_pool = staticmethod(huge_pool)
        row_error = ROW_ERROR
        make_paged = staticmethod(make_paged)
        random_blocks = staticmethod(random_blocks)
        lists_for = staticmethod(lists_for)
        tiles_apart = staticmethod(tiles_apart)
        assert_rows_close = staticmethod(assert_rows_close)
        assert_lse_close = staticmethod(assert_lse_close)
        assert_chunk_close = staticmethod(assert_chunk_close)
        assert_same_bits = staticmethod(assert_same_bits)
        must_fail = staticmethod(must_fail)
        tiles_with_lists = staticmethod(tiles_with_lists)
        ragged_lists = staticmethod(ragged_lists)
        chunk_checker = staticmethod(chunk_checker)
        assert_all_same_bits = staticmethod(assert_all_same_bits)
        moved_pages = staticmethod(moved_pages)
        assert_chunk_bits_stand = staticmethod(assert_chunk_bits_stand)

    return Tools


@pytest.fixture(params=["wgmma", "without wgmma"])
def tensor_cores(request):
    """For tests on a Hopper GPU of kernels that have two forms: Hopper's, and its successors', which Hopper can run,
    too."""
    with contextlib.nullcontext() if request.param == "wgmma" else dispatch.forced(dispatch.BLACKWELL):
        yield request.param


@pytest.fixture
def nvidia() -> None:
    """For tests marked `gpu` that run on every NVIDIA GPU from Ampere on: skips elsewhere."""
    if "cudnn" not in dispatch.available("flash_attention"):
        pytest.skip("needs an NVIDIA GPU of compute capability 8.0 or newer")


@pytest.fixture
def spill_free(tmp_path, capsys):
    """`spill_free(cases, tight={}, launches=None)`: compile the cases for an H200, print what each kernel takes, and
    return that by case. No register of the cases may spill, except of `tight` ones. launches: kernels of every case, if
    all launch as many."""

    def check(cases, tight=(), launches=None):
        return cuda_kernels.check_spills("H200", tmp_path, capsys, cases, tight, launches)

    return check


@pytest.fixture(params=cuda_kernels.BLACKWELL_GPUS)
def spill_free_on_blackwell(request, tmp_path, capsys):
    """The same for GPUs newer than Hopper, of a kernel that has a form for them. Cases that it refuses there are
    printed."""

    def check(cases, tight=(), launches=None):
        return cuda_kernels.check_spills(request.param, tmp_path, capsys, cases, tight, launches)

    return check


@pytest.fixture
def on_hopper(monkeypatch):
    """Dispatch believes that it is on a Hopper GPU."""

    def available(op, backend=None):
        return tuple(name for name in dispatch.IMPLEMENTATIONS[op] if name != "mosaic_tpu")

    monkeypatch.setattr(dispatch, "available", available)


@pytest.fixture(scope="session")
def picked():
    """(case, **keywords) -> by op, the implementations that dispatch picks for a call of the public op, which is
    traced. case: (op, arrays, static), as `cuda.lower` takes them apart."""

    def picked(case: tuple, **keywords) -> dict[str, str]:
        op, arrays, static = case
        structs = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of[0], jnp.dtype(of[1])), arrays, is_leaf=lambda x: isinstance(x, tuple))
        with dispatch.listening() as heard:
            jax.eval_shape(functools.partial(paging.public(op), **static, **keywords), **structs)
        return heard

    return picked


@pytest.fixture
def no_races(capfd):
    """For modules whose TPU kernels are interpreted: no test prints a race, which with JAX 0.11 is only printed."""
    yield
    pltpu.reset_tpu_interpret_mode_state()
    assert tpu_kernels.RACE not in capfd.readouterr().out


@pytest.fixture
def on_tpu(monkeypatch):
    """Dispatch believes that it is on a TPU."""
    monkeypatch.setattr(dispatch, "available", functools.partial(dispatch.available, backend="tpu"))


# The interpreter of Mosaic GPU kernels, with what it lacks for ours. All use of JAX's private interpreter is here. It
# lacks: `wgmma` whose left operand is in registers, `pl.run_state` over an accumulator, and a look at whether what
# `wgmma` reads from shared memory has arrived and been published. Written for jax 0.11.2 to 0.12.


@pytest.fixture
def fresh_caches():
    """No kernel traced before or during a test is used in or after it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def with_threads(request):
    """`with_threads(name, chosen="")`: run a module of tests beside this one in a process of its own, with threads
    enough for kernels whose warpgroups wait for each other. chosen: only tests with this in their names."""

    def run(name: str, chosen: str = "") -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, request.path.parent / name]
        done = subprocess.run(command, env=os.environ | {"NPROC": "8", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]

    return run


@pytest.fixture
def interpreter(monkeypatch):
    """`interpreter.params`, to be given as `interpret=`; `interpreter.finished(op, ...)`, the results of a call, and
    AssertionError if a kernel was stopped; `interpreter.races_found()`. Kernels run on the CPU whatever else there
    is."""

    def finished(op: Callable, *arrays, **static):
        try:
            return jax.block_until_ready(op(*arrays, **static))
        except jax.errors.JaxRuntimeError as error:
            raise AssertionError("the interpreter stopped") from error

    if not (0, 11, 2) <= jax.__version_info__ < (0, 13):
        pytest.skip(f"the extension of the interpreter was written for jax 0.11.2 to 0.12, not for {jax.__version__}")
    callbacks = _extend(monkeypatch)
    callbacks.reset_gpu_interpret_mode_state()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = plgpu.InterpretGPUParams(detect_races=True)
        yield SimpleNamespace(params=params, finished=finished, races_found=lambda: callbacks.get_races().races_found)
    callbacks.reset_gpu_interpret_mode_state()


def _extend(monkeypatch):
    from jax._src.pallas import primitives
    from jax._src.pallas.mosaic_gpu import core
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
    from jax._src.state.discharge import run_state_p
    from jax._src.state.types import AbstractRef

    interpreter = jaxpr_interpret.JaxprInterpreter
    interpret, run_scoped, wgmma = interpreter.interpret, interpreter._interpret_run_scoped_p, interpreter._interpret_wgmma_ref_p

    def is_ref(var):
        return isinstance(var.aval, AbstractRef)

    def allocate(self, token, value, source_info):
        """A buffer of this thread's registers that holds `value`."""
        space = shared_memory.get_memory_space_idx(core.MemorySpace.REGS)
        token, request = gpu_callbacks.call_make_allocation_request_array(token=token, compute_unit=self.thread, memory_space_id=space)
        return gpu_callbacks.call_allocate_buffer(token, self.mesh_location, self.thread, request, value, source_info)

    def free(self, token, key, source_info):
        return gpu_callbacks.call_deallocate_buffer(token, self.mesh_location, self.thread, key, source_info)

    def interpret_extended(self, jaxpr, token, *args):
        """`run_state` takes the way of `run_scoped`, which hands on the order of effects."""
        eqns = [eqn.replace(primitive=primitives.run_scoped_p) if eqn.primitive is run_state_p else eqn for eqn in jaxpr.eqns]
        return interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    def run_state(self, eqn, token, get_values):
        if "is_initialized" not in eqn.params:  # a `run_scoped` by birth
            return run_scoped(self, eqn, token, get_values)
        body, refs, results = eqn.params["jaxpr"], [], []
        for outer, inner, value in zip(eqn.invars, body.invars, get_values(), strict=True):
            if not is_ref(outer):
                token, value = allocate(self, token, jnp.asarray(value, inner.aval.inner_aval.dtype), eqn.source_info)
            refs.append(value)
        token, _ = self.interpret(body, token, *refs)
        for outer, inner, key in zip(eqn.invars, body.invars, refs, strict=True):
            if is_ref(outer):
                results.append(key)
                continue
            place = {"mesh_location": self.mesh_location, "thread": self.thread, "source_info": eqn.source_info}
            of_buffer = {"result_shape_and_dtype": inner.aval.inner_aval, "allocation_key_as_array": key, "transforms": ()}
            token, value = gpu_callbacks.call_get(token=token, **of_buffer, **place)
            token = free(self, token, key, eqn.source_info)
            results.append(value)
        return token, results

    @gpu_callbacks.fail_on_exception
    def check_read(token, thread, key, transforms, *, source_info):
        """A read by the asynchronous proxy. Not remembered: the interpreter does not know when `wgmma` is done with its
        operands."""
        memory, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        access = memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        clock = clock.async_smem_clock.copy()
        races.check_read(thread, clock, key, access, source_info=source_info)
        with races.lock:
            races.reads[key][:] = [read for read in races.reads[key] if read[1] is not clock]
        return token

    def wgmma_extended(self, eqn, token, get_values):
        accumulator, a, b, *leaves = get_values()
        none = jax.tree.structure([])
        structures = [eqn.params[f"{name}_transforms_tree"] or none for name in ("acc", "a", "b")]
        _, *transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(structures), leaves)
        for var, key, through in zip(eqn.invars[1:3], (a, b), transforms, strict=True):
            if is_ref(var):
                check = functools.partial(check_read, source_info=eqn.source_info)
                token = jax.experimental.io_callback(check, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, key, through)
        if is_ref(eqn.invars[1]):
            return wgmma(self, eqn, token, lambda: [accumulator, a, b, *leaves])
        token, a = allocate(self, token, a, eqn.source_info)
        token, results = wgmma(self, eqn, token, lambda: [accumulator, a, b, *leaves])
        return free(self, token, a, eqn.source_info), results

    monkeypatch.setattr(interpreter, "interpret", interpret_extended)
    monkeypatch.setattr(interpreter, "_interpret_run_scoped_p", run_state)
    monkeypatch.setattr(interpreter, "_interpret_wgmma_ref_p", wgmma_extended)
    return gpu_callbacks
