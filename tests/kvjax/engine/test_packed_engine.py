"""An engine over packed pages: what each query reads, against a plain forward in NumPy; bits over every cut; memory;
what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from histories import FEW, History, run_histories
from quick_cases import rest_long
from tiny_models import make_family, shallow
from whole_chunks import prefill_step

import kvjax
from kvjax.cache import OPEN, Cache, OutOfPages
from kvjax.cache.formats import parse_cache_format
from kvjax.engine.engine import Engine
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode_step
from kvjax.policies.decode import AttentionMass, Stateless, parse
from kvjax.policies.prefill import parse_prefill
from pallas_kernels.cache.pack_pages import pack_pages, pool
from pallas_kernels.core.page_format import unpack
from pallas_kernels.core.pages import Pages
from pallas_kernels.selection.page_index import page_index

PAGE, CHUNK, TOKENS = 16, 32, 90
K_AND_V = "k=int8:channel,v=int4"


def packed_forward(model, tokens, text: str, near: tuple[int, int] | None = None, paid: list | None = None) -> np.ndarray:
    """Logits [T, V]: causal attention in float64, where a query reads the tokens of its own page as they are, and those
    of each earlier page as its format rounds them. near: sinks and window of layers without one. paid: gets each
    layer's weights [T, H, T]."""
    given, format = np.asarray(tokens, np.int32), parse_cache_format(text, model.config.compute_dtype)
    attended, count = model.config.attention, len(tokens)
    page = np.arange(count) // PAGE
    inside = range(format.boundary, len(attended) - format.boundary)

    def rounded(x: np.ndarray, how) -> np.ndarray:
        """Every full page of [T, K, D] packed by the formats' definition, and unpacked."""
        full = count // PAGE * PAGE
        tiles = x[:full].reshape(-1, PAGE, *x.shape[1:]).swapaxes(1, 2)
        numbers = np.asarray(unpack(how, *pack_pages(jnp.asarray(tiles), format=how, implementation="reference")))
        return np.concatenate([numbers.swapaxes(1, 2).reshape(full, *x.shape[1:]), x[full:]])

    def mix(layer, heads, state):
        q, k, v = (np.asarray(x[0]) for x in (heads.q, heads.k, heads.v))
        pairs = [(x, rounded(x, how) if how is not None and layer in inside else x) for x, how in ((k, format.k), (v, format.v))]
        group, out, weights = q.shape[1] // k.shape[1], np.zeros(q.shape), np.zeros((*q.shape[:2], count))
        sinks, window = (near or (0, count)) if heads.window is None else (0, heads.window)
        for t, h in np.ndindex(*q.shape[:2]):
            seen = np.flatnonzero((np.arange(count) <= t) & ((np.arange(count) < sinks) | (np.arange(count) > t - window)))
            own = (page[seen] == page[t])[:, None]
            keys, values = (np.where(own, x[seen, h // group], packed[seen, h // group]).astype(np.float64) for x, packed in pairs)
            logits = keys @ q[t, h].astype(np.float64) * heads.sm_scale
            weights[t, h, seen] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            out[t, h] = weights[t, h, seen] @ values
        if paid is not None:
            paid.append(weights)
        return jnp.asarray(out[None], heads.q.dtype), state

    hidden, _ = model.decoder.hidden(model.params, given[None], np.arange(count)[None], mix, None)
    return np.asarray(model.decoder.logits(model.params, hidden)[0])


def engine_of(model, text=K_AND_V, policy="dense", **options):
    sizes = {"pages": 40, "page_size": PAGE, "prefill_chunk": CHUNK, "batch_buckets": (1, 2)}
    return Engine(model, policy, cache_format=text, **(sizes | options))


def poisoned(x):
    """What earlier tokens may have left in pages and rows: NaN, or codes of large numbers."""
    return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 119)


def served(model, tokens, text, *, steps=True, **options) -> np.ndarray:
    """Logits after each token from the 20th on: two prompts' worth of prefill in odd cuts, then a draft step over a
    page's end, then steps of one token. steps: False ends before the first of them."""
    engine = engine_of(model, text, **options)
    engine._pool.layers = jax.tree.map(poisoned, engine._pool.layers)
    (sequence,) = engine.prefill([tokens[:20]])
    rows = [engine.extend(sequence, tokens[20:25], all_logits=True), engine.extend(sequence, tokens[25:62], all_logits=True)]
    if steps:
        rows += [engine.decode([sequence], [tokens[62:66]])[0]]
        rows += [engine.decode([sequence], [token]) for token in tokens[66:]]
    return np.concatenate([np.asarray(row) for row in rows])


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(0, 97, TOKENS).tolist()


@pytest.fixture(scope="module")
def model():
    return shallow(make_family("llama", head_dim=32))


@pytest.fixture(scope="module")
def expected(model, tokens):
    return packed_forward(model, tokens, K_AND_V)[20:]


def check(found, expected) -> None:
    """Sums in float32 move a number over a rounding's border here and there, which changes a code by one."""
    assert np.abs(found - expected).max() <= 4e-3 * np.abs(expected).max(), np.abs(found - expected).max()


def test_every_query_reads_its_own_page_open_and_earlier_ones_packed(model, tokens, expected):
    check(served(model, tokens, K_AND_V), expected)
    unpacked = model.full_forward(tokens)[20:]
    with pytest.raises(AssertionError):
        check(unpacked, expected)


FORMS = ("int8", "fp8", "int4:32", "k=int4:channel", "v=q4_0", "q8_0", "d4:10+rotate", "e8", "int8:page+rotate,boundary=1", "fp8:none")


@pytest.mark.parametrize("text", rest_long(FORMS))
def test_every_format_against_the_forward(tokens, text):
    model = make_family("gemma3_text", head_dim=32)
    if "boundary" in text:
        layers = (*model.config.layers, model.config.layers[0])
        model = type(model)(
            dataclasses.replace(model.decoder, config=dataclasses.replace(model.config, layers=layers)),
            model.params | {"layers": (*model.params["layers"], model.params["layers"][0])},
        )
    check(served(model, tokens, text), packed_forward(model, tokens, text)[20:])


@pytest.mark.long
@pytest.mark.parametrize("remap", ["", "+remap"])
def test_sinks_and_a_window_in_prefill_and_decode(model, tokens, remap):
    near = 16, 24
    found = served(model, tokens, K_AND_V, policy=f"window:16+24{remap}", prefill=f"window:16+24{remap}")
    if not remap:
        check(found, packed_forward(model, tokens, K_AND_V, near)[20:])
    else:  # up to here positions in the cache are those of the text
        check(found[:20], packed_forward(model, tokens, K_AND_V, near)[20:40])
        assert np.isfinite(found).all()


@dataclasses.dataclass(frozen=True)
class Masses(Stateless):
    """Keeps the attention mass of every page."""

    learns = AttentionMass(PAGE)

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.num_heads, spec.max_pages))

    def select(self, query, layer, ctx, state):
        return None, state

    def observe(self, mass, ctx, state):
        return state + mass


