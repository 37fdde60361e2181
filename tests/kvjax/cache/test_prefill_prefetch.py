"""Copies of pages for chunks of prefill: whatever frames a sequence has, each page is copied to the row that the chunk
is told."""

import jax
import jax.extend
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache.arrays import PagedKV
from kvjax.cache.host_pool import FrameCounts, prefill_prefetch
from pallas_kernels.core.pages import Pages

PAGE = 4


@st.composite
def sequences(draw):
    """Counts of frames, the frames of a sequence, and the first page of its chunk. Pages have different frames, and
    some none."""
    counts = FrameCounts(draw(st.integers(1, 12)), draw(st.integers(0, 8)), draw(st.integers(1, 60)))
    places = [*range(counts.device), *range(counts.border, counts.total)]
    if draw(st.booleans()):
        places = draw(st.permutations(places))
    frames = np.array(places[: draw(st.integers(1, len(places)))])
    given_back = draw(st.lists(st.integers(0, len(frames) - 1), max_size=3))
    frames[given_back] = -1
    return counts, frames, draw(st.integers(0, len(frames) - 1))


@settings(max_examples=12, deadline=None)
@given(sequences())
def test_every_page_is_in_the_row_that_is_told(drawn):
    counts, frames, own = drawn
    staged, window = prefill_prefetch.stage(frames, own, counts, written=3)
    assert window.first >= counts.border, "a window lies in host memory"
    assert window.first + window.rows <= counts.total
    pool = np.random.default_rng(0).normal(size=(counts.total, 1, PAGE, 2)).astype(np.float32)
    layer = PagedKV(Pages(*map(jax.numpy.asarray, (pool, pool + 1))), {})
    written = pool.copy()  # the chunk writes its pages after the window was copied
    written[frames[own:][frames[own:] >= 0]] += 5
    brought = window.of(layer, staged.places.shape[1])
    copies = None if brought is None else prefill_prefetch.copy_window(brought)
    copies = prefill_prefetch.complete(copies, Pages(*map(jax.numpy.asarray, (written, written + 1))), staged)
    places = staged.places[0]
    assert (places[len(frames) :] == -1).all()
    assert ((places[: len(frames)] >= 0) == (frames >= 0)).all()
    there = frames >= 0
    np.testing.assert_array_equal(copies.k[places[: len(frames)][there]], written[frames[there]])
    np.testing.assert_array_equal(copies.v[places[: len(frames)][there]], written[frames[there]] + 1)


def test_copies_take_no_memory_twice():
    """Attention's pages are the copies themselves, in the memory that the layer before gave them."""
    copies = [jax.ShapeDtypeStruct((4096, 2, PAGE, 8), np.float32)] * 2
    staged = prefill_prefetch.Staged(*(jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1, 4096), (64,), ())))
    pages = Pages(*[jax.ShapeDtypeStruct((100, 2, PAGE, 8), np.float32)] * 2)
    memory = jax.jit(prefill_prefetch.complete, donate_argnums=0).lower(Pages(*copies), pages, staged).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 4096 * 2 * PAGE * 8 * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 4


def test_keys_are_as_long_as_all_pages_before_values_begin_to_come():
    """So the array that came, which is shorter, gives its memory to that of the values."""
    coming = prefill_prefetch.WindowRows(Pages(*[jax.numpy.ones((8, 2, PAGE, 8))] * 2), width=12)
    copies = prefill_prefetch.copy_window(coming)
    assert [each.shape[0] for each in jax.tree.leaves(copies)] == [12, 12]
    np.testing.assert_array_equal(copies.v[:8], 1)
    equations = jax.make_jaxpr(lambda coming: prefill_prefetch.copy_values(*prefill_prefetch.copy_keys(coming, ()), ()))(coming).jaxpr.eqns
    (_, last), known = [at for at, each in enumerate(equations) if each.primitive.name == "device_put"], set()
    for each in reversed(equations[: last + 1]):  # what the copy of the values waits for
        if each is equations[last] or known & set(each.outvars):
            known |= {var for var in each.invars if not isinstance(var, jax.extend.core.Literal)}
    shapes = {each.outvars[0].aval.shape[0] for each in equations if each.outvars[0] in known and each.outvars[0].aval.shape}
    assert 12 in shapes, "the copy of the values does not wait for the lengthened keys"


def test_pages_that_follow_each_other_come_with_the_window():
    """Only the pages on the device and those of the chunk are copied one by one."""
    counts = FrameCounts(40, 20, 3000)
    frames = np.array([*range(160, 1460), *range(40)])
    staged, window = prefill_prefetch.stage(frames, own=1336, counts=counts, written=4)
    first = 60 + 3000 // 32  # the last place before 160
    assert (window.first, window.rows, int(staged.tail), staged.sources.size) == (first, 1536, 1460 - first, 64)
    assert staged.places[0, :1340].tolist() == [*range(160 - first, 1460 - first), *range(1460 - first, 1500 - first)]


def test_pages_at_the_end_of_host_memory_come_behind_the_others():
    counts = FrameCounts(2, 0, 3200)
    staged, window = prefill_prefetch.stage(np.array([*range(1902, 3202), 0, 1]), own=1300, counts=counts, written=2)
    assert (window.first, window.rows, int(staged.tail)) == (3202 - 1536, 1536, 0)
    assert staged.places[0, [0, 1299, 1300, 1301]].tolist() == [1536 - 1300, 1535, 0, 1]


def test_a_page_in_host_memory_does_not_bring_a_thousand():
    """However many others lie on the device."""
    counts = FrameCounts(1000, 0, 5000)
    staged, window = prefill_prefetch.stage(np.array([1000, *range(1000)]), own=1000, counts=counts, written=4)
    assert (window.rows, staged.places.shape[1]) == (16, 1536)


def test_windows_begin_at_few_places():
    counts = FrameCounts(2, 0, 3200)
    windows = {prefill_prefetch.stage(np.arange(low, low + 30), own=30, counts=counts, written=2)[1] for low in range(2, 3170, 7)}
    assert len(windows) <= 3 * prefill_prefetch.PLACES, "of two sizes"


def test_pages_far_apart_are_copied_one_by_one():
    counts = FrameCounts(2, 0, 5000)
    frames = np.arange(2, 5002, 25)
    staged, window = prefill_prefetch.stage(frames, own=200, counts=counts, written=2)
    assert staged.sources.size == staged.places.shape[1] == prefill_prefetch.staged_width(200)
    assert window.rows == 0
