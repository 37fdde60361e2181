"""gather_attention over packed pages in Mosaic GPU: whole kernels on emulated threads against the reference, and with
bugs planted; lowered; who is passed by.

What only a GPU can tell is in `test_gather_attention_packed_on_hopper.py`.
"""

from __future__ import annotations

import packed_suite
import pytest
from emulator.kernels import kernels
from packed_suite import FORMATS
from quick_cases import rest_long

from pallas_kernels.attention.gather_attention import listed
from pallas_kernels.attention.gather_attention.mosaic_gpu import Config
from pallas_kernels.core import dispatch
from pallas_kernels.core.page_format import PageFormat
from pallas_kernels.hopper.decode import decode_fold, packed_operands
from pallas_kernels.hopper.decode.packed_operands import Codes
from pallas_kernels.hopper.threads import lane_copies, lane_pairs, lanes

# inputs of `packed_suite.build`: a format; inputs of `make_paged`; then window; blocks = (listed places, block size) or
# None; lse; config; opened.

SMALL = {"head_dim": 64, "page_size": 64, "kv_heads": 2, "width": 4, "group": 7}
CASES = {
    "int8, dense": {"format": "int8", "lengths": (200, 0, 17), "config": Config(splits=2)},
    "int8, a list of blocks of 16": {"format": "int8", "lengths": (200, 100), "blocks": (9, 16), "head_dim": 128, "opened": True},
    "int8, drafts in a window across a page": {
        **{"format": "int8", "lengths": (193, 33), "num_queries": 3, "window": (5, 70), "opened": True},
        "config": Config(splits=3),
    },
    "int8, LSE of pages": {"format": "int8", "lengths": (200, 65), "lse": True, "opened": True, "config": Config(splits=1)},
    "int8 keys per channel": {"lengths": (200, 100), "blocks": (5, 64), "opened": True},
    "int8 per channel": {"lengths": (200, 100), "head_dim": 128, "config": Config(splits=2)},
    "fp8": {"lengths": (200, 100), "blocks": (5, 64), "head_dim": 128, "opened": True},
    "fp8 without scales": {"lengths": (130,), "config": Config(splits=1), "opened": True},
    "int4": {"lengths": (200, 100), "blocks": (9, 32), "head_dim": 128, "opened": True},
    "int4 keys per channel, values per 32": {"lengths": (200, 100), "blocks": (5, 64), "opened": True},
    "int4 per 32": {"lengths": (200, 100), "head_dim": 128, "group": 16, "kv_heads": 1, "config": Config(splits=1)},
    "q8_0": {"lengths": (200, 100), "blocks": (5, 64), "opened": True},
    "q4_0": {"lengths": (200, 100), "head_dim": 128, "config": Config(splits=1), "opened": True},
    "q8_0 keys, q4_0 values": {"lengths": (70,), "head_dim": 256, "width": 2, "kv_heads": 1, "config": Config(splits=1)},
    "int8 keys, values as they are": {"lengths": (200, 100), "blocks": (5, 64), "opened": True},
    "keys as they are, int4 values": {"lengths": (200, 100), "config": Config(splits=1), "opened": True},
    "int8, tiles apart": {"format": "int8", "lengths": (200, 100), "blocks": (5, 64), "opened": True, "apart": True},
    "int4 per 32, tiles apart, spans": {
        **{"format": "int4 per 32", "lengths": (200,), "blocks": (9, 16), "kv_heads": 1, "opened": True, "apart": True, "num_queries": 1},
        **{"config": Config(splits=2), "lse": True},
    },
}
QUICK = (
    "int8, tiles apart",
    "int4 per 32, tiles apart, spans",
    "int8, a list of blocks of 16",
    "int8, drafts in a window across a page",
    "int4 per 32",
    "q4_0",
)