def mass_of(paid, queries) -> np.ndarray:
    """[layers, H, pages]: what these queries pay each page."""
    ends = -len(paid[0]) % PAGE
    padded = np.pad(np.stack(paid)[:, queries], ((0, 0), (0, 0), (0, 0), (0, ends)))
    return padded.reshape(*padded.shape[:3], -1, PAGE).sum((1, 4))


def test_mass_is_of_the_pages_as_queries_read_them(model, tokens):
    """Of prefill and of steps, whatever the cuts. Queries of the page that steps began are not observed by prefill."""
    engine, policy, paid, found = engine_of(model, policies=[Masses()]), Masses(), [], []
    packed_forward(model, tokens, K_AND_V, paid=paid)
    for cuts in ((80,), (63, 80), (33, 34, 47, 48, 49, 79, 80)):
        (sequence,) = engine.prefill([tokens[:20]])
        for token in tokens[20:26]:
            engine.decode([sequence], [token], policy)
        for first, last in itertools.pairwise((26, *cuts, TOKENS)):
            engine.extend(sequence, tokens[first:last])
        found.append(np.stack([np.asarray(state)[0, :, :6] for state in sequence.states[policy]]))
        engine.free(sequence)
    expected = mass_of(paid, [*range(26), *range(32, TOKENS)])
    assert np.abs(found[0] - expected).max() < 2e-3 * expected.max()
    unaware = mass_of(paid, range(TOKENS))
    assert np.abs(found[0] - unaware).max() > 2e-2 * expected.max()
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


