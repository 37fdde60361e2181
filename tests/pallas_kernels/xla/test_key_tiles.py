"""Tiles of a row: they follow each other without a gap, and lie where they do whatever the row's width is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.xla import key_tiles

cuts = st.builds(
    lambda count, first, more, stride: key_tiles.Cut(count, first, first + more, stride),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(0, 60),
    st.integers(1, 5),
)


def all_tiles(cut: key_tiles.Cut) -> list[tuple[int, int]]:
    return [*cut.growing, *((cut.start + i * cut.largest, cut.largest) for i in range(cut.equal))]


@given(cuts)
def test_tiles_follow_each_other_to_the_end(cut):
    end = 0
    for start, size in all_tiles(cut):
        assert start == end
        assert size <= cut.largest
        end = start + size
    assert end == cut.width >= cut.count


@given(cuts, st.integers(1, 300))
def test_tiles_do_not_depend_on_the_width(cut, count):
    other = key_tiles.Cut(count, cut.first, cut.largest, cut.stride)
    for one, two in zip(all_tiles(cut), all_tiles(other), strict=False):
        assert one == two


@settings(deadline=None, max_examples=25)
@given(cuts, st.floats(0, 1))
def test_a_walk_folds_every_tile_that_is_used_once_and_in_order(cut, share):
    used = int(share * cut.count)

    def fold(start, size, state):
        seen, last, in_order = state
        start = jnp.asarray(start, jnp.int32)
        places = start + jnp.arange(size)
        return seen.at[places].add(1), start, in_order & (start > last)

    state = jnp.zeros(cut.width, jnp.int32), jnp.int32(-1), jnp.bool_(True)
    seen, _, in_order = jax.jit(lambda used: key_tiles.walk(cut, used, fold, state))(used)
    assert in_order
    assert (np.asarray(seen)[:used] == 1).all()
    assert (np.asarray(seen) <= 1).all()


def test_a_long_row_is_not_walked_to_its_end():
    cut = key_tiles.Cut(count=10_000, first=10, largest=10, stride=2)
    folded = jax.jit(lambda used: key_tiles.walk(cut, used, lambda start, size, state: state + 1, 0))
    assert [int(folded(used)) for used in (0, 1, 20, 21, 10_000)] == [0, 2, 2, 4, 1000]


@pytest.mark.parametrize(("bytes_each", "most", "count"), [(1, 100, 96), (2**20, 10**9, 256), (2**20 + 1, 10**9, 192), (2**40, 5, 1)])
def test_what_fits_is_a_power_of_two_or_half_more(bytes_each, most, count):
    assert key_tiles.fitting(bytes_each, most) == count


def test_tiles_of_a_model_of_7b():
    """4 KV heads of 128 in 16 bits, 28 heads."""
    one = 128 * (2048 + 8 * 28)
    assert all_tiles(key_tiles.cut(1024, 128, one)) == [(0, 64), (64, 192), (256, 768)]
    eight = key_tiles.cut(1024, 128, 8 * one)
    assert (eight.largest * 8 * one <= key_tiles.MEMORY, eight.equal <= eight.stride) == (True, True)
