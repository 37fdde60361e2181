"""Any cut of a prompt gives the same bits in recurrent layers."""

import itertools

import numpy as np
import pytest
from recurrent_rows import PAGE, Sequences, tokens_of
from scheduling import same_next

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("everything_is_given_back")]


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


@pytest.fixture(scope="module")
def rows():
    """What one recurrent layer is given, without a model."""
    return tokens_of(0)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 17), (15, 16, 33, 47), (48, 49, 96), (8, 40), tuple(range(1, 100))])
def test_any_cut_gives_the_same_bits_in_rows(rows, cuts):
    whole, cut = Sequences(rows), Sequences(rows)
    whole.prefill(0, 100)
    for last in (*cuts, 100):
        cut.prefill(0, last)
    np.testing.assert_array_equal(whole.outs[0], cut.outs[0])
    for each in (whole, cut):
        each.decode((True, False), 1)
        each.prefill(0, 140)
    np.testing.assert_array_equal(whole.outs[0], cut.outs[0])


def test_random_histories_of_rows(rows):
    """Cuts, steps, drafts and truncations: at every end the bits of a layer in which nothing else was ever run."""
    for seed in range(6):
        random, sequences, record = np.random.default_rng(seed), Sequences(rows), [[], []]
        for number in range(14):
            which, kind = int(random.integers(2)), random.choice(["prefill", "decode", "draft", "truncate"])
            length = len(sequences.outs[which])
            if length > 120:
                break
            if kind == "prefill":
                more = int(random.integers(1, 30))
                sequences.prefill(which, length + more)
                record[which] += [None] * more
            elif kind == "truncate":
                keep = int(random.integers(length // PAGE * PAGE, length + 1))
                sequences.truncate(which, keep)
                del record[which][keep:]
            else:
                count = 1 if kind == "decode" else 4
                kept = int(random.integers(count + 1))
                sequences.decode([each == which for each in (0, 1)], count, kept)
                record[which] += [(number, count)] * kept
        for which in (0, 1):
            alone = Sequences(rows)
            for call, group in itertools.groupby(record[which]):
                kept = len(list(group))
                if call is None:
                    alone.prefill(which, len(alone.outs[which]) + kept)
                else:
                    alone.decode([each == which for each in (0, 1)], call[1], kept)
            np.testing.assert_array_equal(sequences.outs[which][: len(record[which])], alone.outs[which])
            np.testing.assert_array_equal(sequences.continued(which), alone.continued(which))
