"""How many CTAs share a piece of work: exact numbers, by op, shapes and multiprocessors of the GPU.

Splits decide in what order sums are added, so they decide bits. Another number here is other bits on that GPU. The
columns are those of `GPUS`; without an NVIDIA GPU kernels are lowered for the first.
"""

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention.gather_attention import listed, mma
from pallas_kernels.attention.gather_attention import mosaic_gpu as gather
from pallas_kernels.attention.gather_attention.api import Call
from pallas_kernels.attention.selected_attention import mosaic_gpu as selected
from pallas_kernels.cache.copy_tiles import mosaic_gpu as copy_tiles
from pallas_kernels.cache.fetch_tiles import mosaic_gpu as fetch_tiles
from pallas_kernels.collectives import peer_buffers
from pallas_kernels.collectives.all_gather import mosaic_gpu as all_gather
from pallas_kernels.core import dispatch
from pallas_kernels.core.matrices import MatrixFormat
from pallas_kernels.hopper.decode import clusters
from pallas_kernels.hopper.prefill import prefill_fold
from pallas_kernels.matmul.project_tokens.shape import Shape as Projection
from pallas_kernels.selection.block_mass import mosaic_gpu as block_mass
from pallas_kernels.selection.select_blocks import mosaic_gpu as select_blocks
from pallas_kernels.selection.select_tiles import mosaic_gpu as select_tiles
from pallas_kernels.selection.top_k import plan
from pallas_kernels.selection.union_blocks import mosaic_gpu as union_blocks

GPUS = {"H200": 132, "B200": 148, "H20": 78}


@pytest.fixture(params=GPUS)
def column(request, monkeypatch):
    """The number of a GPU in the tables, which is then the one that kernels are for."""
    monkeypatch.setattr(dispatch, "multiprocessors", lambda: GPUS[request.param])
    return list(GPUS).index(request.param)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gather_arguments(batch, kv_heads, width, **config):
    """Of a call with 7 query heads per KV head: q, pages, and a list of `width` blocks of 128 tokens, or none."""
    q = struct(batch, 1, 7 * kv_heads, 128)
    pages = SimpleNamespace(kv_heads=kv_heads, page_size=128, head_dim=128, v_head_dim=128, packed=False)
    call = Call(block_size=128, window=None, sm_scale=1.0, return_block_lse=False, config=gather.Config(**config))
    return call, q, pages, None if width is None else struct(batch, kv_heads, width, dtype=jnp.int32)


# (batch, KV heads, width of the list or None): CTAs that share the keys of a (row, KV head).
SPANS = {
    (1, 1, None): (132, 148, 78),
    (1, 2, None): (66, 74, 39),
    (1, 4, None): (33, 37, 19),
    (1, 8, None): (16, 18, 9),
    (8, 4, None): (4, 4, 2),
    (8, 8, None): (2, 2, 1),
    (16, 8, None): (1, 1, 1),
    (32, 8, None): (1, 1, 1),
    (1, 4, 4): (8, 8, 8),
    (1, 4, 37): (33, 37, 19),
    (8, 4, 37): (4, 4, 2),
}


@pytest.mark.parametrize("case", SPANS, ids=str)
def test_spans_of_gather_attention(case, column):
    call, q, pages, blocks = gather_arguments(*case, multiprocessors=dispatch.multiprocessors())
    assert gather._shape(call, q, pages, blocks).splits == SPANS[case][column]
    assert gather.span_splits(call.config, q.shape[0], pages.kv_heads) >= SPANS[case][column]


def test_spans_take_the_number_from_the_device(monkeypatch):
    """A config may name it; a named number of splits goes before it."""
    seen = []
    monkeypatch.setattr(dispatch, "multiprocessors", lambda: 64)
    monkeypatch.setattr(gather, "unsupported", lambda *_: None)
    monkeypatch.setattr(gather, "multiplies_by_wgmma", lambda _: True)
    monkeypatch.setattr(gather, "_attend", lambda call, *_, **__: seen.append(call.config))
    for config in (None, gather.Config(), gather.Config(multiprocessors=20), gather.Config(splits=3)):
        call, q, pages, _ = gather_arguments(1, 4, None)
        gather.gather_attention(dataclasses.replace(call, config=config), q, pages, None, None, None)
    assert [config.multiprocessors for config in seen] == [64, 64, 20, 64]
    assert [gather.span_splits(config, 1, 4) for config in seen] == [16, 16, 5, 3]
    with pytest.raises(ValueError, match="multiprocessors must be at least 1, got 0"):
        gather.Config(multiprocessors=0)


# (sequence, KV head) pairs: CTAs of the cluster of each, in all ops that work on a list or a selection in one launch.
CLUSTERS = {1: 16, 4: 16, 7: 16, 8: 8, 15: 8, 16: 6, 17: 6, 18: 5, 22: 5, 23: 4, 30: 4, 31: 3, 39: 3, 40: 2, 66: 2, 67: 1, 512: 1}
MORE = {
    148: {7: 16, 8: 8, 16: 8, 17: 6, 19: 6, 20: 5, 24: 5, 25: 4, 33: 4, 34: 3, 43: 3, 44: 2, 74: 2, 75: 1},
    78: {4: 16, 5: 8, 8: 8, 9: 6, 10: 6, 11: 5, 13: 5, 14: 4, 17: 4, 18: 3, 23: 3, 24: 2, 39: 2, 40: 1},
}


@pytest.mark.parametrize("number", GPUS.values())
def test_clusters_by_pairs(number):
    wanted = CLUSTERS if number == 132 else MORE[number]
    assert {units: clusters.ctas_per_unit(units, number) for units in wanted} == wanted


