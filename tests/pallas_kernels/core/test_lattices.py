"""The lattices against what defines them: all points near 0, the nearest of many, and a number for each."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.cache.pack_pages.reference import nearest
from pallas_kernels.core import lattices

SIZE = {"d4": 4, "e8": 8}


def points_of(lattice: str, levels: int) -> np.ndarray:
    """Every point whose coordinates lie between -levels and levels; in E8's second half, half a step further."""
    found = []
    for shift, reach in ((0.0, levels), (0.5, levels + 1)):
        steps = np.arange(-reach, levels + 1)
        grid = np.stack(np.meshgrid(*[steps] * SIZE[lattice], indexing="ij"), -1).reshape(-1, SIZE[lattice])
        found.append(grid[grid.sum(1) % 2 == 0] + shift)
        if lattice == "d4":
            break
    return np.concatenate(found).astype(np.float32)


def test_the_kissing_numbers():
    """24 points of D4 and 240 of E8 lie at squared distance 2 from 0, and none but 0 nearer."""
    for lattice, count in (("d4", 24), ("e8", 240)):
        lengths = (points_of(lattice, 1) ** 2).sum(1)
        assert (lengths < 2).sum() == 1
        assert (lengths == 2).sum() == count


@pytest.mark.quick_but("e8-1", "d4-3")
@pytest.mark.parametrize(("lattice", "levels"), [("d4", 1), ("d4", 3), ("e8", 1)])
def test_every_point_has_a_number_of_its_own(lattice, levels):
    """Pack and unpack every point of the box; a point is its own nearest point."""
    points = points_of(lattice, levels)
    count = 32 // SIZE[lattice]  # points of a token of 32 numbers
    points = points[: len(points) // count * count].reshape(-1, 32)
    np.testing.assert_array_equal(np.asarray(lattices.nearest(lattice, jnp.asarray(points))), points)
    codes = lattices.pack_points(lattice, levels, jnp.asarray(points))
    assert codes.shape[1] == lattices.word_bits(lattice, levels)  # 8 words of so many bits
    np.testing.assert_array_equal(np.asarray(lattices.points(lattice, levels, codes)), points)


@pytest.mark.quick_but("d4-38")
@pytest.mark.parametrize(("lattice", "levels"), [("d4", 38), ("d4", 76), ("d4", 126), ("e8", 38), ("e8", 126)])
def test_the_corners_of_large_boxes_have_numbers(lattice, levels):
    corners = np.array(list(itertools.product((-levels, levels), repeat=SIZE[lattice])), np.float32)
    moved = corners + 0.5 * np.sign(corners) if lattice == "e8" else corners  # of E8's second half, if the sum fits
    inner = np.zeros_like(corners)
    inner[:, 0], inner[:, -1] = levels % 2, levels
    for points in (corners, moved, inner):
        whole = np.floor(points)
        points = points[whole.sum(1) % 2 == 0]
        points = np.resize(points, (-(-points.size // 32) * 32 // SIZE[lattice], SIZE[lattice])).reshape(-1, 32)
        codes = lattices.pack_points(lattice, levels, jnp.asarray(points))
        np.testing.assert_array_equal(np.asarray(lattices.points(lattice, levels, codes)), points)


@pytest.mark.quick_but("d4")
@pytest.mark.parametrize("lattice", ["d4", "e8"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_nearest_point_is_the_nearest_of_all_around(lattice, data):
    levels = data.draw(st.sampled_from([1, 2, 38]))
    elements = st.floats(-levels, levels, width=32) | st.integers(-2 * levels, 2 * levels).map(lambda n: n / 2)
    block = data.draw(arrays.arrays(np.float32, SIZE[lattice], elements=elements))
    found = np.asarray(lattices.nearest(lattice, jnp.asarray(block)))
    assert ((found - block) ** 2).sum() == pytest.approx(((nearest(lattice, block) - block) ** 2).sum(), rel=1e-5, abs=1e-6)
    whole = np.floor(found)
    assert whole.sum() % 2 == 0
    assert len(set((found - whole).tolist())) == 1
    assert np.abs(found).max() <= levels + 0.5
    token = np.resize(found, (1, 32))
    codes = lattices.pack_points(lattice, levels, jnp.asarray(token))
    np.testing.assert_array_equal(np.asarray(lattices.points(lattice, levels, codes)), token)


def test_any_bytes_are_read_as_some_point():
    """Pages that were never written hold anything: reading them must not fail."""
    codes = np.random.default_rng(0).integers(0, 256, (64, 26), np.uint8)
    assert np.isfinite(np.asarray(lattices.points("e8", 38, jnp.asarray(codes)))).all()
