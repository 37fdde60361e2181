"""What the program of a step exchanges on a mesh, and how long it takes by the term."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from quick_cases import rest_long
from tiny_models import QWEN_7B, RECURRENT, TINY, altered, make_family, random_weights

import kvjax
from kvjax.axes import Shards
from kvjax.cache.cache import Cache
from kvjax.cache.spec import WHOLE
from kvjax.cost_model import step_bytes
from kvjax.cost_model.exchanges import Exchanges, ExchangeTerm, step_exchanges
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.steps import StepInputs, StepStatic, decode_and_sample
from kvjax.model.layers import DeltaLayer
from kvjax.model.placement import place_params
from kvjax.models.decoder import TransformerDecoder
from kvjax.policies.decode import Cascade, TopBlocks, TopTokens, parse

PAGE, BATCH = 16, 3
OPERATION = re.compile(r"= (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")


def lowered(config, policy, tensor, context):
    """A decode step of a tiny model on a mesh, lowered."""
    spec, decoder = config.cache_spec(PAGE).on_mesh(tensor), TransformerDecoder(config)
    each = {group.name: 8 for group in spec.groups if group.page_size != WHOLE and context > 1}
    shards = Shards(kvjax.mesh(tensor=tensor, context=context), tuple(each.items()))
    params = place_params(decoder, random_weights(config), shards)
    layers = jax.eval_shape(lambda: spec.empty({group.name: 8 * context for group in spec.groups}, policy.indexes()))
    tables = {group.name: jax.ShapeDtypeStruct((BATCH, 16), jnp.int32) for group in spec.groups}
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    cache, rows = Cache(layers, tables, row, spec), SamplingRows.of([None] * BATCH)
    given = StepInputs(params, cache, row, jax.ShapeDtypeStruct((BATCH,), bool), ((),) * len(spec.paged), rows)
    return decode_and_sample.lower(StepStatic(decoder, policy, policy.indexes(), shards), given)


def exchanged(program):
    """How many exchanges the text of a lowered program has, and the bytes that each device receives in them: all are
    gathers."""
    count, received = 0, 0.0
    for line in program.as_text(dialect="hlo").splitlines():
        if (operation := OPERATION.search(line)) is None:
            continue
        (bits, shape), members = re.match(r"[a-z]+(\d*)\[([\d,]*)\]", operation[1]).groups(), members_of(line)
        assert operation[2] == "all-gather", line
        size = math.prod(int(each) for each in shape.split(",")) * int(bits) // 8
        count, received = count + 1, received + size * (members - 1) / members
    return count, received


def members_of(line):
    """How many devices take part in an exchange."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{'(\w+)'\}", line):
        return int(re.search(rf"'{named[2]}'=(\d+)", named[1])[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)[1])


TINY_TOP = TopBlocks(k=3, sink=1, local=2, block_size=8)
DELTA = DeltaLayer(key_heads=4, value_heads=8, key_dim=16, value_dim=8, conv_width=4, chunk=8)
WIDE = dataclasses.replace(RECURRENT.layers[0], mixer=DELTA)
CASES = {
    "dense, tensor 2": (TINY, parse("dense"), 2, 1),
    "dense, copied heads": (TINY, parse("dense"), 4, 1),
    "dense, context 4": (TINY, parse("dense"), 1, 4),
    "dense, both": (TINY, parse("dense"), 2, 2),
    "top, tensor 4": (TINY, TINY_TOP, 4, 1),
    "top, context 2": (TINY, TINY_TOP, 1, 2),
    "top, context 4": (TINY, TINY_TOP, 1, 4),
    "top, both, in 16 bits": (altered(TINY, compute_dtype="bfloat16", tie_embeddings=False), TINY_TOP, 4, 2),
    "cascade": (TINY, Cascade(2, 4, 4, sink=1, local=2, block_size=8), 2, 2),
    "cascade of all, of the first layer": (TINY, Cascade(3, "all", "cache", sink=1, local=2, block_size=8, every=2), 2, 2),
    "a layer is dense": (TINY, dataclasses.replace(TINY_TOP, dense_layers=1), 2, 2),
    "window": (TINY, parse("window:16+40"), 2, 2),
    "a layer with a window": (make_family("gemma3_text").config, TINY_TOP, 2, 2),
    "shared pages": (make_family("shared").config, TINY_TOP, 2, 2),
    "latents": (make_family("deepseek_v32").config, TopTokens(24), 2, 2),
    "recurrent": (dataclasses.replace(RECURRENT, layers=(WIDE, RECURRENT.layers[1])), TINY_TOP, 2, 2),
}


