"""Families that are entries of a table compute what transformers computes, on unusual configurations; and wrong models that must fail."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import CASES, FAMILIES, KEPT, fields_of, prompt_of, weight_of
from golden_family import TOLERANCE, check_engine
from quick_cases import rest_long
from safetensors.numpy import load_file, save_file

from kvjax.engine import Engine
from kvjax.models import config_json, load
from kvjax.models.checkpoint import wanted_tensors

GOLDEN = np.load(Path(__file__).with_name("golden") / "families.npz")
QUICK = tuple((family, number) for family in FAMILIES for number in (0, 5))


def write_case(folder, family, number):
    """The checkpoint of a case: its config.json, and weights from seeds."""
    fields = fields_of(family, number)
    wanted, _ = wanted_tensors(config_json.parse(fields))
    save_file({w.name: weight_of(family, number, w.name, w.shape) for w in wanted}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def golden_case(folder, family, number):
    """The model of a case, and what it must give."""
    model = load(write_case(folder, family, number), dtype=jnp.float32, tokenizer=False)
    kept = {name: GOLDEN[f"{family} {number} {name}"] for name in ("logits", "greedy")}
    return model, kept | {"ids": prompt_of(family, number)}


def engine_of(model, policy="dense", **options):
    return Engine(model, policy, **({"pages": 32, "page_size": 8, "prefill_chunk": 16, "batch_buckets": (1, 4)} | options))


def test_every_family_has_eight_cases():
    assert set(GOLDEN.files) == {f"{family} {number} {what}" for family, number in CASES for what in ("logits", "greedy")}
    assert all(sum(family == each for each, _ in CASES) == 8 for family in FAMILIES)


@pytest.mark.parametrize("case", rest_long(CASES, *QUICK), ids=lambda case: "-".join(map(str, case)))
def test_logits_and_greedy_tokens(case, complete, tmp_path):
    model, want = golden_case(tmp_path, *case)
    logits, greedy = complete(model.decoder, model.params, want["ids"], steps=len(want["greedy"]))
    error = np.abs(logits[-len(want["logits"]) :] - want["logits"]).max()
    print(f"{case}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    np.testing.assert_array_equal(greedy, want["greedy"])


ENGINES = [(family, 0) for family in FAMILIES]


@pytest.mark.parametrize("case", rest_long(ENGINES, ("gemma2", 0), ("cohere2", 0)), ids=lambda case: case[0])
def test_the_engine_gives_the_golden_logits_and_tokens_however_the_prompt_is_cut(case, tmp_path):
    model, want = golden_case(tmp_path, *case)
    check_engine(engine_of(model), want)


LISTS = ("TopBlocks(k=4, local=2, block_size=8)", "TopBlocks(k=16, local=8, block_size=4, index='mean')")
