"""The lm-evaluation-harness adapter on stub tasks, against plain full forward passes of the model."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.generation import generate
from kvjax.models import causal_mix
from kvjax.scheduler.scoring import score
from kvjax.serving import KvjaxLM
from kvjax.serving.harness import windows

DOCUMENTS = [
    {"question": "amber anchor basil", "choices": [" cobalt", " coral delta", " ember falcon garnet", "x"]},
    {"question": "Question: harbor?\nAnswer:", "choices": [" island", " jasper", " kettle"]},
    {"question": "lantern marble nectar " * 9, "choices": [" olive", " orchid pepper"]},
    {"question": "", "choices": ["quartz", "raven saffron"]},
]


def instance(*args):
    return types.SimpleNamespace(args=args)


@functools.partial(jax.jit, static_argnames=("decoder", "given", "sink", "width"))
def forward(decoder, params, tokens, given, sink, width):
    def mix(layer, heads, state):
        q, k, v = heads.q, heads.k, heads.v
        row, key = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])[None]
        seen = (key <= row) & ((row < given) | (key < sink) | (key > row - width))
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], scale=heads.sm_scale), state

    mix = causal_mix() if given is None else mix
    hidden, _ = decoder.hidden(params, tokens[None], jnp.arange(len(tokens))[None], mix, None)
    return decoder.logits(params, hidden)[0]


def direct_logits(model, ids, given=None, sink=0, width=0):
    """Next-token logits after each token, `[T, V]`: one full forward pass, causal.

    given: the tokens from this one on see only the first `sink` tokens and the last `width`, as prefill and then decode
    through a window see it.
    """
    padded = np.zeros(-(-len(ids) // 128) * 128, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(forward(model.decoder, model.params, padded, given, sink, width))[: len(ids)]


def direct_logprobs(model, ids, *window):
    """Log-probability of every next token, `[T - 1]`, and whether it is the greedy one."""
    logits = direct_logits(model, ids, *window)[:-1]
    logprobs = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]
    return logprobs, logits.argmax(-1) == np.asarray(ids[1:])


def split(tokenizer, context, continuation):
    """Context and continuation as tokens; the tests' texts have no space at the end of a context."""
    head = tokenizer(context)["input_ids"] if context else [0]
    rest = tokenizer(context + continuation)["input_ids"]
    return head, rest[len(head) :] if context else rest


REQUESTS = [(document["question"].rstrip(), choice) for document in DOCUMENTS for choice in document["choices"]]


@pytest.fixture(scope="module")
def lm(engine):
    return KvjaxLM(engine, policy="dense")


def test_log_likelihoods_equal_a_full_forward_pass(lm, model):
    found = lm.loglikelihood([instance(*request) for request in REQUESTS])
    greedy = 0
    for (context, continuation), (logprob, is_greedy) in zip(REQUESTS, found, strict=True):
        head, rest = split(model.tokenizer, context, continuation)
        logprobs, best = direct_logprobs(model, head + rest)
        assert logprob == pytest.approx(logprobs[len(head) - 1 :].sum(), abs=1e-3)
        assert is_greedy == best[len(head) - 1 :].all()
        greedy += is_greedy
    assert greedy == 0, "random text is not what the model would say; the next test has text that is"


def test_greedy_continuations_are_known_as_such(lm, engine, model):
    asked = []
    for context in ("amber", "anchor basil", "beacon cedar cobalt", "coral", "delta ember", "falcon", "garnet harbor"):
        ids = greedy_ids(model, model.tokenizer(context)["input_ids"], 1)
        text = model.tokenizer.decode(ids)
        if split(model.tokenizer, context, text)[1] == ids:
            asked.append((context, text))
    assert asked, "no greedy text survives being tokenised again"
    assert all(is_greedy for _, is_greedy in lm.loglikelihood([instance(*request) for request in asked]))


def test_multiple_choice_accuracy_is_that_of_the_model(lm, model):
    """The stub task: the answer is the likeliest choice; a document counts if harness and model agree on all of it."""
    found = iter(lm.loglikelihood([instance(*request) for request in REQUESTS]))
    for document in DOCUMENTS:
        chosen = np.argmax([next(found)[0] for _ in document["choices"]])
        sums = []
        for choice in document["choices"]:
            head, rest = split(model.tokenizer, document["question"].rstrip(), choice)
            sums.append(direct_logprobs(model, head + rest)[0][len(head) - 1 :].sum())
        assert chosen == np.argmax(sums)


def test_continuations_are_read_through_the_policy(engine, model):
    context, continuation = "lantern marble nectar " * 20 + "olive", " orchid pepper quartz raven"
    head, rest = split(model.tokenizer, context, continuation)
    assert len(rest) >= 4
    ((logprob, _),) = KvjaxLM(engine).loglikelihood([instance(context, continuation)])
    logprobs, _ = direct_logprobs(model, head + rest, len(head), 8, 24)
    assert logprob == pytest.approx(logprobs[len(head) - 1 :].sum(), abs=1e-3)
    assert logprob == pytest.approx(score(engine, context, continuation).logprob, abs=1e-3)
    dense, _ = direct_logprobs(model, head + rest)
    assert abs(logprob - dense[len(head) - 1 :].sum()) > 0.01


def test_a_shared_context_is_prefilled_once(lm, engine, monkeypatch):
    prefilled, real = [], engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda prompts, **options: prefilled.extend(prompts) or real(prompts, **options))
    lm.loglikelihood([instance(*request) for request in REQUESTS])
    assert len(prefilled) == len(DOCUMENTS)


def test_spaces_at_the_end_of_a_context_move_to_the_continuation(lm):
    moved, stayed = lm.loglikelihood([instance("amber ", "anchor"), instance("amber", " anchor")])
    assert moved == stayed


