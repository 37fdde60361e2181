"""Teacher forcing through the engine, against one forward over the whole text, and with defects planted in a policy."""

import jax
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

from kvjax.engine.engine import Engine
from kvjax.evaluation.retrieval import prefilled
from kvjax.evaluation.teacher_forcing import ALONE, exact_prefixes, force, text_windows
from kvjax.policies.decode import parse

PAGE, STEPS, HISTORY = 16, 40, 90


@pytest.fixture(scope="module")
def windows():
    text = np.random.default_rng(3).integers(0, 97, 3 * (HISTORY + STEPS + 1))
    return text_windows(text, HISTORY + STEPS + 1, 3)


@pytest.fixture(scope="module")
def policies(listed_pages):
    return {"sound": listed_pages(), "dropped": listed_pages((2,)), "window:8+24": "window:8+24"}


@pytest.fixture(scope="module")
def engine(model, policies):
    return Engine(model, policies=policies.values(), pages=130, page_size=PAGE, prefill_chunk=32, batch_buckets=(1, 4))


@pytest.fixture(scope="module")
def forced(engine, windows, policies):
    logits_alive = []

    def on_step():
        shapes = [array.shape for array in jax.live_arrays()]
        logits_alive.append(sum(shape in ((3, 97), (1, 97), (4, 1, 97)) for shape in shapes))

    with prefilled(engine, [window[:HISTORY] for window in windows]) as sequences:
        found = force(engine, sequences, [window[HISTORY:] for window in windows], policies, on_step=on_step)
        prefixes = exact_prefixes(engine, sequences, [window[HISTORY] for window in windows], policies, 12)
    assert engine.allocators["full"].free == engine.allocators["full"].total
    return found, prefixes, logits_alive


def test_dense_figures_are_those_of_one_forward(forced, model, windows, policies):
    found, _, _ = forced
    for row, window in enumerate(windows):
        logits = model.full_forward(window)[HISTORY:-1]
        best = np.sort(logits, axis=-1)
        np.testing.assert_allclose(found.margin[row], best[:, -1] - best[:, -2], atol=2e-4)
        np.testing.assert_allclose(found.nll[row], -log_softmax(logits, axis=-1)[np.arange(STEPS), window[HISTORY + 1 :]], atol=2e-4)
    assert list(found.beside) == [*policies, ALONE]
    assert found.keys["dense"] == pytest.approx(HISTORY + (STEPS + 1) / 2)
    assert found.keys["window:8+24"] == 32


def test_figures_beside_dense_are_those_of_their_logits(forced, engine, windows):
    """The same steps taken by hand, one row, with scipy's entropy."""
    found, _, _ = forced
    window, name = windows[1], "window:8+24"
    with prefilled(engine, [window[:HISTORY]] * 2) as (dense, sparse):
        for step in range(5):
            fed, true = window[HISTORY + step], window[HISTORY + step + 1]
            p, q = (np.asarray(engine.decode([s], [fed], policy)[0], np.float64) for s, policy in ((dense, "dense"), (sparse, name)))
            beside = found.beside[name]
            assert beside.kl[1, step] == pytest.approx(entropy(softmax(p), softmax(q)), rel=2e-3, abs=1e-6)
            assert beside.tv[1, step] == pytest.approx(np.abs(softmax(p) - softmax(q)).sum() / 2, rel=2e-3, abs=1e-6)
            assert beside.nll[1, step] == pytest.approx(-log_softmax(q)[true], abs=1e-3)
            assert beside.agrees[1, step] == (p.argmax() == q.argmax())


def test_a_dropped_page_shows_and_an_explicit_list_does_not(forced):
    found, prefixes, _ = forced
    floor = found.beside[ALONE].kl.mean()
    assert 0 <= floor < 1e-9
    assert found.beside["sound"].kl.mean() < 1e-9
    assert found.beside["sound"].agrees.all()
    assert found.beside["dropped"].kl.mean() > 1e-3
    assert found.beside["dropped"].kl.mean() > 1e5 * floor
    assert found.beside["dropped"].agrees.mean() < 1
    assert (found.beside["dropped"].kl >= 0).all()
    assert prefixes["sound"] == prefixes[ALONE] == [12, 12, 12]
    assert min(prefixes["dropped"]) < 12


