"""Any cut of a prompt of a model with recurrent layers gives the same bits: with programs as users' are, since others are not equal."""

import numpy as np
import pytest
from scheduling import same_next

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("everything_is_given_back")]


@pytest.fixture(scope="module")
def engine(recurrent_engine):
    return recurrent_engine


@pytest.mark.parametrize("cuts", [(1, 31, 33, 90), (16, 17, 64), tuple(range(3, 100))])
def test_any_cut_of_a_prompt_gives_the_same_bits(engine, tokens, cuts):
    (whole,) = engine.prefill([tokens[:100]])
    (sequence,) = engine.prefill([tokens[: cuts[0]]])
    for start, end in zip(cuts, (*cuts[1:], 100), strict=True):
        logits = engine.extend(sequence, tokens[start:end])
    np.testing.assert_array_equal(logits, whole.logits)
    same_next(engine, sequence, whole, tokens[100:])
