"""Every op and both steps lower for the platforms that have no kernels of ours, on their own path through dispatch."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_cases import rest_long
from tiny_models import LEAST, altered, make_family, random_model, shallow
from whole_chunks import prefill_step

import kvjax
from kvjax.axes import Shards
from kvjax.cache import Cache, Residency
from kvjax.cache.formats import parse_cache_format
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.host_pool.hot_buffer import empty_hot, no_buffers
from kvjax.engine.steps import ChunkInputs, StepInputs, StepStatic, decode_step
from kvjax.model.weight_formats import pack_params
from kvjax.models.decoder import TransformerDecoder, init_params
from kvjax.policies.decode import Dense, base, parse
from kvjax.policies.prefill import DensePrefill
from kvjax.serving.cli import ops_selftest
from pallas_kernels.core import dispatch

PLATFORMS = {"cuda": ("gpu", "8.0"), "rocm": ("gpu", "gfx942"), "tpu": ("tpu", "")}
"""By the name that JAX lowers for: the backend, and what its devices say of their instructions."""
NOT_FORCED = ("all_gather", "all_reduce", "copy_tiles", "fetch_tiles", "pack_pages", "place_tiles")
"""Ops that dispatch was never told to run by `xla` on an H200."""
FAMILIES = ("gemma3_text", "qwen3_5_text", "deepseek_v32")

each_platform = pytest.mark.parametrize("platform", ["rocm", *(pytest.param(name, marks=pytest.mark.long) for name in ("cuda", "tpu"))])


@pytest.fixture
def as_on(monkeypatch):
    """Dispatch and tile sizes as on a platform; the kernels of that platform are passed by."""

    def pretend(platform: str, capability: str | None = None) -> None:
        backend, usual = PLATFORMS[platform]
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability or usual)
        jax.clear_caches()

    yield pretend
    jax.clear_caches()


def lowered(platform: str, op, *arrays, **named) -> str:
    with dispatch.forced("xla"), dispatch.listening() as path:
        text = op.trace(*arrays, **named).lower(lowering_platforms=(platform,)).as_text()
    assert path
    assert set(path.values()) <= {"xla", "composed"}
    return text


@each_platform
def test_every_op_lowers(as_on, platform):
    inputs = ops_selftest.Inputs(jnp.dtype("bfloat16"))
    runs = {op: example(inputs) for op, example in ops_selftest.EXAMPLES.items()}
    as_on(platform)
    for run in runs.values():
        assert lowered(platform, jax.jit(functools.partial(run, None)))


@pytest.mark.long
@each_platform
@pytest.mark.parametrize("family", rest_long(["llama", *FAMILIES], "gemma3_text"))
def test_both_steps_lower(as_on, platform, family):
    config = make_family(family, head_dim=128, dtype="bfloat16").config
    policies = (Dense(),) if config.latent else (Dense(), parse("top:1"))
    indexes = tuple(spec for policy in policies for spec in policy.indexes())
    spec, decoder = config.cache_spec(128), TransformerDecoder(config)
    params, layers = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty({g.name: 4 for g in spec.groups}, indexes)))
    tables = {group.name: np.zeros((1, 4 if group.page_size == 128 else 1), np.int32) for group in spec.groups}
    cache = Cache(layers, tables, np.array([300], np.int32), spec)
    as_on(platform)
    zero, token = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    chunk = ChunkInputs(params, cache, np.zeros((1, 256), np.int32), zero, zero)
    assert lowered(platform, prefill_step, StepStatic(decoder, DensePrefill(), indexes), chunk)
    for policy in policies:
        states = tuple(policy.init(None, 1) for _ in spec.paged)
        step = StepInputs(params, cache, token, np.ones(1, bool), states)
        assert lowered(platform, decode_step, StepStatic(decoder, policy, indexes), step)


@pytest.mark.parametrize("text", rest_long(["int8", "k=int4:channel,v=d4", "q4_0"], "int8"))
def test_steps_over_packed_pages_take_the_kernels_that_unpack_them(as_on, text):
    """Without being told to. None unpacks lattices."""
    config = shallow(make_family("llama", head_dim=128, dtype="bfloat16")).config
    spec, decoder, policy = config.cache_spec(128, parse_cache_format(text, "bfloat16")), TransformerDecoder(config), parse("top:1")
    tables = {group.name: np.zeros((1, 4 if group.page_size == 128 else 1), np.int32) for group in spec.groups}
    shapes = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty(dict.fromkeys(tables, 4), policy.indexes())))
    cache, zero = Cache(shapes[1], tables, np.array([300], np.int32), spec), np.zeros(1, np.int32)
    as_on("cuda", "9.0")
    given = StepStatic(decoder, DensePrefill(), policy.indexes()), ChunkInputs(shapes[0], cache, np.zeros((1, 256), np.int32), zero, zero)
    states = tuple(policy.init(None, 1) for _ in spec.paged)
    step = StepStatic(decoder, policy, policy.indexes()), StepInputs(shapes[0], cache, np.zeros((1, 1), np.int32), np.ones(1, bool), states)
    with dispatch.listening() as heard:
        prefill_step.trace(*given)
        decode_step.trace(*step)
    assert heard["pack_pages"] == "xla"
    assert heard["flash_attention"] == ("xla" if "d4" in text else "mosaic_gpu")
    assert heard["selected_attention"] == ("composed" if "d4" in text else "mosaic_gpu")


@pytest.mark.parametrize("text", rest_long(["int8", "k=fp8,v=int4", "int4:channel", "q4_0"], "int8"))
def test_packed_pages_in_host_memory_take_the_same_kernels(as_on, text):
    """A step lists pages through a hot buffer, which copies codes and scales by a kernel of ours."""
    config = shallow(make_family("llama", head_dim=128, dtype="bfloat16")).config
    spec, decoder, policy = config.cache_spec(128, parse_cache_format(text, "bfloat16")), TransformerDecoder(config), parse("top:1")
    counts, rows = FrameCounts(4, 8, 20), {"full": np.zeros((1, 16), np.int32), "open": np.zeros((1, 1), np.int32)}

    def arrays():
        hot = no_buffers(tuple(empty_hot(spec.layers[number].kv_heads, counts.device, counts.hot) for number in spec.paged))
        return init_params(config, jax.random.key(0)), spec.empty({"full": 24, "open": 1}, policy.indexes(), {"full": counts}), hot

    params, layers, hot = jax.eval_shape(arrays)
    cache = Cache(layers, rows, np.array([1300], np.int32), spec, {"full": Residency(np.arange(24, dtype=np.int32), counts.border)}, hot)
    as_on("cuda", "9.0")
    states = tuple(policy.init(None, 1) for _ in spec.paged)
    step = StepStatic(decoder, policy, policy.indexes()), StepInputs(params, cache, np.zeros((1, 1), np.int32), np.ones(1, bool), states)
    with dispatch.listening() as heard:
        decode_step.trace(*step)
    asked = ("append_tokens", "select_blocks", "fetch_tiles", "gather_attention")
    assert {op: heard[op] for op in asked} == dict.fromkeys(asked, "mosaic_gpu")


@pytest.mark.parametrize("axis", rest_long(["tensor", "context"], "context"))
def test_packed_pages_of_a_mesh_take_the_same_kernels(as_on, axis):
    """A chunk of many queries has its pages widened by spans, of which a table of 8,192 pages has several; a step packs
    what it fills."""
    config = dataclasses.replace(shallow(make_family("llama", head_dim=128, dtype="bfloat16")).config, hidden_size=128, vocab_size=96)
    spec, decoder = config.cache_spec(128, parse_cache_format("int8", "bfloat16")), TransformerDecoder(config)
    tables = {group.name: np.zeros((1, 8192 if group.page_size == 128 else 1), np.int32) for group in spec.groups}
    params, layers = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty(dict.fromkeys(tables, 8192), ())))
    cache, zero = Cache(layers, tables, np.array([300_000], np.int32), spec), np.zeros(1, np.int32)
    shards = Shards(kvjax.mesh(**{axis: 2}), tuple((group.name, 8192) for group in spec.groups) if axis == "context" else ())
    as_on("cuda", "9.0")
    states = tuple(Dense().init(None, 1) for _ in spec.paged)
    chunk = StepStatic(decoder, DensePrefill(), ()), ChunkInputs(params, cache, np.zeros((1, 4096), np.int32), zero, zero)
    step = StepStatic(decoder, Dense(), ()), StepInputs(params, cache, np.zeros((1, 1), np.int32), np.ones(1, bool), states)
    with dispatch.listening() as heard:
        program = str(prefill_step.trace(chunk[0]._replace(shards=shards), chunk[1]).jaxpr)
        decode_step.trace(step[0]._replace(shards=shards), step[1])
    exchange = {"tensor": "all_reduce", "context": "all_gather"}[axis]
    assert {heard[op] for op in ("flash_attention", "gather_attention", "append_tokens", exchange)} == {"mosaic_gpu"}
    assert "widen_pages_kernel" in program


@pytest.mark.parametrize(("name", "picked"), [("cascade:1/2", "mosaic_gpu"), ("cascade:1/2+1bit", "composed")])
def test_a_step_of_cascade_takes_the_kernel_that_chooses_from_a_shortlist(as_on, name, picked, caplog):
    """Without being told to; with 1 bit and head dim 64 a key has too few bytes, and the log says so."""
    config = shallow(make_family("llama", head_dim=64, dtype="bfloat16")).config
    spec, decoder, policy = config.cache_spec(128), TransformerDecoder(config), parse(name)
    tables = {group.name: np.zeros((1, 8), np.int32) for group in spec.groups}
    shapes = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty(dict.fromkeys(tables, 8), policy.indexes())))
    cache = Cache(shapes[1], tables, np.array([900], np.int32), spec)
    as_on("cuda", "9.0")
    states = tuple(policy.init(None, 1) for _ in spec.paged)
    step = StepStatic(decoder, policy, policy.indexes()), StepInputs(shapes[0], cache, np.zeros((1, 1), np.int32), np.ones(1, bool), states)
    with dispatch.listening() as heard, caplog.at_level("INFO", logger="pallas_kernels.core.dispatch"):
        program = str(decode_step.trace(*step).jaxpr)
    assert heard["selected_attention"] == picked
    assert ("refined_kernel" in program) == (picked == "mosaic_gpu")
    assert ("not mosaic_gpu: it reads codes of whole 16 bytes" in caplog.text) == (picked == "composed")


@pytest.mark.parametrize("weights", rest_long(["int8", "fp8:128x128", "int4"], "int4"))
def test_a_decode_step_over_packed_weights_runs_on_the_kernel_of_a_hopper_gpu(as_on, monkeypatch, weights):
    """All its projections, of 16 rows, without being told to."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "num_layers": 1}
    model = random_model("bfloat16", altered(LEAST, **sizes))
    config, decoder = model.config, model.decoder
    spec, params = config.cache_spec(128), pack_params(model.params, weights)
    layers = jax.eval_shape(lambda: spec.empty({group.name: 16 for group in spec.groups}, ()))
    tables = {group.name: np.zeros((16, 4), np.int32) for group in spec.groups}
    cache = Cache(layers, tables, np.full(16, 300, np.int32), spec)
    as_on("cuda", "9.0")
    monkeypatch.setattr("pallas_kernels.matmul.project_tokens.xla.project_tokens", None)
    states = tuple(Dense().init(None, 16) for _ in spec.paged)
    step = StepStatic(decoder, Dense(), ()), StepInputs(params, cache, np.zeros((16, 1), np.int32), np.ones(16, bool), states)
    program = str(decode_step.trace(*step).jaxpr)
    assert program.count("name=_project") == 4 * config.num_layers + 1


