"""What a cache declares of itself: sizes, groups, bytes; and that nothing else is asked for them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from kvjax.cache import CacheSpec, GroupSpec, IndexSpec, LatentSpec, PagedSpec
from kvjax.cache.index_spec import without_covered

FULL, NEAR = GroupSpec("full", 16), GroupSpec("window:40", 16, window=40)
KEYS, WIDE = PagedSpec("full", 2, 8, "float32"), PagedSpec("window:40", 1, 32, "bfloat16")
LATENT = LatentSpec("full", 24, 8, 16, "bfloat16", "float8_e4m3fn")
MIXED = CacheSpec((FULL, NEAR), (WIDE, KEYS, WIDE, LATENT))
ROOT = Path(__file__).parents[3]


def test_layers_and_groups_know_each_other():
    assert (MIXED.layers_of("full"), MIXED.layers_of("window:40")) == ((1, 3), (0, 2))
    assert [MIXED.group_of(layer) for layer in range(4)] == [NEAR, FULL, NEAR, FULL]
    assert MIXED.kv_heads == 1 + 2 + 1 + 1


def test_pages_are_as_declared_and_only_layers_that_read_all_tokens_have_indexes():
    spec = CacheSpec((FULL, NEAR), (WIDE, KEYS))
    near, full = spec.empty({"full": 5, "window:40": 3}, (IndexSpec("bounds", 16),))
    assert [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves((near, full))] == [
        ((3, 1, 16, 32), "bfloat16"),
        ((3, 1, 16, 32), "bfloat16"),
        ((5, 2, 16, 8), "float32"),
        ((5, 2, 16, 8), "float32"),
        ((5, 2, 1, 2, 8), "float32"),
    ]


@pytest.mark.parametrize(
    ("group", "indexes", "expected"),
    [
        ("window:40", (), 2 * (2 * 16 * 32 * 2)),
        ("window:40", (IndexSpec("bounds", 16),), 2 * (2 * 16 * 32 * 2)),
        ("full", (), 2 * 2 * 16 * 8 * 4 + 16 * (32 * 2 + 16 + 4)),
    ],
)
def test_bytes_of_a_page_in_all_layers_of_its_group(group, indexes, expected):
    assert MIXED.bytes_per_page(group, indexes) == expected


def test_an_index_of_every_nth_layer_is_kept_where_it_is_scanned():
    """Layers with a window do not count. A layer that chooses may scan the pages of one that does not."""
    full, every = (IndexSpec("bounds", 16, every=each) for each in (1, 2))
    spec = CacheSpec((FULL, NEAR), (WIDE, KEYS, KEYS, WIDE, KEYS, KEYS))

    def kept(spec, *indexes):
        layers = spec.empty({"full": 2, "window:40": 2}, indexes)
        return [number for number, layer in enumerate(layers) if layer is not None and layer.index]

    assert kept(spec, full) == kept(spec, every, full) == [1, 2, 4, 5]
    assert kept(spec, every) == [1, 4]
    assert kept(spec, dataclasses.replace(every, every=3)) == [1, 5]
    rows = [spec.bytes_per_page("full", (index,)) - spec.bytes_per_page("full") for index in (full, every)]
    assert rows == [4 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 4]
    shared = CacheSpec((FULL, NEAR), (WIDE, KEYS, KEYS, dataclasses.replace(KEYS, share_with=2)))
    assert kept(shared, every) == [1, 2]
    assert kept(shared, dataclasses.replace(every, every=3)) == [1]


def test_an_index_covers_another_where_it_is_there_in_all_its_layers():
    four, two, unless = IndexSpec("keys4", 16, every=4), IndexSpec("keys4", 16, every=2), IndexSpec("keys4", 16, unless_packed=True)
    assert two.covers(four)
    assert not four.covers(two)
    assert not unless.covers(two)
    assert IndexSpec("keys4", 16).covers(unless)
    assert not IndexSpec("keys4", 8).covers(two)
    assert not IndexSpec("keys8", 16).covers(two)
    assert without_covered((four, two, unless, two)) == (two, unless)


def test_an_index_costs_its_rows():
    spec = CacheSpec((FULL,), (KEYS, KEYS))
    assert spec.bytes_per_page("full", (IndexSpec("bounds", 8),)) - spec.bytes_per_page("full") == 2 * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CacheSpec((FULL, FULL), (KEYS,)), "different names"),
        (lambda: CacheSpec((), ()), "different names"),
        (lambda: CacheSpec((FULL,), (WIDE,)), "every layer a group"),
        (lambda: CacheSpec((FULL, NEAR), (KEYS,)), "every layer group needs layers"),
        (lambda: GroupSpec("full", 0), "page_size of layer group 'full' must be at least 1 token, got 0"),
        (lambda: GroupSpec("near", 16, 0), "window of layer group 'near' must be at least 1 token, got 0"),
        (lambda: LATENT.empty(2, 16, (IndexSpec("bounds", 16),)), "no other index"),
    ],
)
def test_specs_that_make_no_sense_are_refused(make, said):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(said)):
        make()


def test_sizes_come_from_the_spec():
    """No one asks the first layer's pages what the cache is."""
    for folder in ("kvjax", "models", "serving"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"layers\[0\]\.(k|v|pages)\b", file.read_text(encoding="utf-8")), file