@pytest.fixture
def check(tools):
    """Runs a case on emulated threads and compares with the reference."""

    def run(case: str) -> None:
        case = packed_suite.build(tools, **(SMALL | {"format": case} | CASES[case]))
        with kernels():
            found = case.run("mosaic_gpu")
        packed_suite.compare(tools, case, found)

    return run


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_emulated_it_matches_the_reference(check, case):
    check(case)


NUMBERS, SCALES, ADD, BLOCKS, PAIRS = packed_operands.numbers, Codes.token_scales, decode_fold._add_codes, Codes.blocks, Codes.channel_pairs
START = decode_fold._own_start


def _signs_lost(format, word):
    return NUMBERS(format, word & 0x7F7F7F7F)


def _one_too_many(format, word):
    """Codes of 4 bits count from -7."""
    return [tuple(lane_pairs.subtract_pairs(x, lanes.i32(-0x407F4080), "bfloat16") for x in pair) for pair in NUMBERS(format, word)]


def _never_written_too(s, folded, codes, ring_s, at, weights, written):
    ADD(s, folded, codes, ring_s, at, weights, lanes.i32(packed_operands.KEYS))


def _of_the_next(codes, ring_s, at, key):
    return SCALES(codes, ring_s, at, key ^ 1)


def _page_of_the_last(s, position):
    """Of drafts all own pages are taken to be that of the first."""
    return lanes.minimum(START(s, position), 128)


