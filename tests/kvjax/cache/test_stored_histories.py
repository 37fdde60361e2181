"""Random histories of an engine that reuses pages, with stores so small that they are full and give pages up all the
time: every sequence has the bits that it would have alone, in an engine without stores."""

import collections
import dataclasses
import itertools
import time
from typing import ClassVar

import jax
import numpy as np
import pytest
import store_mutants
from histories import FAMILIES, LARGE, History, Sizes, engine_for, run_histories
from meshes import MESHES, MODELS, mesh_of, model_of
from quick_cases import rest_long
from tiny_models import make_family

from kvjax import MeasureOnceMaskOnce, OutOfPages
from kvjax.cache import OPEN, PageAllocator, prefix_cache
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.prefix_cache import Pin
from kvjax.cache.stores.blocks import block_bytes
from kvjax.engine.sharding import spec_on_mesh

pytestmark = pytest.mark.bits

SHORT_CHUNKS = Sizes(16, 16, 120, ("dense", "quest:1"), (4,), 26)
"""States of recurrent layers are kept every four chunks, so these are short."""
TOGETHER = MeasureOnceMaskOnce(gamma=8, chi=16, k=2, k_exact=1, k_trim=2, key_block=16, sink_tokens=16, window_tokens=16)
"""Its queries do not stand alone: pages of a chunk are found together, or not at all."""
CHUNKS = dataclasses.replace(SHORT_CHUNKS, chunk=32, prefill=TOGETHER)


class StoredHistory(History):
    """Prompts begin like one of a few texts, so that many are found. totals: of all histories, what was found and given
    up."""

    totals: ClassVar[collections.Counter[str]] = collections.Counter()
    stores: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0), (5, 0), (0, 9), (5, 9))
    """Pages of host memory and of the disk: one of these."""
    reuse: ClassVar[str | bool] = True
    texts_drawn: ClassVar[int] = 2

    def make_engine(self):
        packed = parse_cache_format(self.shared.get("cache_format"), self.model.config.compute_dtype)
        spec = spec_on_mesh(self.model.config.cache_spec(self.sizes.page, packed), self.shared.get("mesh"))
        self.texts = self.random.integers(0, self.model.config.vocab_size, (self.texts_drawn, self.sizes.longest)).tolist()
        page = sum(block_bytes(spec, group.name) for group in spec.groups if group.name != OPEN)
        host, disk = self.stores[self.random.integers(len(self.stores))]
        stores = {"host_bytes": host * page} if host else {}
        stores |= {"disk": self.folder / f"pages-{time.monotonic_ns()}", "disk_bytes": disk * page} if disk else {}
        return engine_for(self.model, self.sizes, reuse=self.reuse, **stores, **self.shared)

    def run(self, length):
        super().run(2 * length)

    def draw_prompt(self):
        text = self.texts[self.random.integers(len(self.texts))][: self.random.integers(40, self.sizes.longest * 3 // 4)]
        return text + self.draw_tokens(4) if self.random.integers(3) else text

    def prefill_options(self):
        return {"cache_salt": (None, None, "a")[self.random.integers(3)]}

    # Where queries do not stand alone, bits depend on where a prompt was cut, which the record does not say.

    def extend(self):
        if self.sizes.prefill is None:
            super().extend()

    def truncate(self):
        if self.sizes.prefill is None:
            super().truncate()

    def differences(self):
        found, stats = super().differences(), self.engine.stats()
        self.totals.update({"tokens looked up": stats.tokens, "tokens found": stats.found_tokens})
        for name in ("device", "host", "disk"):
            if (store := getattr(stats, name)) is not None:
                self.totals.update({f"{name} hits": store.hits, f"{name} evictions": store.evictions})
        self.totals["pages back on the device"] += sum(frames.returned for frames in self.engine._pool.frames.values())
        self.engine.close()
        return found


@pytest.fixture
def totals():
    """The counts of the test's histories."""
    StoredHistory.totals = collections.Counter()
    return StoredHistory.totals


CASES = {name: (name, SHORT_CHUNKS) for name in FAMILIES} | {"momo": ("llama", CHUNKS)}


@pytest.mark.parametrize("case", rest_long(CASES, "llama"))
def test_stores_change_no_bits(case, tmp_path, totals):
    name, sizes = CASES[case]
    seeds = range(1) if case == "llama" else range(3)  # the first one finds pages, and gives some up
    counts = run_histories(make_family(name), seeds, tmp_path, sizes, StoredHistory)
    assert counts["sequences compared"] > 3
    assert totals["tokens found"] >= 64


class PackedStoredHistory(StoredHistory):
    shared = {"cache_format": "k=int8:channel,v=int4"}  # noqa: RUF012
    against_forward = False


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
def test_stores_of_packed_pages_change_no_bits(name, tmp_path, totals):
    run_histories(make_family(name), range(3000, 3020), tmp_path, SHORT_CHUNKS, PackedStoredHistory)
    assert totals["tokens found"] >= 64
    assert totals["device hits"] > 0
    assert totals["host hits"] + totals["disk hits"] > 0


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "count"), [("float32", 200), ("bfloat16", 100)])
def test_stores_change_no_bits_in_many_histories(case, dtype, count, tmp_path, totals, capsys):
    name, sizes = CASES[case]
    counts = run_histories(make_family(name, dtype=dtype), range(1000, 1000 + count), tmp_path, sizes, StoredHistory)
    with capsys.disabled():
        print(f"\n{case} {dtype}: {dict(counts)}, {dict(totals)}, 0 differences")
    assert all(totals[f"{name} {what}"] > 0 for name in ("host", "disk") for what in ("hits", "evictions"))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_stores_change_no_bits_on_a_gpu(name, tmp_path, totals):
    sizes = dataclasses.replace(LARGE, chunk=128)
    run_histories(make_family(name, head_dim=128, window=200, dtype="bfloat16"), range(50), tmp_path, sizes, StoredHistory)
    print(f"\n{name}: {dict(totals)}, 0 differences")
    assert totals["tokens found"] > 1000


