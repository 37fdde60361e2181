"""What becomes of sequences in an engine, whatever its layers keep: cut, forked, truncated, saved, suspended, in any
company. A module with the fixtures `engine` and `tokens` runs these tests by a subclass of `SequenceSuite`."""

import numpy as np
import pytest

from kvjax import Engine, Request, Sampling, Scheduler

PAGE, CHUNK = 16, 32


def close(found, expected):
    """Within 2e-5 of the row's largest logit."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


def same_next(engine, one, other, tokens):
    """Two sequences are continued with the same bits: prefilled, decoded, and prefilled."""
    np.testing.assert_array_equal(engine.extend(one, tokens[:5]), engine.extend(other, tokens[:5]))
    for token in tokens[5:8]:
        np.testing.assert_array_equal(engine.decode([one], [token]), engine.decode([other], [token]))
    np.testing.assert_array_equal(engine.extend(one, tokens[8:40]), engine.extend(other, tokens[8:40]))


def check_cuts(engine, tokens, cuts):
    (whole,) = engine.prefill([tokens[:100]])
    (sequence,) = engine.prefill([tokens[: cuts[0]]])
    for start, end in zip(cuts, (*cuts[1:], 100), strict=True):
        logits = engine.extend(sequence, tokens[start:end])
    np.testing.assert_array_equal(logits, whole.logits)
    same_next(engine, sequence, whole, tokens[100:])


def check_crowded(model, tokens):
    """Seven requests on five rows and few pages: they wait, and are suspended and resumed."""
    engine = Engine(model, pages=14, page_size=PAGE, prefill_chunk=CHUNK, batch_buckets=(5,))
    prompts = [tokens[place : place + 10 + 7 * place] for place in range(7)]
    scheduler = Scheduler(engine)
    handles = [scheduler.submit(Request(prompt, Sampling(max_new_tokens=20))) for prompt in prompts]
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.preemptions
    for prompt, handle in zip(prompts, handles, strict=True):
        text = list(prompt)
        for _ in range(20):
            padded = [*text, *[0] * (120 - len(text))]
            text.append(int(np.argmax(model.full_forward(padded)[len(text) - 1])))
        assert handle.completion.error is None
        assert [*handle.completion.token_ids] == text[len(prompt) :]
    assert all(each.free == each.total for each in engine.allocators.values())


class SequenceSuite:
    @pytest.mark.parametrize("cuts", [(1, 31, 33, 90), (16, 17, 64), tuple(range(3, 100))])
    def test_any_cut_of_a_prompt_gives_the_same_bits(self, engine, tokens, cuts):
        check_cuts(engine, tokens, cuts)

    def test_company_does_not_show(self, engine, tokens):
        one, two = engine.prefill([tokens[:40], tokens[50:120]])
        (alone,) = engine.prefill([tokens[:40]])
        for place in range(40, 60):
            together = engine.decode([two, one], [tokens[place + 100], tokens[place]])
            np.testing.assert_array_equal(together[1], engine.decode([alone], [tokens[place]])[0])

    @pytest.mark.parametrize("length", [48, 41])
    def test_forked_sequences_go_their_own_way(self, engine, tokens, length):
        """What is open is copied."""
        (parent,) = engine.prefill([tokens[:length]])
        child, (alone,) = engine.fork(parent), engine.prefill([tokens[:length]])
        for place in range(length, length + 20):
            engine.decode([child, parent], [tokens[place], 3])
            engine.decode([alone], [tokens[place]])
        engine.free(parent)
        same_next(engine, child, alone, tokens[100:])

    def test_truncated_tokens_are_as_if_never_written(self, engine, tokens):
        cut, plain = engine.prefill([tokens[:35], tokens[:35]])
        for each in (cut, plain):
            for token in tokens[35:38]:
                engine.decode([each], [token])
        engine.extend(cut, tokens[200:205])
        engine.decode([cut], [1])
        engine.truncate(cut, 41)
        engine.truncate(cut, 38)
        same_next(engine, cut, plain, tokens[100:])

    @pytest.mark.quick("48")
    @pytest.mark.parametrize("length", [1, 16, 41, 48])
    def test_a_saved_sequence_goes_on_with_equal_bits(self, engine, tokens, length, tmp_path):
        (sequence,) = engine.prefill([tokens[:length]])
        for token in tokens[length : length + 3]:
            engine.decode([sequence], [token])
        engine.save(sequence, tmp_path / "q")
        same_next(engine, engine.restore(tmp_path / "q"), sequence, tokens[100:])

    def test_a_suspended_sequence_goes_on_with_equal_bits(self, engine, tokens):
        moved, plain = engine.prefill([tokens[:41], tokens[:41]])
        free = {name: each.free for name, each in engine.allocators.items()}
        engine.suspend(moved)
        assert all(each.free > free[name] for name, each in engine.allocators.items())
        (other,) = engine.prefill([tokens[:50]])
        engine.resume(moved)
        same_next(engine, moved, plain, tokens[100:])
        engine.free(other)
