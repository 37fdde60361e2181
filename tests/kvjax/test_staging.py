"""Copies of pages for chunks of prefill: whatever frames a sequence has, each page is copied to the row that the chunk is told."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.cache import staging
from kvjax.cache.spanning import FrameCounts
from kvjax.cache.types import PagedKV
from pallas_kernels.pages import Pages

PAGE = 4


@st.composite
def sequences(draw):
    """Counts of frames, the frames of a sequence, and the first page of its chunk. Pages have different frames, and some none."""
    counts = FrameCounts(draw(st.integers(1, 12)), draw(st.integers(0, 8)), draw(st.integers(1, 60)))
    places = [*range(counts.device), *range(counts.border, counts.total)]
    if draw(st.booleans()):
        places = draw(st.permutations(places))
    frames = np.array(places[: draw(st.integers(1, len(places)))])
    given_back = draw(st.lists(st.integers(0, len(frames) - 1), max_size=3))
    frames[given_back] = -1
    return counts, frames, draw(st.integers(0, len(frames) - 1))


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_every_page_is_in_the_row_that_is_told(drawn):
    counts, frames, own = drawn
    staged, window = staging.stage(frames, own, counts, written=3)
    assert window.first >= counts.border, "a window lies in host memory"
    assert window.first + window.rows <= counts.total
    pool = np.random.default_rng(0).normal(size=(counts.total, 1, PAGE, 2)).astype(np.float32)
    layer = PagedKV(Pages(pool, pool + 1), {})
    written = pool.copy()  # the chunk writes its pages after the window was copied
    written[frames[own:][frames[own:] >= 0]] += 5
    copies = staging.copy_window(window.of(jax.tree.map(jax.numpy.asarray, layer)), ())
    copies = staging.complete(copies, Pages(written, written + 1), staged)
    places = staged.places[0]
    assert (places[len(frames) :] == -1).all()
    assert ((places[: len(frames)] >= 0) == (frames >= 0)).all()
    there = frames >= 0
    np.testing.assert_array_equal(copies.k[places[: len(frames)][there]], written[frames[there]])
    np.testing.assert_array_equal(copies.v[places[: len(frames)][there]], written[frames[there]] + 1)


def test_pages_that_follow_each_other_come_with_the_window():
    """Only the pages on the device and those of the chunk are put in their rows one by one."""
    counts = FrameCounts(40, 20, 1000)
    frames = np.array([*range(60, 860), *range(40)])
    staged, window = staging.stage(frames, own=836, counts=counts, written=4)
    assert (window.first, window.rows) == (60, 1000)
    assert staged.places[0, :800].tolist() == list(range(800))
    assert (staged.targets < staged.places.shape[1]).sum() == 40
    assert staged.sources.size == staging.staged_width(44), "as many as there can be on the device"


def test_pages_far_apart_are_all_copied():
    counts = FrameCounts(2, 0, 5000)
    frames = np.arange(2, 5002, 25)
    staged, window = staging.stage(frames, own=200, counts=counts, written=2)
    assert staged.sources.size == staged.places.shape[1] == staging.staged_width(200)
    assert window.rows == staging.staged_width(200)


@pytest.mark.parametrize("there", [[0, 1, 2, 70, 71, 72, 73, 74], [3], [], [93, 95, 99]])
def test_the_window_with_most_pages_is_taken(there):
    first = staging._best_window(np.array(there, int), 16, 100)
    held = [sum(start <= each < start + 16 for each in there) for start in (*range(0, 84, 2), 84)]
    assert sum(first <= each < first + 16 for each in there) == max(held)