@pytest.mark.long
def test_queries_that_run_again_without_their_page_would_show(model, tokens, monkeypatch):
    """Prefill that observes from the middle of a page on runs queries again whose page is packed by then."""
    monkeypatch.setattr(
        "kvjax.engine.policy_state.PolicyStates._grain", property(lambda states: 1, lambda states, hash_block: None), raising=False
    )
    with pytest.raises(AssertionError):
        test_mass_is_of_the_pages_as_queries_read_them(model, tokens)


# Indexes.


def check_indexes(engine, sequence) -> None:
    """Index rows of sealed pages are those of the keys as they are read."""
    sealed = np.array(sequence.pages["full"][: sequence.length // PAGE])
    for layer in engine._pool.layers:
        keys = layer.pages.keys[sealed]
        for each in engine.indexes:
            built = page_index(keys, kind=each.kind, block_size=each.block_size)
            np.testing.assert_array_equal(layer.index[each.name][sealed], built)


def test_indexes_are_of_the_unpacked_keys_however_a_page_was_filled(model, tokens, tmp_path):
    engine = engine_of(model, policies=("quest:1",))
    (sequence,) = engine.prefill([tokens[:40]])
    for token in tokens[40:52]:
        engine.decode([sequence], [token])
    engine.decode([sequence], [tokens[52:68]])
    check_indexes(engine, sequence)
    engine.save(sequence, tmp_path / "sequence")
    restored = engine.restore(tmp_path / "sequence")
    check_indexes(engine, restored)


# Bits.


class PackedHistory(History):
    """Histories over packed pages, whose logits are not those of a full forward."""

    shared = {"cache_format": K_AND_V}  # noqa: RUF012
    against_forward = False


class RotatedHistory(PackedHistory):
    shared = {"cache_format": "k=int4+rotate,v=e8:10,boundary=0"}  # noqa: RUF012


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
def test_random_histories_over_packed_pages_have_the_bits_of_each_sequence_alone(name, tmp_path):
    counts = run_histories(make_family(name), range(2), tmp_path, dataclasses.replace(FEW, policies=("quest:1",)), PackedHistory)
    assert counts["sequences compared"] > 3


@pytest.mark.long
@pytest.mark.bits
@pytest.mark.parametrize("kind", [PackedHistory, RotatedHistory])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize(("dtype", "count"), [("float32", 60), ("bfloat16", 20)])
def test_many_random_histories_over_packed_pages(name, dtype, count, kind, tmp_path):
    run_histories(make_family(name, head_dim=32, dtype=dtype), range(2000, 2000 + count), tmp_path, kind=kind)


@pytest.mark.bits
def test_bits_do_not_depend_on_how_a_prompt_is_cut(model, tokens):
    engine, found = engine_of(model), []
    for cuts in ((), (1, 2, 15, 16, 17), (31, 33, 64), (47, 49, 80)):
        (sequence,) = engine.prefill([tokens[: cuts[0] if cuts else TOKENS]])
        for first, last in itertools.pairwise((*cuts, TOKENS) if cuts else ()):
            engine.extend(sequence, tokens[first:last])
        found.append(np.asarray(sequence.logits))
        engine.free(sequence)
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])


@pytest.mark.long
def test_what_an_engine_does_beside_steps_changes_no_bits(model, tokens):
    """Warming up, inspecting a step that would fill a page, and a mesh that only says which device."""
    found = []
    for options in ({}, {"mesh": kvjax.mesh(devices=jax.devices()[1:])}):
        engine = engine_of(model, "k=int8:channel,v=int4", "quest:1", **options)
        if options:
            engine.warmup(tokens=70)
        (sequence,) = engine.prefill([tokens[:47]])
        seen = engine.inspect([sequence], [tokens[60]]).logits if options else None
        rows = [np.asarray(engine.decode([sequence], [token])) for token in tokens[47:52]]
        assert seen is None or not np.array_equal(seen, rows[0])
        found.append(np.stack(rows))
    np.testing.assert_array_equal(*found)


# Memory.


