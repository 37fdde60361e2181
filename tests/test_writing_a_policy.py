"""The examples of docs/writing-a-policy.md run, its tables have every field, and wrong lists are refused as it says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make_model

import kvjax
from kvjax.policies.decode import Blocks, SelectContext, Stateless, largest_blocks, parse
from kvjax.policies.prefill import PrefillContext, parse_prefill

DOCUMENT = (Path(__file__).parents[1] / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r'```python title="(\w+\.py)"\n(.*?)\n```', DOCUMENT, re.DOTALL))
PROMPT = [n * 7 % 90 + 1 for n in range(1400)]


@pytest.fixture
def files(tmp_path):
    for name, source in EXAMPLES.items():
        (tmp_path / name).write_text(source)
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return make_model(num_layers=2)


def answers(engine, sequence):
    """Logits of the next step."""
    return engine.decode([engine.fork(sequence)], [5])


def test_the_first_example_lists_what_it_says(files, model):
    policy = parse(f"{files}/strided.py:Strided:3/recent=2")
    engine = kvjax.Engine(model, policies=["dense", policy], pages=24, batch_buckets=(1,))
    (sequence,) = engine.prefill([PROMPT])
    step = engine.inspect([sequence], [5], policy)
    assert [layer.listed(0, head) for layer in step.layers for head in range(2)] == [[0, 3, 6, 9, 10]] * 4
    assert not jnp.array_equal(engine.decode([engine.fork(sequence)], [5], policy=policy), answers(engine, sequence))


def test_the_second_example_scores_by_mean_keys(files, model):
    policy = parse(f"{files}/by_mean.py:ByMean:2")
    engine = kvjax.Engine(model, policies=["dense", policy], pages=24, batch_buckets=(1,))
    (sequence,) = engine.prefill([PROMPT])
    for layer in engine.inspect([sequence], [5], policy).layers:
        for head in range(2):
            listed, scores = layer.listed(0, head), layer.scores[0, head]
            assert {0, 9, 10} <= set(listed)
            distant = sorted(set(listed) - {0, 9, 10})
            assert distant == sorted(sorted(range(1, 9), key=lambda block: -float(scores[block]))[:2])


def test_the_prefill_example_reads_less(files, model):
    name = f"{files}/strided_prefill.py:StridedPrefill:4/chi=64/window_tokens=64"
    assert str(parse_prefill(name)) in parse_prefill(name).describe()
    sparse, dense = (kvjax.Engine(model, pages=24, batch_buckets=(1,), prefill=prefill) for prefill in (name, None))
    everything = kvjax.Engine(model, pages=24, batch_buckets=(1,), prefill=name.replace(":4/", ":1/"))
    found = [engine.extend(engine.new_sequence(), PROMPT, all_logits=True) for engine in (sparse, dense, everything)]
    assert float(jnp.abs(found[0] - found[1]).max()) > 1e-2
    assert float(jnp.abs(found[2] - found[1]).max()) < 1e-3


@pytest.mark.parametrize("context", [SelectContext, PrefillContext])
def test_every_field_is_explained(context):
    missing = [field.name for field in dataclasses.fields(context) if f"`{field.name}" not in DOCUMENT]
    assert not missing


@dataclasses.dataclass(frozen=True)
class Wrong(Stateless):
    """Lists what no step can read."""

    number: int

    def select(self, query, layer, ctx, state):
        batch, heads = len(ctx.lengths), layer.pages.kv_heads
        if self.number == 5:
            return largest_blocks(jnp.zeros(()), ctx, k=1, sink=1, local=1, block_size=128), state
        shapes = (batch, 1, 2), (batch, 2), (batch + 1, heads, 2), (batch, heads, 0), (batch, heads, 2)
        ids = [1, 2] if self.number == 6 else jnp.zeros(shapes[self.number], jnp.float32 if self.number == 4 else jnp.int32)
        return Blocks(ids, ctx.page_size), state


@dataclasses.dataclass(frozen=True)
class Constant(Stateless):
    """A list that no value of the step changes."""

    def select(self, query, layer, ctx, state):
        return Blocks(np.broadcast_to(np.array([0, 1], np.int32), (len(ctx.lengths), layer.pages.kv_heads, 2)), ctx.page_size), state


def test_a_list_may_be_an_array_of_numpy(model):
    engine = kvjax.Engine(model, policies=["dense", Constant()], pages=24, batch_buckets=(1,))
    (sequence,) = engine.prefill([PROMPT[:200]])
    dense = answers(engine, sequence)  # two pages hold everything
    assert float(jnp.abs(engine.decode([engine.fork(sequence)], [5], policy=Constant()) - dense).max()) < 1e-4


SAID = [r"ids must be an array \[B=1, K=2, W\]"] * 4 + [
    "ids must be int32",
    r"scores must be \[B, K, S\], got \[\]",
    "ids must be an array",
]


@pytest.mark.parametrize("number", range(len(SAID)))
def test_a_list_that_cannot_be_read_is_refused_with_its_place(number, model):
    engine = kvjax.Engine(model, Wrong(number), pages=24, batch_buckets=(1,))
    (sequence,) = engine.prefill([PROMPT[:200]])
    with pytest.raises(ValueError, match=SAID[number]) as raised:
        engine.decode([sequence], [5])
    line = Wrong.select.__code__.co_firstlineno
    assert number == 5 or str(raised.value).startswith(f"{__file__}, line {line}: ")