@pytest.mark.long
def test_the_comparison_sees_a_page_of_another_text(tmp_path, monkeypatch):
    honest = prefix_cache._digest
    monkeypatch.setattr(prefix_cache, "_digest", lambda before, tokens, how: honest(before, [0] * len(tokens), how))
    with pytest.raises(AssertionError, match="differ"):
        run_histories(make_family("llama"), range(40), tmp_path, SHORT_CHUNKS, StoredHistory)


@pytest.mark.long
def test_the_comparison_sees_pages_of_half_a_chunk(tmp_path, monkeypatch):
    """A prefill policy whose queries look at each other, whose pages are found one by one."""
    monkeypatch.setattr(MeasureOnceMaskOnce, "queries_stand_alone", True)
    with pytest.raises(AssertionError, match="differ"):
        run_histories(make_family("llama"), range(40), tmp_path, CHUNKS, StoredHistory)


def test_the_comparison_sees_a_page_that_was_given_to_others(tmp_path, monkeypatch):
    """An allocator that hands out a kept page without telling that its content is lost."""
    honest = PageAllocator.take_from

    def take(allocator, parts):
        told, allocator.on_evict = allocator.on_evict, None
        try:
            return honest(allocator, parts)
        finally:
            allocator.on_evict = told

    monkeypatch.setattr(PageAllocator, "take_from", take)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run_histories(make_family("llama"), range(40), tmp_path, SHORT_CHUNKS, BusyHistory)


class BusyHistory(StoredHistory):
    """Prompts come and go, so that most of what is found comes back from another store."""

    stores: ClassVar[tuple[tuple[int, int], ...]] = ((8, 24),)
    texts_drawn: ClassVar[int] = 8

    def possible_calls(self):
        return ["prefill"] if len(self.held) < 2 else ["prefill", "free", "free", "decode"]

    def prefill_options(self):
        return {}