def test_ops_with_clusters_ask_for_them(column):
    """gather_attention with a list, in both forms, and select_blocks, of which selected_attention is made."""
    own = [MORE[148] | {4: 16, 32: 4}, MORE[78] | {4: 16, 32: 2}]
    wanted = ({4: 16, 32: 3}, *own)[column]
    for batch, kv_heads in ((1, 4), (8, 4)):
        _, q, pages, _ = gather_arguments(batch, kv_heads, None)
        sizes = {"width": 37, "block_size": 128, "window": None, "sm_scale": 1.0, "words": {}}
        assert listed.shape_of(q, pages, **sizes).splits == wanted[batch * kv_heads]
        assert "ctas_per_unit(q.shape[0] * pages.kv_heads)" in inspect.getsource(mma.list_shape)
        assert "ctas_per_unit(batch * num_queries * num_kv_heads)" in inspect.getsource(select_blocks.shape_of)
    assert "select.shape_of" in inspect.getsource(selected)


# (rows, scores of a row, k): CTAs that share a row.
TOP_K = {
    (1, 8192, 32): (1, 1, 1),
    (1, 65536, 32): (16, 16, 16),
    (1, 1 << 20, 2048): (16, 16, 16),
    (8, 65536, 32): (8, 8, 8),
    (16, 131072, 256): (6, 8, 4),
    (32, 131072, 256): (3, 4, 2),
    (64, 65536, 32): (2, 2, 1),
    (128, 65536, 32): (1, 1, 1),
}


@pytest.mark.parametrize("case", TOP_K, ids=str)
def test_ctas_of_top_k(case, column):
    assert plan.shape_of(*case, plan.Config(), has_lengths=False, counted=False).ctas == TOP_K[case][column]


# (query heads, tiles of queries): CTAs that share the keys of a tile of prefill.
PREFILL = {
    (1, 1): (32, 32, 32),
    (8, 1): (16, 18, 19),
    (14, 2): (9, 21, 11),
    (28, 1): (9, 21, 8),
    (28, 3): (9, 21, 1),
    (28, 4): (1, 1, 1),
    (32, 1): (4, 9, 7),
    (64, 1): (2, 9, 1),
    (58, 1): (9, 5, 4),
    (59, 1): (11, 5, 1),
    (98, 1): (4, 3, 1),
    (99, 1): (1, 10, 1),
    (110, 1): (1, 4, 1),
    (111, 1): (1, 1, 1),
    (128, 1): (1, 1, 1),
}


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_splits_of_prefill(case, column):
    assert clusters.splits_of(*case) == PREFILL[case][column]


INT8, INT4 = MatrixFormat("int8"), MatrixFormat("int4", 1, 128)
# (tokens, inputs, features, format): teams of CTAs, CTAs of a team, tiles of a team.
PROJECTIONS = {
    (1, 3584, (3584, 512, 512), None): ((132, 1, 1), (148, 1, 1), (78, 1, 2)),
    (8, 18944, (3584,), None): ((132, 1, 1), (148, 1, 1), (78, 1, 1)),
    (1, 18944, (3584,), INT8): ((66, 2, 1), (74, 2, 1), (78, 1, 1)),
    (1, 3584, (18944,), INT8): ((132, 1, 2), (148, 1, 2), (78, 1, 3)),
    (1, 18944, (3584,), INT4): ((66, 2, 1), (74, 2, 1), (78, 1, 1)),
}


@pytest.mark.parametrize("case", PROJECTIONS, ids=str)
def test_teams_of_project_tokens(case, column):
    tokens, width, features, format = case
    more = {} if format is None else {"format": format, "scales": format.scale_dtype.name}
    options = {"half": 0, "rotated": 0, "gated": None, "norm_eps": None, "norm_offset": 0.0, "biased": False, "residual": False}
    s = Projection(tokens, width, features, **options, dtype="bfloat16", out_dtype="bfloat16", **more).fitted()
    assert (s.teams, s.split, s.tiles) == PROJECTIONS[case][column]


def test_what_no_number_of_multiprocessors_changes():
    """Sizes that are the same on every GPU: tiles, CTAs of a page's copy, of a look-up, and pieces that devices
    exchange."""
    assert (prefill_fold.ROWS, prefill_fold.FOLDERS, select_tiles.ROWS, select_tiles.TILE) == (64, 2, 64, 128)
    assert (block_mass.KEYS, block_mass.QUERIES, union_blocks.MAX_ENTRIES) == (64, 128, 64)
    assert (copy_tiles.SHARES, fetch_tiles.CTAS, peer_buffers.MAX_CTAS, peer_buffers.PIECE_BYTES) == (4, 8, 64, 2048)
    assert all_gather.MAX_WORDS == 64 * 2048 // 4
    assert (listed.WARPGROUPS, listed.TILE, plan.MIN_SHARE, clusters.MAX_SPLITS) == (2, 64, 4096, 32)


def test_the_number_is_read_from_the_device(monkeypatch):
    """Of an NVIDIA GPU; elsewhere, where kernels are lowered for it, an H200's."""
    assert dispatch.multiprocessors() == 132
    gpu = SimpleNamespace(compute_capability="9.0", core_count=114)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert dispatch.multiprocessors() == 114
    assert clusters.ctas_per_unit(6) == 16
    assert clusters.ctas_per_unit(7) == 8
    gpu.compute_capability, gpu.core_count = "", 2  # a TPU
    assert dispatch.multiprocessors() == 132