@pytest.mark.parametrize("text", rest_long(["int8", "k=int4:channel,v=d4"], "k=int4:channel,v=d4"))
def test_a_pool_takes_packed_bytes_and_steps_hold_no_widened_copy(text):
    model = make_family("llama", head_dim=32)
    model = type(model)(model.decoder.of_layers(0, 1), model.decoder.params_of(model.params, 0, 1))
    sizes = {"pages": 2048, "page_size": 128, "prefill_chunk": 128, "batch_buckets": (1, 2)}
    engine = Engine(model, "top:8", cache_format=text, **sizes)
    (layer,) = engine._pool.layers
    format, kv_heads = parse_cache_format(text, "float32"), 2
    arrays = [x for x in (layer.pages.k, layer.pages.v, layer.pages.k_scales, layer.pages.v_scales) if x is not None]
    packed_bytes = sum(x.nbytes for x in arrays)
    assert packed_bytes == 2048 * kv_heads * (format.k.bytes_per_page(128, 32) + format.v.bytes_per_page(128, 32))
    assert engine.spec.bytes_per_page("full") == packed_bytes // 2048
    assert engine.spec.bytes_per_page(OPEN) == 2 * 2 * kv_heads * 128 * 32 * 4
    assert engine.memory_plan().groups[-1].page_bytes == engine.spec.bytes_per_page(OPEN)

    tables = {"full": jnp.full((2, 512), -1, jnp.int32), OPEN: jnp.full((2, 16), -1, jnp.int32)}
    cache = Cache(engine._pool.layers, tables, jnp.zeros(2, jnp.int32), engine.spec)
    operands = jnp.zeros((2, 4), jnp.int32), jnp.ones(2, bool), ((),)
    static = StepStatic(model.decoder, parse("top:8"), engine.indexes)
    step = decode_step.lower(static, StepInputs(model.params, cache, *operands)).compile()
    zero, chunk = jnp.zeros(2, jnp.int32), jnp.zeros((2, 128), jnp.int32)
    static = static._replace(policy=parse_prefill("dense"))
    prefill = prefill_step.lower(static, ChunkInputs(model.params, cache, chunk, zero, zero)).compile()
    for each in (step, prefill):
        assert each.memory_analysis().temp_size_in_bytes < packed_bytes / 4
    assert f"f32[2048,{kv_heads},128,32]" not in step.as_text()
    assert f"f32[2048,{kv_heads},128,32]" not in prefill.as_text()


# Texts, and what is refused.


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("int8", "int8"),
        ("k=int8, v=int4", "k=int8,v=int4"),
        ("v=int4:32,k=int4:channel", "k=int4:channel,v=int4:32"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3:none,boundary=1", "fp8_e4m3:none,boundary=1"),
        ("d4:76+rotate", "d4:76+rotate"),
        ("k=e8:38", "k=e8"),
        ("int8:token", "int8"),
    ],
)
def test_a_text_names_a_format(text, canonical):
    found = parse_cache_format(text, "bfloat16")
    assert str(found) == canonical
    assert parse_cache_format(canonical, "bfloat16") == found


WRONG = "int5", "k=int8,k=int4", "int8,int4", "int8:", "int8:often", "int8:none", "int8:0", "q8_0:32", "d4:token", "d4:0", "d4:999"
WRONG += "fp8+rotate", "k=bfloat16", "int8+spin", "boundary=1", "int8,boundary=x", "int8,boundary=-1", "", 8


@pytest.mark.parametrize("text", WRONG)
def test_other_texts_are_refused_with_the_grammar(text):
    with pytest.raises(ValueError, match=r"cache[_ ]format"):
        parse_cache_format(text, "float32")