def test_busy_histories_are_right_and_bring_pages_back(tmp_path, totals):
    """Where nothing is taken out."""
    run_histories(make_family("llama"), range(6), tmp_path, SHORT_CHUNKS, BusyHistory)
    seen = "host hits", "disk hits", "device evictions", "host evictions", "pages back on the device"
    assert min(totals[what] for what in seen) > 0, dict(totals)


ON_MESHES = {" ".join(each): each for each in itertools.product(MODELS, MESHES)} | {"momo context 4": ("momo", "context 4")}
ONE_POLICY = dataclasses.replace(SHORT_CHUNKS, policies=("quest:1",))


class MeshStoredHistory(StoredHistory):
    """On a mesh, against the same mesh without stores."""


class BusyMeshHistory(BusyHistory):
    """The same, with less of everything that needs other programs."""


@pytest.mark.long
@pytest.mark.parametrize("case", ON_MESHES)
def test_stores_of_a_mesh_change_no_bits(case, tmp_path, totals, monkeypatch):
    name, mesh = ON_MESHES[case]
    monkeypatch.setattr(MeshStoredHistory, "shared", {"mesh": mesh_of(mesh)})
    model, sizes = (model_of("llama"), CHUNKS) if name == "momo" else (model_of(name), SHORT_CHUNKS)
    counts = run_histories(model, range(3), tmp_path, sizes, MeshStoredHistory)
    assert counts["sequences compared"] > 3
    assert totals["tokens found"] > 0


@pytest.mark.parametrize("mesh", rest_long(MESHES, "tensor 2 context 2"))
def test_busy_histories_of_a_mesh_bring_pages_back(mesh, tmp_path, totals, monkeypatch):
    monkeypatch.setattr(BusyMeshHistory, "shared", {"mesh": mesh_of(mesh)})
    run_histories(model_of("llama"), range(4), tmp_path, ONE_POLICY, BusyMeshHistory)
    assert min(totals[what] for what in ("device hits", "host hits", "disk hits", "device evictions")) > 0


def test_the_comparison_sees_a_page_on_another_device(tmp_path, monkeypatch):
    """Pages of a prompt that are found wherever it begins are not sharded in turn."""
    monkeypatch.setattr(BusyMeshHistory, "shared", {"mesh": mesh_of("tensor 2 context 2")})
    monkeypatch.setattr(prefix_cache, "Place", lambda first, key: key)
    with pytest.raises(AssertionError, match="differ"):
        run_histories(model_of("llama"), range(40), tmp_path, ONE_POLICY, BusyMeshHistory)


@pytest.mark.quick_but("refilled_while_copied", "host_block_refilled")
@pytest.mark.parametrize("mutant", store_mutants.CORRUPTING)
def test_the_comparison_sees_a_barrier_that_is_missing(mutant, tmp_path, monkeypatch):
    store_mutants.CORRUPTING[mutant](monkeypatch)
    model = make_family("llama")
    if mutant in ("refilled_while_copied", "host_block_refilled"):  # of a store beside the pool, as on a mesh
        monkeypatch.setattr(BusyHistory, "shared", {"mesh": mesh_of("tensor 2")})
        model = model_of("llama")
    with pytest.raises(AssertionError, match="differ"):
        run_histories(model, range(40), tmp_path, ONE_POLICY, BusyHistory)


