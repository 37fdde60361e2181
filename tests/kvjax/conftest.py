"""Small random models, a text, and policies with planted defects."""

import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import VOCAB, make_latent_model, make_model, make_recurrent_model, shallow

from kvjax.compilation import NAMED
from kvjax.policies.decode import Blocks
from kvjax.policies.decode.base import Stateless


@pytest.fixture(scope="session")
def model():
    return make_model()


@pytest.fixture(scope="session")
def one_layer():
    """`model` without its second layer, for tests of what is the same in every layer: its programs take half the time.
    Not for tests of what pages hold: in the first layer that depends on no other token.
    """
    return shallow(make_model())


@pytest.fixture(scope="session")
def bf16_model():
    return make_model(compute_dtype="bfloat16")


@pytest.fixture(scope="session")
def recurrent_model():
    return make_recurrent_model()


@pytest.fixture(scope="session")
def bf16_recurrent_model():
    return make_recurrent_model("bfloat16")


@pytest.fixture(scope="session")
def latent_model():
    return make_latent_model()


@pytest.fixture(scope="session")
def bf16_latent_model():
    return make_latent_model("bfloat16")


@pytest.fixture(scope="session")
def model_factory():
    return make_model


@pytest.fixture
def compiled():
    """Functions by name -> the threads that compiled them, in order: "ahead" or "call". All compiled programs are
    cleared."""
    found, on = collections.defaultdict(list), [True]

    def hear(event, duration, **named):
        if on[0] and event.endswith("backend_compile_duration"):
            ahead = threading.current_thread().name.startswith(NAMED)
            found[str(named.get("fun_name")).removeprefix("jit(").removesuffix(")")].append("ahead" if ahead else "call")

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(hear)
    yield found
    on[0] = False


@pytest.fixture(scope="session")
def text():
    return np.random.default_rng(0).integers(0, VOCAB, 300).tolist()


@pytest.fixture(scope="session")
def tokens():
    """300 others than `text`, for sequences of layers that forget."""
    return np.random.default_rng(3).integers(0, VOCAB, 300).tolist()


@pytest.fixture
def everything_is_given_back(request):
    """No test may leave a sequence, a page or a row behind in the module's `engine`."""
    yield
    if "engine" in request.fixturenames:
        used = request.getfixturevalue("engine")
        for sequence in list(used.sequences):
            used.free(sequence)
        assert all(each.free == each.total for each in used.allocators.values())


@pytest.fixture(scope="session")
def speaker():
    """A tiny model of one layer with a tokenizer of single printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {character: number for number, character in enumerate([*characters, "<eos>", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    model = make_model(num_layers=1, eos_token_ids=(95,))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    return model


@dataclasses.dataclass(frozen=True)
class ListedPages(Stateless):
    """Every page but those of `without`, by an explicit list: sound, if there are none."""

    without: tuple[int, ...] = ()

    def select(self, query, layer, ctx, state):
        pages = jnp.arange(ctx.page_table.shape[1])
        there = (pages < -(-ctx.lengths[:, None] // ctx.page_size)) & ~jnp.isin(pages, jnp.array(self.without, jnp.int32))
        last = pages.size
        ids = jnp.sort(jnp.where(there, pages, last), axis=1)
        ids = jnp.where(ids < last, ids, -1)[:, None].astype(jnp.int32)
        return Blocks(jnp.broadcast_to(ids, (ids.shape[0], layer.pages.kv_heads, last)), ctx.page_size), state

    def describe(self):
        return f"every page but {self.without}"


@pytest.fixture(scope="session")
def listed_pages():
    """A policy in which the defect of dropped pages can be planted."""
    return ListedPages
