"""The embedded model through the engine, against what transformers answered (make_needle_golden.py)."""

import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine.engine import Engine
from kvjax.evaluation import needle
from kvjax.generation import generate
from kvjax.models import load
from kvjax.models.needle import path

pytestmark = pytest.mark.optimized  # runs longer than it compiles

SCRIPT = Path(__file__).with_name("make_needle_golden.py")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def stored(script):
    arrays = dict(np.load(script["GOLDEN"]))
    arrays["prompts"] = [ids.tolist() for ids in np.split(arrays["prompts"], np.cumsum(arrays["lengths"])[:-1])]
    return arrays


@pytest.fixture(scope="module")
def model():
    return load(path(), dtype=jnp.float32)


def test_prompts_are_what_the_script_makes(script, stored, model):
    """Also that they are needle prompts: the script's templates are those of the library."""
    assert script["TEMPLATES"] == tuple((t.needle, t.question) for t in needle.TEMPLATES)
    for number, (length, template, depth) in enumerate(script["PROMPTS"]):
        made = [script["prompt"](model.tokenizer, seed, length, template, depth) for seed in range(100 * number, 100 * number + 3)]
        assert (stored["prompts"][number], stored["answers"][number].tolist()) in made
        assert len(stored["prompts"][number]) == length


@pytest.mark.parametrize("chosen", [(0,), pytest.param((1, 2, 3, 4, 5, 6, 7), marks=pytest.mark.long)], ids=str)
def test_dense_engine_gives_the_tokens_of_transformers(stored, model, chosen):
    pages = 2 * -(-int(stored["lengths"].max()) // 128) + 8
    engine = Engine(model, pages=pages, batch_buckets=(4,))
    prompts, greedy = [stored["prompts"][number] for number in chosen], stored["greedy"][list(chosen)]
    done = generate(engine, prompts, slots=2, max_new_tokens=greedy.shape[1], stop_token_ids=(), details=True)
    assert [each.token_ids for each in done] == [tuple(row) for row in greedy.tolist()]


@pytest.mark.long
def test_logits_are_those_of_transformers(stored, model):
    """The bound of the README, for prompts prefilled and for tokens decoded: a share of a row's largest logit in
    magnitude."""
    ids, worst = stored["prompts"][0], 0.0
    engine = Engine(model, pages=20, prefill_chunk=256, batch_buckets=(1,))
    whole, grown = engine.prefill([ids[:1], ids[:1]])
    prefilled = engine.extend(whole, ids[1:], all_logits=True)
    for row, want in zip(stored["rows"].tolist(), stored["logits"], strict=True):
        engine.extend(grown, ids[grown.length : row])
        for logits in (prefilled[row - 1], engine.decode([grown], [ids[row]])[0]):
            worst = max(worst, float(np.abs(np.asarray(logits) - want).max() / np.abs(want).max()))
    print(f"largest difference: {worst:.1e} of the row's largest logit")
    assert worst < 2e-5


def test_the_answers_are_right(stored):
    right = (stored["greedy"][:, : stored["answers"].shape[1]] == stored["answers"]).all(1)
    assert right.all()
