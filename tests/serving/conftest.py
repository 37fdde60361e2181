"""A tiny random model with a tokenizer and a chat template: what every test here runs on."""

from __future__ import annotations

import sys

import jax
import pytest
from planted_runs import planted_runs
from tiny_models import TINY, altered

from kvjax.engine.engine import Engine
from kvjax.models import CausalLM, TransformerDecoder, init_params

# Two special tokens, 256 bytes, and room for merges: "needle" keys are made of words that are one token.
WORDS = ["amber", "anchor", "basil", "beacon", "cedar", "cobalt", "coral", "delta", "ember", "falcon", "garnet"]
WORDS += ["harbor", "island", "jasper", "kettle", "lantern", "marble", "nectar", "olive", "orchid", "pepper", "quartz"]
WORDS += ["raven", "saffron", "timber", "umber", "velvet", "walnut", "yarrow", "zephyr"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
PAGE_SIZE = 16
CHUNK = 64


@pytest.fixture
def empty_folder(monkeypatch, tmp_path):
    """A folder of the test's own is the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def planted_results(tmp_path):
    """Two results of `kvjax bench decode` with times of a planted law."""
    return planted_runs(tmp_path)


@pytest.fixture
def kvjax(monkeypatch, capsys):
    """Run the command line in this process; returns exit status, stdout and stderr."""
    from kvjax.serving.cli import app as cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvjax", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([" " + " ".join(WORDS)] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def model(tokenizer):
    sizes = {"vocab_size": 480, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "max_positions": 512}
    sizes["num_layers"] = 1  # programs compile in less time, and nothing here depends on how many there are
    config = altered(TINY, **sizes, tie_embeddings=False, eos_token_ids=(0,))
    # Wide weights: with the usual small ones a random model says the same token for ever, whatever it reads.
    return CausalLM(TransformerDecoder(config), init_params(config, jax.random.key(3), std=0.6), tokenizer, "tiny")


@pytest.fixture(scope="session")
def model_folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save(folder)
    return folder


@pytest.fixture(scope="session")
def engine(model):
    """Three slots; 60 pages of 16 tokens, so that not every record a test can think of fits at once."""
    return Engine(model, "window:8+24", policies=["dense"], pages=60, page_size=PAGE_SIZE, prefill_chunk=CHUNK, batch_buckets=(1, 3))


@pytest.fixture(autouse=True)
def _no_leaked_pages(request):
    """Whatever a test does, the shared engine has all its pages back afterwards."""
    yield
    if "engine" in request.fixturenames:
        allocator = request.getfixturevalue("engine").allocators["full"]
        assert allocator.free == allocator.total