def _cell(op: str, kernel: str | None, kernel_text: str, plain_text: str) -> str:
    """kernel: of the platform. select_blocks is composed only where top_k has a kernel."""
    names = [name for name in dispatch.IMPLEMENTATIONS[op] if name == kernel or dispatch.BACKENDS[name] is None]
    names = [name for name in names if (op, name) != ("select_blocks", "composed")]
    return f"`{names[0]}`, {kernel_text if names[0] == kernel else plain_text}"


def test_the_document_names_what_every_op_takes():
    lines = ["| op | Hopper GPU | Blackwell GPU | older NVIDIA GPU | AMD GPU | TPU | CPU |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for op in dispatch.IMPLEMENTATIONS:
        forced = "lowered" if op in NOT_FORCED else "run on an H200"
        cells = [
            _cell(op, "mosaic_gpu", "run", forced),
            _cell(op, "cudnn", forced, forced) if op in dispatch.WGMMA_ONLY else _cell(op, "mosaic_gpu", "compiled", forced),
            _cell(op, "cudnn", forced, forced),
            _cell(op, None, "", "lowered"),
            _cell(op, "mosaic_tpu", "interpreted, compiled", "lowered"),
            _cell(op, None, "", "run"),
        ]
        lines.append(f"| `{op}` | {' | '.join(cells)} |")
    text = (Path(__file__).parents[3] / "docs" / "platforms.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- platforms -->") : text.index("<!-- /platforms -->")]
    assert table.splitlines()[1:] == lines