def _by_row(s, length, table_ref, unit, table_width, scratch):
    LOCATE(s, length, table_ref, unit // s.num_kv_heads, table_width, scratch)


LOCATE = listed.locate
# A bug, and the case that catches it.
BUGS = {
    "scales of tokens are left out": ("fp8", (Codes, "token_scales"), lambda codes, *_: [lanes.f32(1.0)] * codes.groups),
    "scales of the next token": ("int8, a list of blocks of 16", (Codes, "token_scales"), _of_the_next),
    "scales of another group": ("int4 per 32", (Codes, "token_scales"), lambda *args: SCALES(*args)[::-1]),
    "scales of another block of channels": ("int8 per channel", (Codes, "channel_pairs"), lambda c, r, at, b: PAIRS(c, r, at, b ^ 1)),
    "scales of channels in the order of memory": ("int8 per channel", (Codes, "channel_pairs"), lambda *args: PAIRS(*args)[::-1]),
    "scales of values that were never written": ("int8, dense", (decode_fold, "_add_codes"), _never_written_too),
    "scales are not copied": ("int8, a list of blocks of 16", (lane_copies, "copy_bytes_async"), lambda *args, **keywords: None),
    "low and high bits for each other": ("q4_0", (Codes, "blocks"), lambda codes, piece: BLOCKS(codes, piece)[::-1]),
    "int4 in the order of q4_0": ("int4 per 32", (Codes, "blocks"), lambda codes, piece: (2 * piece, 2 * piece + 1)),
    "bytes for their neighbours": ("fp8", (packed_operands, "numbers"), lambda *args: [pair[::-1] for pair in NUMBERS(*args)]),
    "signs are lost": ("int8, a list of blocks of 16", (packed_operands, "numbers"), _signs_lost),
    "codes are off by one": ("int4 per 32", (packed_operands, "numbers"), _one_too_many),
    "sums stay in the order of bytes": ("q4_0", (packed_operands, "natural_order"), lambda acc: acc),
    "queries in the order of numbers": ("fp8", (packed_operands, "interleaved"), lambda *words: words),
    "no page is read open": ("int8, a list of blocks of 16", (decode_fold._Opened, "fold"), lambda self, folded, *_: folded),
    "the own page as packed": ("q4_0", (decode_fold, "_own_start"), lambda s, position: START(s, position) + s.page_size),
    "frames of the list by the table's row": ("int8, tiles apart", (listed, "locate"), _by_row),
    "drafts see one page open": ("int8, drafts in a window across a page", (decode_fold, "_own_start"), _page_of_the_last),
}


@pytest.mark.quick(
    "scales of the next token",
    "scales of another group",
    "scales of values that were never written",
    "low and high bits for each other",
    "no page is read open",
    "the own page as packed",
)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(check, monkeypatch, bug):
    case, (where, name), wrong = BUGS[bug]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        check(case)


# Lowered, in the shapes that decoding has.

FORMS = {
    "dense": {},
    "list, batch 8": {"batch": 8, "width": 37},
    "four drafts in a window": {"num_queries": 4, "window": (4, 4096)},
    "LSE of pages": {"return_block_lse": True},
    "head dim 64": {"heads": (32, 8), "head_dim": 64, "width": 37},
}
LOWERED = {f"{name}, {form}": packed_suite.production(name, **sizes) for name in FORMATS for form, sizes in FORMS.items()}
WIDE = {f"{name}, head dim 256": packed_suite.production(name, heads=(16, 2), head_dim=256) for name in FORMATS}


@pytest.mark.parametrize("case", rest_long(LOWERED | WIDE, "int8, dense", "q4_0, four drafts in a window"))
def test_lowers(cuda, case):
    assert "mosaic_gpu" in cuda.lower(*(LOWERED | WIDE)[case])


@pytest.mark.long
def test_compiles_without_spilling(spill_free):
    spill_free(LOWERED, WIDE)


@pytest.mark.parametrize("case", ["int8, dense", "q4_0, list, batch 8", "fp8, LSE of pages"])
def test_it_is_picked_on_hopper(on_hopper, picked, case):
    assert picked(LOWERED[case])["gather_attention"] == "mosaic_gpu"


BFLOAT16 = {"read_as": "bfloat16"}
REFUSED = {
    "lattices": (PageFormat("d4", levels=38, **BFLOAT16), "does not unpack keys of d4; it unpacks fp8_e4m3, int8, int4, q8_0, q4_0"),
    "rotation": (PageFormat("int8", "token", rotate=True, **BFLOAT16), "does not unpack rotated keys"),
    "scales of pages": (PageFormat("int4", "page", **BFLOAT16), "keys with scales per token or channel, not per page"),
    "groups of 8": (PageFormat("int8", "token", 8, **BFLOAT16), "must be multiples of 16, got 8 for keys"),
    "float16": (PageFormat("int8", "token", read_as="float16"), "to bfloat16 alone, got read_as float16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name_and_passed_by(on_hopper, picked, case):
    format, reason = REFUSED[case]
    call = packed_suite.production((format, format))
    with pytest.raises(NotImplementedError, match=reason):
        picked(call, implementation="mosaic_gpu")
    assert picked(call)["gather_attention"] == "xla"


CALLS = {
    "queries of float32": ({"dtype": "float32"}, "over packed pages it multiplies bfloat16, got q float32"),
    "tiles of the form with wgmma": ({"config": Config(tile_tokens=64)}, "over packed pages a config has no tile_tokens"),
    "33 heads per KV head": ({"heads": (33, 1)}, "over packed pages there may be at most 32 query heads of dim 128 per KV head, got 33"),
    "LSE of drafts beside open pages": ({"num_queries": 2, "return_block_lse": True}, "one query per row, got 2"),
}


@pytest.mark.parametrize("case", CALLS)
def test_other_calls_are_refused_by_name(on_hopper, picked, case):
    sizes, reason = CALLS[case]
    with pytest.raises(NotImplementedError, match=reason):
        picked(packed_suite.production("int8", **sizes), implementation="mosaic_gpu")


def test_a_gpu_with_too_little_shared_memory_passes_it_by(on_hopper, picked, monkeypatch):
    call = packed_suite.production("int8", heads=(16, 2), head_dim=256)
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: "12.0")
    with pytest.raises(NotImplementedError, match="of head dim 256 and open ones leave no shared memory for 16 keys of four warps"):
        picked(call, implementation="mosaic_gpu")
    assert picked(packed_suite.production("int8"))["gather_attention"] == "mosaic_gpu"