REFUSED = {
    "latents": ("deepseek_v32", {}, "keeps latents"),
    "shared layers": ("shared", {}, "read pages of others"),
    "auto": ("llama", {"policy": "auto"}, "policy auto chooses by times"),
    "prefill auto": ("llama", {"prefill": "auto"}, "prefill auto chooses by times"),
    "prefill that reads keys": ("llama", {"prefill": "oracle:16"}, "prefill oracle:16.* does not unpack"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_packed_pages_cannot_do_yet_is_refused_by_name(case):
    name, options, said = REFUSED[case]
    with pytest.raises(NotImplementedError, match=said):
        engine_of(make_family(name), "int8", **options)


@pytest.mark.parametrize(("text", "said"), [("q8_0", "multiple of 32"), ("int8,boundary=1", "packs no layer")])
def test_a_format_that_does_not_fit_the_model_is_an_error(text, said):
    with pytest.raises(ValueError, match=said):
        engine_of(make_family("llama"), text)


def test_a_file_of_another_format_is_refused(model, tokens, tmp_path):
    engine = engine_of(model)
    (sequence,) = engine.prefill([tokens[:40]])
    engine.save(sequence, tmp_path / "sequence")
    for text in (None, "int8"):
        with pytest.raises(ValueError, match="cache_format 'k=int8:channel,v=int4'"):
            engine_of(model, text).restore(tmp_path / "sequence")


# Mutants. They come last: each has to compile its programs anew, and leaves none behind.


def test_rows_that_run_out_say_what_helps(model):
    """More pages do not: there is a row of open pages for each sequence of the largest batch."""
    engine = Engine(model, pages=40, page_size=16, prefill_chunk=32, cache_format="int8", batch_buckets=(2,))
    engine.prefill([[1] * 20] * 2)
    with pytest.raises(OutOfPages, match=r"layer group open: 1 needed, 0 free of 2; free sequences\. .*give a larger one \(--max-batch\)"):
        engine.prefill([[1] * 20])


def _own_page_packed(real):
    """Queries read their own page as its format rounds it so far."""

    def opened(layer, pages):
        formats = (layer.pages.k_packed, pages.k), (layer.pages.v_packed, pages.v)
        k, v = (unpack(how, *pack_pages(x, format=how)).astype(x.dtype) for how, x in formats)
        return real(layer, pages.replace(k=k, v=v))

    return opened


def _all_of_the_chunk_open(real):
    """Queries of a chunk read each page that the chunk writes as it was before it was packed."""

    def opened(layer, pages):
        rows = jnp.maximum(pages.row_of, 0)
        here = (pages.row_of >= 0)[:, None, None, None]
        k, v = (jnp.where(here, x[rows], y) for x, y in ((pages.k, layer.pages.keys), (pages.v, layer.pages.values)))
        return layer.replace(pages=Pages(k, v), open=None)

    return opened


def _packed_early(real):
    """A page is packed when its last token is still to come, and not again."""

    def seal_packed(layer, k, v, *where):
        return real(layer, k.at[:, :, -1].set(0), v.at[:, :, -1].set(0), *where)

    return seal_packed


def _another_row(real):
    """Tokens of a step go to the row of another sequence."""

    def append_packed(layer, k, v, positions, valid, table, rows, *more, sharded):
        return real(layer, k, v, positions, valid, table, (rows + 1) % 2, *more, sharded=sharded)

    return append_packed


IN_STEPS = "a row of another sequence"
MUTANTS = {
    "own page read as packed": ("kvjax.engine.steps.opened", _own_page_packed),
    "all pages of a chunk read open": ("kvjax.engine.steps.opened", _all_of_the_chunk_open),
    "packed before the last token": ("kvjax.cache.packed.seal_packed", _packed_early),
    IN_STEPS: ("kvjax.engine.paged_attention.append_packed", _another_row),
}


@pytest.mark.parametrize("mutant", rest_long(MUTANTS, "packed before the last token"))
def test_mutants_of_what_is_read_fail(model, tokens, expected, mutant, monkeypatch):
    where, change = MUTANTS[mutant]
    module, _, name = where.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)
    jax.clear_caches()
    monkeypatch.setattr(where, change(real))
    try:
        found = served(model, tokens, K_AND_V, steps=mutant == IN_STEPS)
        with pytest.raises(AssertionError):
            check(found, expected[: len(found)])
    finally:
        jax.clear_caches()


def test_indexes_of_other_keys_than_those_that_are_read_would_show(model, tokens, monkeypatch):
    real = pool.unpack
    monkeypatch.setattr(pool, "unpack", lambda how, codes, scales: real(how, codes, scales * jnp.asarray(1.01, scales.dtype)))
    jax.clear_caches()
    engine = engine_of(model, policies=("quest:1",))
    with pytest.raises(AssertionError):
        check_indexes(engine, *engine.prefill([tokens[:40]]))
    jax.clear_caches()