def test_the_comparison_sees_pages_that_get_their_owner_too_late(tmp_path, monkeypatch):
    store_mutants.owned_after_taken(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        run_histories(make_family("llama"), range(20, 60), tmp_path, SHORT_CHUNKS, BusyHistory)


class DamageHistory(BusyHistory):
    """Host memory holds almost nothing, so that pages come back from disk. damaged: pages that the disk dropped, of all
    histories."""

    stores: ClassVar[tuple[tuple[int, int], ...]] = ((1, 8),)
    damaged: ClassVar[int] = 0

    def differences(self):
        DamageHistory.damaged += self.engine.stats().damaged
        return super().differences()


@pytest.mark.long
def test_digests_find_a_slot_that_was_given_to_others_and_the_comparison_sees_it_without_them(tmp_path, monkeypatch):
    """Two barriers, one behind the other."""
    store_mutants.slot_still_named(monkeypatch)
    DamageHistory.damaged = 0
    run_histories(make_family("llama"), range(4), tmp_path, SHORT_CHUNKS, DamageHistory)
    assert DamageHistory.damaged > 0
    store_mutants.digests_not_looked_at(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        run_histories(make_family("llama"), range(40), tmp_path, SHORT_CHUNKS, DamageHistory)


class AnyHistory(StoredHistory):
    """Pages count however they were written, and prompts begin like sequences that are gone, the tokens of their steps
    included."""

    stores: ClassVar[tuple[tuple[int, int], ...]] = ((0, 0), (12, 0), (5, 24))

    reuse: ClassVar[str | bool] = "any"

    def free(self):
        held = self.pick()
        self.texts.append((held.tokens * 3)[: self.sizes.longest])
        self.engine.free(held.sequence)
        self.held = [each for each in self.held if each is not held]

    def draw_prompt(self):
        return self.texts[-1 - self.random.integers(min(4, len(self.texts)))][: self.random.integers(40, self.sizes.longest * 3 // 4)]

    def differences(self):
        """Sequences whose next step is not near the full forward. Everything was written densely."""
        wrong = 0
        for each in self.held:
            token = self.draw_token()
            try:
                (logits,) = self.engine.decode([each.sequence], [token])
            except OutOfPages:
                continue
            text = np.zeros(self.sizes.longest + self.sizes.page, int)
            text[: len(each.tokens) + 1] = [*each.tokens, token]
            wrong += not np.allclose(logits, self.model.full_forward(text)[len(each.tokens)], rtol=0, atol=1e-4)
        self.totals["tokens found"] += self.engine.stats().found_tokens
        self.engine.close()
        return wrong


DENSE = dataclasses.replace(SHORT_CHUNKS, policies=("dense",), pages=40)


@pytest.mark.parametrize("name", rest_long(("llama", "gemma3_text", "qwen3_5_text", "shared"), "llama"))
def test_pages_written_in_any_way_are_near_the_full_forward(name, tmp_path, totals):
    seeds = range(20) if name == "qwen3_5_text" else range(5)  # states of recurrent layers are kept at few places
    run_histories(make_family(name), seeds, tmp_path, DENSE, AnyHistory)
    assert totals["tokens found"] > 100


class AnyMeshHistory(AnyHistory):
    """On a mesh."""


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["tensor 2", "context 4"])
def test_pages_written_in_any_way_on_a_mesh_are_near_the_full_forward(mesh, tmp_path, totals, monkeypatch):
    monkeypatch.setattr(AnyMeshHistory, "shared", {"mesh": mesh_of(mesh)})
    run_histories(model_of("llama"), range(5), tmp_path, DENSE, AnyMeshHistory)
    assert totals["tokens found"] > 100


def test_the_full_forward_sees_pages_kept_in_another_order(tmp_path, monkeypatch):
    honest = prefix_cache.Prefixes._keep

    def keep(kept, sequence, number, digests):
        turned = {name: [*pages[1:], pages[0]] for name, pages in sequence.pages.items()}
        honest(kept, Pin(sequence.length, turned, {}), number, digests)

    monkeypatch.setattr(prefix_cache.Prefixes, "_keep", keep)
    with pytest.raises((AssertionError, ValueError), match="differ"):
        run_histories(make_family("llama"), range(40), tmp_path, DENSE, AnyHistory)