def step_on_hopper_gpus(as_on, picked: str, **mesh: int) -> tuple[str, dict[str, str], int]:
    """The program of a dense decode step on a mesh of two, lowered; what ops picked; layers. picked: "xla" is
    forced."""
    config = dataclasses.replace(shallow(make_family("llama", head_dim=128, dtype="bfloat16")).config, hidden_size=128, vocab_size=96)
    spec, decoder = config.cache_spec(128), TransformerDecoder(config)
    shards = Shards(kvjax.mesh(**mesh), tuple((group.name, 4) for group in spec.groups) if "context" in mesh else ())
    params, layers = jax.eval_shape(lambda: (init_params(config, jax.random.key(0)), spec.empty({g.name: 8 for g in spec.groups}, ())))
    tables = {group.name: np.zeros((1, 4), np.int32) for group in spec.groups}
    cache = Cache(layers, tables, np.array([300], np.int32), spec)
    as_on("cuda", "9.0")
    states = tuple(Dense().init(None, 1) for _ in spec.paged)
    static = StepStatic(decoder, Dense(), (), shards)
    inputs = StepInputs(params, cache, np.zeros((1, 1), np.int32), np.ones(1, bool), states)
    with dispatch.forced("xla") if picked == "xla" else contextlib.nullcontext(), dispatch.listening() as heard:
        text = decode_step.trace(static, inputs).lower(lowering_platforms=("cuda",)).as_text()
    # For each kind of exchange one kernel reaches into other devices' memory by XLA's means. Those that exchange are
    # plain ones.
    kinds = 1 if "context" in mesh else 2  # outputs; sums and logits
    assert text.count("uses_xla_collective_metadata = true") == (kinds if picked == "mosaic_gpu" else 0)
    assert "stablehlo.all_reduce" not in text
    return text, heard, config.num_layers


