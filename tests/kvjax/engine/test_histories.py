"""Random histories of an engine: whatever was called, in whatever order, every sequence has the bits it would have
alone."""

import collections

import jax
import pytest
from histories import EARLY, FAMILIES, FEW, LARGE, LATE, run_histories
from quick_cases import rest_long
from tiny_models import make_family

from kvjax import Engine

pytestmark = pytest.mark.bits


def seeds_of(name):
    """llama is the family that `make test` runs: one history, which takes as long as its programs do."""
    return range(1) if name == "llama" else range(2)


@pytest.mark.parametrize("name", rest_long(FAMILIES, "llama"))
def test_random_histories_have_the_bits_of_each_sequence_alone(name, tmp_path):
    counts = run_histories(make_family(name), seeds_of(name), tmp_path, FEW)
    assert counts["sequences compared"] > 3


@pytest.mark.quick("llama-early")
@pytest.mark.parametrize("sizes", [LATE, EARLY], ids=["late", "early"])
@pytest.mark.parametrize("name", rest_long([name for name in FAMILIES if name != "deepseek_v32"], "llama"))
def test_sequences_that_give_pages_back_have_the_bits_of_each_alone(name, sizes, tmp_path):
    counts = run_histories(make_family(name), seeds_of(name), tmp_path, sizes)
    assert counts["sequences compared"] > 3


def test_the_comparison_sees_a_page_that_two_sequences_write(tmp_path, monkeypatch):
    """A fork that shares its open page, though both go on writing it, must be found."""

    def fork(engine, sequence):
        child = type(sequence)(list(sequence.tokens), sequence.length, {"full": list(sequence.pages["full"])}, sequence.logits, {})
        engine.allocators["full"].share(child.pages["full"])
        engine.sequences.add(child)
        return child

    monkeypatch.setattr(Engine, "fork", fork)
    with pytest.raises(AssertionError, match="differ"):
        run_histories(make_family("llama"), range(40), tmp_path, FEW)


@pytest.fixture(scope="module")
def total(request):
    """Counts of all families, printed when the last has run."""
    counts = collections.Counter()
    yield counts
    if counts:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nhistories of all families: {dict(counts)}, 0 differences")


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "count"), [("float32", 400), ("bfloat16", 100)])
def test_many_random_histories(name, dtype, count, tmp_path, total):
    total.update(run_histories(make_family(name, dtype=dtype), range(1000, 1000 + count), tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", FAMILIES)
def test_random_histories_on_a_gpu(name, tmp_path, total):
    model = make_family(name, head_dim=128, window=200, dtype="bfloat16")
    total.update(run_histories(model, range(75), tmp_path, LARGE))
