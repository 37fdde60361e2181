"""selected_attention without `wgmma`, whole kernels on emulated threads: the very lists of the reference, its
attention, planted bugs."""

from __future__ import annotations

import jax
import paging
import pytest
from emulator.kernels import kernels
from selected_suite import SIZES, arguments_of, checker

from pallas_kernels.attention.gather_attention import listed, mma
from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lanes

BASE = {"kv_heads": 1, "group": 4, "head_dim": 64, "page_size": 64, "width": 6, "dtype": "bfloat16", "lengths": (150, 321)}
CASES = {
    "bounds": {"lengths": (0, 65, 321)},
    "mean, float16, two KV heads": {"kind": "mean", "dtype": "float16", "kv_heads": 2, "group": 7},
    "blocks are pages, head dim 128": {
        "head_dim": 128,
        "group": 8,
        "block_size": 64,
        "budget": 2,
        "local": 1,
        "width": 4,
        "lengths": (256,),
    },
    "drafts": {"num_queries": 3, "lengths": (2, 200), "local": 1},
    "a page is missing": {"hole": True, "budget": 12},
}
FOR_BUGS = ("bounds", "drafts", "a page is missing")


@pytest.fixture(scope="module")
def check(tools):
    return checker(tools, arguments_of(tools, {name: BASE | SIZES | spec for name, spec in CASES.items()}))


@pytest.fixture(scope="module")
def on_emulated_threads():
    kernel = paging.implementation("selected_attention", "mosaic_gpu")

    def op(*arrays, **keywords):
        with dispatch._forced(dispatch.BLACKWELL), kernels():
            return kernel(*arrays, **keywords)

    return op


@pytest.mark.quick_but("bounds", "drafts", "blocks are pages, head dim 128")
@pytest.mark.parametrize("case", CASES)
def test_on_emulated_threads_it_matches_the_reference(check, on_emulated_threads, case):
    check(on_emulated_threads, case)


LOCATE = listed.locate
BUGS = {
    "every query sees a token more": lambda patch: patch.setattr(listed, "locate", _a_token_more),
    "the pages of the list are not found": lambda patch: patch.setattr(listed, "locate", lambda *args: None),
    "parts are not sent": lambda patch: patch.setattr(mma, "_send", lambda *args: None),
    "CTAs do not wait for each other": lambda patch: patch.setattr(lanes, "cluster_barrier", lambda: None),
}


def _a_token_more(s, length, *rest):
    LOCATE(s, length + 1, *rest)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(tools, check, on_emulated_threads, monkeypatch, bug):
    jax.clear_caches()
    BUGS[bug](monkeypatch)
    tools.must_fail(check, on_emulated_threads, FOR_BUGS)


@pytest.mark.parametrize(("capability", "refused"), [("10.0", False), ("12.0", True)])
def test_a_cta_of_fewer_threads_chooses_among_fewer_blocks(on_hopper, picked, monkeypatch, capability, refused):
    """On a GPU with little shared memory a CTA has 128 threads, whose registers hold the keys of 12,288 blocks."""
    monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
    tokens, pool = 12_289 * 8 * 16, (64, 1, 64, 128)
    arrays = {"q": ((16, 1, 8, 128), "bfloat16"), "k": (pool, "bfloat16"), "v": (pool, "bfloat16")}
    arrays |= {"index": ((64, 1, 4, 2, 128), "bfloat16"), "table": ((16, tokens // 64), "int32"), "lengths": ((16,), "int32")}
    sizes = {"kind": "bounds", "block_size": 16, "budget": 8, "sink": 1, "local": 1, "sm_scale": 1.0}
    heard = picked(("selected_attention", arrays, sizes))
    assert heard["selected_attention"] == ("composed" if refused else "mosaic_gpu")