@pytest.mark.parametrize("picked", rest_long(["mosaic_gpu", "xla"], "mosaic_gpu"))
def test_a_decode_step_on_a_mesh_of_hopper_gpus_adds_by_one_kernel_each(as_on, picked):
    """Twice in a layer, after its projections `o` and `down`, and once after the embedding, within one program; no
    other sum is left. Logits are joined by a kernel, too."""
    text, heard, layers = step_on_hopper_gpus(as_on, picked, tensor=2)
    assert heard["all_reduce"] == heard["all_gather"] == picked
    sums = 2 * layers + 1
    assert text.count("call @_add(") == (sums + 1 if picked == "mosaic_gpu" else 0), "one more adds nothing, before"
    assert text.count("call @_collect(") == (2 if picked == "mosaic_gpu" else 0)
    assert text.count('"stablehlo.all_gather"') == (0 if picked == "mosaic_gpu" else 1 + sums)


@pytest.mark.parametrize("picked", rest_long(["mosaic_gpu", "xla"], "mosaic_gpu"))
def test_where_pages_are_dealt_out_outputs_are_exchanged_by_one_kernel_a_layer(as_on, picked, monkeypatch):
    """An output of attention and its log-sum-exp go together."""
    widths, gather = [], base.gather_attention

    def noted(query, pages, table, *rest, **named):
        widths.append(table.shape[1])
        return gather(query, pages, table, *rest, **named)

    monkeypatch.setattr(base, "gather_attention", noted)
    text, heard, layers = step_on_hopper_gpus(as_on, picked, context=2)
    assert set(widths) == {4 // 2 + 1}, "a table of the device's own pages, and none"
    assert heard["all_gather"] == picked
    assert "all_reduce" not in heard
    assert text.count("call @_collect(") == (layers + 1 if picked == "mosaic_gpu" else 0), "one more does nothing, before"
    assert text.count('"stablehlo.all_gather"') == (0 if picked == "mosaic_gpu" else 2 * layers)