def test_windows_are_those_of_the_harness():
    """The example in lm_eval's description of loglikelihood_rolling: ten tokens after a prefix, four positions."""
    assert list(windows(11, 4)) == [(0, 1, 5), (4, 5, 9), (6, 9, 11)]
    assert list(windows(2, 4)) == [(0, 1, 2)]
    assert list(windows(5, 4)) == [(0, 1, 5)]


@pytest.mark.parametrize("policy", ["dense", "window:8+24"])
def test_rolling_log_likelihood_sums_windows(engine, model, policy):
    text = "timber umber velvet walnut " * 8
    lm = KvjaxLM(engine, policy=policy, max_length=30)
    (found,) = lm.loglikelihood_rolling([instance(text)])
    ids = [0, *model.tokenizer(text)["input_ids"]]
    expected, predicted = 0.0, 0
    while predicted < len(ids) - 1:
        stop = min(predicted + 30, len(ids) - 1)
        start = max(0, stop - 30)
        window = () if policy == "dense" else (predicted - start + 1, 8, 24)
        expected += direct_logprobs(model, ids[start : stop + 1], *window)[0][predicted - start :].sum()
        predicted = stop
    assert found == pytest.approx(expected, abs=2e-3)
    whole = KvjaxLM(engine, policy="dense").loglikelihood_rolling([instance(text)])[0]
    assert whole == pytest.approx(direct_logprobs(model, ids)[0].sum(), abs=2e-3)
    assert abs(whole - found) > 0.01


def greedy_ids(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(direct_logits(model, ids)[-1].argmax()))
    return ids[-count:]


def test_generate_until_is_the_models_greedy_text(lm, model):
    contexts = ["amber anchor", "cedar cobalt coral " * 20, "x"]
    greedy = [greedy_ids(model, model.tokenizer(context)["input_ids"], 8) for context in contexts]
    texts = [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy]
    found = lm.generate_until([instance(context, {"until": [], "max_gen_toks": 8}) for context in contexts])
    assert found == texts
    until = texts[1][3:5]
    (cut,) = lm.generate_until([instance(contexts[1], {"until": ["\0", until], "max_gen_toks": 8, "do_sample": False, "temperature": 0})])
    assert cut == texts[1][: texts[1].index(until)]


def test_sampling_arguments(lm, engine):
    drawn = {"until": "\0", "max_gen_toks": 10, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
    first = lm.generate_until([instance("ember", drawn)] * 3)
    assert len(set(first)) == 3, "each repeat of a request is a sample of its own"
    assert lm.generate_until([instance("ember", drawn)] * 3) == first
    same = {"max_new_tokens": 10, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "stop": "\0"}
    assert first[0] == generate(engine, ["ember"] * 3, policy="dense", seed=0, **same)[0]
    assert lm.generate_until([instance("ember", drawn | {"do_sample": False})]) == lm.generate_until(
        [instance("ember", {"until": "\0", "max_gen_toks": 10})]
    )
    with pytest.raises(ValueError, match="num_beams"):
        lm.generate_until([instance("ember", {"until": [], "num_beams": 4})])


def test_nothing_is_cut_to_fit(lm):
    long = "x" * 600
    with pytest.raises(ValueError, match="512 positions"):
        lm.generate_until([instance(long, {"until": []})])
    with pytest.raises(ValueError, match="512 positions"):
        lm.loglikelihood([instance(long, " y")])


def test_wrong_input(lm, engine, model):
    with pytest.raises(ValueError, match="continuation"):
        lm.loglikelihood([instance("amber", "")])
    with pytest.raises(ValueError, match="max_length"):
        KvjaxLM(engine, max_length=513)
    without = types.SimpleNamespace(model=types.SimpleNamespace(tokenizer=None), config=engine.config)
    with pytest.raises(ValueError, match="no tokenizer"):
        KvjaxLM(without)


def test_chat_templates(lm, tokenizer):
    messages = [{"role": "user", "content": "umber"}]
    assert lm.apply_chat_template(messages) == "<user>umber\n<assistant>"
    messages.append({"role": "assistant", "content": "Well"})
    assert lm.apply_chat_template(messages, add_generation_prompt=False) == "<user>umber\n<assistant>Well"
    assert lm.chat_template(True) == tokenizer.chat_template
    assert lm.chat_template(False) == ""


def test_a_beginning_token_is_not_written_twice(lm, monkeypatch):
    class Beginning:
        bos_token = "<s>"

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": ([1] if add_special_tokens else []) + [2] * len(text)}

    monkeypatch.setattr(lm, "tokenizer", Beginning())
    assert lm.tok_encode("ab") == [1, 2, 2]
    assert lm.tok_encode("<s>a") == [2, 2, 2, 2]


def test_it_is_a_model_of_the_harness_where_that_is_installed(tmp_path, monkeypatch, engine):
    """A stand-in for lm_eval with its abstract base class: the adapter must derive from it and define all it asks
    for."""
    package = tmp_path / "lm_eval" / "api"
    package.mkdir(parents=True)
    (tmp_path / "lm_eval" / "__init__.py").touch()
    (package / "__init__.py").touch()
    methods = "".join(
        f"    @abc.abstractmethod\n    def {name}(self, requests): ...\n"
        for name in ("loglikelihood", "loglikelihood_rolling", "generate_until")
    )
    (package / "model.py").write_text(f"import abc\nclass LM(abc.ABC):\n    def __init__(self): self.begun = True\n{methods}")
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("kvjax.serving.harness")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from lm_eval.api.model import LM

    lm = module.KvjaxLM(engine)
    assert isinstance(lm, LM)
    assert lm.begun
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.delitem(sys.modules, name)
