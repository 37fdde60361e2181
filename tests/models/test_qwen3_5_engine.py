"""Golden models of Qwen3.5 through the engine: the logits and greedy tokens of transformers, and equal bits in any
cut."""

import numpy as np
import pytest
from golden_family import TOLERANCE, GoldenFamily
from quick_cases import rest_long

from kvjax import Engine

pytestmark = pytest.mark.optimized

FAMILY = GoldenFamily("qwen3_5")
SHORT = ("g2-d32-attention-bias",)
"""Of `make test`; a case is a minute of compiling."""


@pytest.mark.parametrize("name", rest_long(FAMILY.cases, *SHORT))
def test_prefill_in_any_cut_and_decode_are_transformers(name):
    model, want = FAMILY.case(name)
    engine = Engine(model, pages=12, page_size=16, prefill_chunk=32, batch_buckets=(2,))
    ids, greedy = want["ids"].tolist(), want["greedy"].tolist()
    greedy = greedy[: model.config.max_positions - len(ids)]  # yarn's golden tokens go on past the length that config.json names
    (whole,) = engine.prefill([ids[:1]])
    found = engine.extend(whole, ids[1:], all_logits=True)
    error = np.abs(found - want["logits"][1:]).max()
    print(f"{name}: largest logit error {error:.1e}")
    assert error < TOLERANCE
    (single,) = engine.prefill([ids[:1]])
    for place in range(1, len(ids)):
        np.testing.assert_array_equal(engine.extend(single, ids[place : place + 1], all_logits=True)[0], found[place - 1])
    token = int(np.argmax(found[-1]))
    for expected in greedy[:-1]:
        assert token == expected
        logits = engine.decode([whole, single], [token, token])
        np.testing.assert_array_equal(logits[0], logits[1])
        token = int(np.argmax(logits[0]))
    assert token == greedy[-1]