QUICK = (
    "dense, copied heads",
    "top, context 4",
    "top, both, in 16 bits",
    "a layer is dense",
    "a layer with a window",
    "latents",
)


def counted(case):
    config, policy, tensor, context = case
    return step_exchanges(config, policy, BATCH, tensor=tensor, context=context, page_size=PAGE)


@pytest.mark.quick_but("dense, copied heads", "a layer is dense", "top, context 4", "top, both, in 16 bits")
@pytest.mark.parametrize("case", rest_long(CASES, *QUICK))
def test_a_steps_program_exchanges_what_is_counted(case):
    assert exchanged(lowered(*CASES[case])) == counted(CASES[case])[:2]


MUTANTS = {
    "sum": lambda self, x, residual=None: x,
    "joined": lambda self, x: jnp.tile(x, self.tensor),
    "candidates": lambda self, *arrays: arrays,
    "merged": lambda self, out, lse, first, block_lse=None: (out, lse, block_lse),
    "over_heads": lambda self, copies, *sums: sums,
}


@pytest.mark.parametrize("method", rest_long(MUTANTS, "sum", "candidates"))
def test_an_exchange_that_is_left_out_would_show(method, monkeypatch):
    config = altered(TINY, vocab_size=200 + list(MUTANTS).index(method))  # no program of the sound method
    monkeypatch.setattr(Shards, method, MUTANTS[method])
    assert exchanged(lowered(config, TINY_TOP, 2, 2))[0] < counted((config, TINY_TOP, 2, 2)).count


def test_exchanges_by_hand():
    item, heads, batch = 2, 7, 8  # of a device
    products, logits, counts = 57 * batch * 3584 * item * 3, batch * 38_016 * 4 * 3, 2 * batch * 4 * 3
    merges, lists = 28 * batch * heads * (128 * item + 4), 28 * 2 * batch * (32 + 1 + 4) * 4
    found = step_exchanges(QWEN_7B, parse("top:32"), batch, tensor=4, context=2)
    assert found == Exchanges(57 + 1 + 2 + 4 * 28, products + logits + counts + merges + lists, 28)
    assert step_exchanges(QWEN_7B, parse("top:32"), batch) == Exchanges()
    assert step_exchanges(QWEN_7B, parse("dense"), batch, tensor=2) == (58, 57 * batch * 3584 * item + batch * 76_032 * 4, 0)
    large = step_exchanges(QWEN_7B, parse("dense"), 1024, tensor=4).received - 1024 * 38_016 * 4 * 3
    assert large == 57 * 2 * 1024 * 3584 * item * 3 / 4, "sums of more than 4 MiB go round in a ring"
    for policy, choosing in ((TopBlocks(8, dense_layers=3), 25), (parse("cascade:4+every3"), 10), (parse("window:4+8"), 0)):
        assert step_exchanges(QWEN_7B, policy, context=2).choosing == choosing
    with pytest.raises(NotImplementedError, match="heavy:4 exchanges on a mesh is not counted"):
        step_exchanges(QWEN_7B, parse("heavy:4"), tensor=2)


def test_seconds_are_bytes_over_a_rate_and_a_latency_of_each():
    exchanges, term = Exchanges(15, 31_000.0, 7), ExchangeTerm("it", 3e-6, 50e9, 2e-5)
    assert term.seconds(exchanges) == pytest.approx(15 * 3e-6 + 31_000 / 50e9 + 7 * 2e-5)
    free = dataclasses.replace(term, link_per_s=None, choose_s=None)
    assert free.seconds(exchanges._replace(choosing=0)) == pytest.approx(15 * 3e-6)
    assert "bytes not told from nothing, choice not measured" in str(free)
    with pytest.raises(ValueError, match="the choice over the devices of context was not measured on it; measure them"):
        free.seconds(exchanges)


@pytest.mark.parametrize("case", ["dense, copied heads", "top, both, in 16 bits", "latents"])
def test_a_device_has_the_weights_that_are_counted(case):
    config, policy, tensor, context = CASES[case]
    shards = Shards(kvjax.mesh(tensor=tensor, context=context))
    params = place_params(TransformerDecoder(config), random_weights(config), shards)
    held = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params["layers"])]
    moved = step_bytes(config, policy, 256, BATCH, page_size=PAGE, tensor=tensor, context=context)
    rows = BATCH * config.hidden_size
    others = {name: leaf.addressable_shards[0].data.size for name, leaf in params.items() if name != "layers"}
    expected = sum(held) + sum(others.values()) + (0 if config.tie_embeddings else rows - others["embed"])
    assert moved.weights == expected * jnp.dtype(config.compute_dtype).itemsize