def test_logits_are_not_kept(forced):
    """As many are alive at the end of the run as soon after its begin."""
    _, _, alive = forced
    assert len(alive) == STEPS
    assert alive[-1] <= max(alive[:3])


def test_the_host_does_not_run_far_ahead_of_the_device(engine, windows, policies, monkeypatch):
    """Every step in flight holds the logits of all policies."""
    fetched, fetch = [], jax.device_get
    monkeypatch.setattr("kvjax.evaluation.teacher_forcing.jax.device_get", lambda found: fetched.append(len(found)) or fetch(found))
    with prefilled(engine, [window[:HISTORY] for window in windows]) as sequences:
        force(engine, sequences, [window[HISTORY : HISTORY + 36] for window in windows], {})
    assert fetched == [16, 16, 35]


@pytest.mark.parametrize("again", [2, 3])
def test_rows_of_dense_again_return_to_their_places(engine, windows, again):
    """Three rows in parts of 2 and 1, or together. Mixed-up rows would differ by nats."""
    with prefilled(engine, [window[:HISTORY] for window in windows]) as sequences:
        found = force(engine, sequences, [window[HISTORY : HISTORY + 3] for window in windows], {}, again=again)
        prefixes = exact_prefixes(engine, sequences, [window[HISTORY] for window in windows], {}, 4, again=again)
    assert found.beside[ALONE].kl.max() < 1e-6
    assert prefixes == {ALONE: [4, 4, 4]}


def test_a_prefix_ends_at_the_first_token_that_differs(engine, windows, policies, monkeypatch):
    texts = {"dense": [1, 2, 3, 4], "window:8+24": [1, 9, 3, 4]}
    said = lambda engine, forks, scripts, *, policy: ([[texts[str(policy)]] for _ in forks], None, None)  # noqa: E731
    monkeypatch.setattr("kvjax.evaluation.teacher_forcing.speak", said)
    with prefilled(engine, [window[:HISTORY] for window in windows]) as sequences:
        found = exact_prefixes(engine, sequences, [0, 0, 0], {"window:8+24": parse("window:8+24")}, 4)
    assert found == {"window:8+24": [1, 1, 1], ALONE: [4, 4, 4]}


def test_windows_are_disjoint_and_begin_as_prompts_do():
    text = np.arange(100)
    found = text_windows(text, 30, 3, prefix_ids=(7, 7))
    assert [len(window) for window in found] == [30, 30, 30]
    assert [window[:3] for window in found] == [[7, 7, 0], [7, 7, 33], [7, 7, 66]]
    told = [token for window in found for token in window[2:]]
    assert len(set(told)) == len(told)
    assert text_windows(text, 50, 2)[1] == list(range(50, 100))


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [(51, 2, r"2 disjoint windows of 51 tokens need 102 tokens of text, and there are 100: pass a longer text"), (10, 0, "at least 1")],
)
def test_windows_that_cannot_be_are_refused(length, count, message):
    with pytest.raises(ValueError, match=message):
        text_windows(np.arange(100), length, count)


@pytest.mark.parametrize("continuations", [[[1, 2, 3]], [[1, 2], [1, 2, 3], [1, 2]], [[1], [1], [1]]])
def test_continuations_that_do_not_fit_are_refused(engine, windows, policies, continuations):
    with (
        prefilled(engine, [window[:HISTORY] for window in windows]) as sequences,
        pytest.raises(ValueError, match="a continuation of one length, at least 2 tokens, for each of 3 sequences"),
    ):
        force(engine, sequences, continuations, policies)
    assert engine.allocators["full"].free == engine.allocators["full"].total
