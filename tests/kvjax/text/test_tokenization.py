"""What people give as a prompt, and names they know from elsewhere: it works, or one sentence says what to do
instead."""

import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tokenizers import byte_level
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvjax import Engine, Sampling, generate, score
from kvjax.checks import TokenIds, token_ids
from kvjax.text.tokenization import encode, one_by_one

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }} {% endfor %}"
TEMPLATE += "{% if loud %}! {% endif %}{% if add_generation_prompt %}a: {% endif %}"
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
SETTINGS = {"max_new_tokens": 4, "slots": 4}


@pytest.fixture(scope="module")
def engine(speaker):
    return Engine(speaker, pages=16, page_size=128, prefill_chunk=128, batch_buckets=(4,))


@pytest.fixture
def chatty(speaker, monkeypatch):
    monkeypatch.setattr(speaker.tokenizer, "chat_template", TEMPLATE)
    return speaker.tokenizer


def test_messages_go_through_the_chat_template(engine, chatty):
    as_text = generate(engine, "s: be short u: hi a: ", **SETTINGS)
    assert generate(engine, CHAT, **SETTINGS) == as_text
    assert generate(engine, tuple(CHAT), **SETTINGS) == as_text
    assert generate(engine, [CHAT, "x", CHAT[1:]], **SETTINGS) == [
        as_text,
        generate(engine, "x", **SETTINGS),
        generate(engine, "u: hi a: ", **SETTINGS),
    ]
    loud = generate(engine, CHAT, chat_template_kwargs={"loud": True}, **SETTINGS)
    assert loud == generate(engine, "s: be short u: hi ! a: ", **SETTINGS)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "user"}], r"messages\[0\].content must be text, got None"),
        ([CHAT[0], "hello"], r"messages\[1\] must be an object with a role and a content, got 'hello'"),
        (CHAT[0], "a prompt is text, token ids, or a list of messages, got a mapping with 'role', 'content'"),
        ([[5, "a"]], "a prompt is text or a list of token ids, got"),
        (None, "a prompt is text or a list of token ids, and several are a list of them, got None"),
        ({"x", "y"}, "several are a list of them, got {'"),
        (np.ma.masked_array([1, 2, 3], [0, 1, 0]), r"1 of 3 token ids are masked: give tokens.compressed\(\)"),
        (b"Hi", r"got bytes, b'Hi': prompt.decode\(\) makes text of them"),
        ([b"Hi"], "got bytes, b'Hi'"),
        ("a\ud800", "the text holds half of a surrogate pair at character 1, which is not text"),
    ],
)
def test_what_is_no_prompt_is_said(engine, chatty, prompt, said):
    with pytest.raises(ValueError, match=said):
        generate(engine, prompt, **SETTINGS)


@pytest.mark.parametrize("prompt", [np.array(3), jnp.array(1), np.ma.masked, 3, None, {1}, iter([1])], ids=lambda each: type(each).__name__)
def test_what_has_no_items_in_an_order_is_no_prompt(engine, prompt):
    calls = (lambda: generate(engine, prompt, **SETTINGS), lambda: score(engine, prompt, [1]), lambda: score(engine, [1], prompt))
    for call in calls:
        with pytest.raises(ValueError, match=r"a prompt is text or a list of token ids, and several are a list of them, got \S"):
            call()


def test_messages_need_a_template(engine):
    with pytest.raises(ValueError, match="no chat template"):
        generate(engine, CHAT, **SETTINGS)


def test_what_a_tokenizer_returns_is_a_prompt_without_its_padding(speaker, chatty):
    tokenizer = speaker.tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    ids = [tokenizer(text)["input_ids"] for text in ("One", "Two more")]
    assert one_by_one(tokenizer("One")) == ([ids[0]], True)
    assert one_by_one(tokenizer(["One", "Two more"])) == (ids, False)
    for side in ("left", "right"):
        padded = tokenizer(["One", "Two more"], padding=True, return_tensors="np", padding_side=side)
        prompts, single = one_by_one(padded)
        assert ([encode(None, prompt) for prompt in prompts], single) == (ids, False)
    prompts, single = one_by_one([tokenizer("One"), "Two more", {"input_ids": ids[1]}])
    assert ([encode(tokenizer, prompt) for prompt in prompts], single) == ([ids[0], ids[1], ids[1]], False)


@pytest.mark.parametrize("prompt", [[True], [1, True], [np.bool_(True)]])
def test_true_and_false_are_no_token_ids(engine, prompt):
    for call in (lambda: generate(engine, prompt, **SETTINGS), lambda: score(engine, [1, 2], prompt)):
        with pytest.raises(ValueError, match="a prompt is text or a list of token ids"):
            call()


def test_a_rendered_chat_that_gets_a_second_beginning_is_warned_about_once(caplog):
    inner = byte_level()
    inner.add_special_tokens(["<s>"])
    bos = inner.token_to_id("<s>")
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", chat_template="{{ bos_token }}" + TEMPLATE)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert encode(tokenizer, CHAT).count(bos) == encode(tokenizer, "hi").count(bos) == 1
    assert not caplog.messages
    assert encode(tokenizer, rendered)[:2] == encode(tokenizer, rendered + "!")[:2] == [bos, bos]
    (said,) = caplog.messages
    assert said == "a prompt begins with '<s>', and the tokenizer adds another one: give messages instead of a rendered chat, or cut it"


def test_options_of_a_chat_template_need_messages(engine, chatty):
    for prompt in ("x", [1, 2]):
        with pytest.raises(ValueError, match="chat_template_kwargs are for chat messages, and this prompt has none"):
            generate(engine, prompt, chat_template_kwargs={"loud": True}, **SETTINGS)
    with pytest.raises(ValueError, match=r"chat_template_kwargs must be a mapping.*got 5"):
        generate(engine, CHAT, chat_template_kwargs=5, **SETTINGS)


def test_one_bad_prompt_does_not_lose_the_others(engine):
    prompts = ["Call me", [1, 500], "x", [1] * 4094, [], [5.5]]
    for details in (False, True):
        found = generate(engine, prompts, on_error="return", details=details, **SETTINGS)
        errors = [each.error if details else each for each in found]
        assert [isinstance(error, ValueError) for error in errors] == [False, True, False, True, True, True]
        assert "500 is outside the vocabulary" in str(errors[1])
        assert "positions" in str(errors[3])
    texts = generate(engine, prompts, on_error="return", **SETTINGS)
    assert [texts[0], texts[2]] == generate(engine, ["Call me", "x"], **SETTINGS)
    with pytest.raises(ValueError, match="500 is outside the vocabulary"):
        generate(engine, prompts[:3], **SETTINGS)
    for wrong in ([1, 500], [5.5]):  # found while it runs, and while it is read
        with pytest.raises(ValueError, match=r"500|5\.5") as caught:
            generate(engine, ["x", wrong], **SETTINGS)
        assert caught.value.__notes__ == ['prompt 1 of 2, counted from 0; on_error="return" keeps the answers to the others']
    with pytest.raises(ValueError, match='on_error must be "raise" or "return", got \'ignore\''):
        generate(engine, "x", on_error="ignore")


def test_the_pool_of_a_list_is_not_made_for_a_prompt_that_is_too_long(model_factory):
    model = model_factory(max_positions=256)
    texts = generate(model, [[1, 2], [1] * 10**5], on_error="return", max_new_tokens=2, details=True)
    assert len(texts[0].token_ids) == 2
    assert "longer than the model's 256 positions" in str(texts[1].error)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch_dtype", "the model is loaded in its dtype, kvjax.load"),
        ("device", "JAX chooses the device"),
        ("do_sample", "a temperature above 0 samples"),
        ("max_length", "use max_new_tokens, which counts only the new tokens"),
        ("max_tokens", "it is called max_new_tokens"),
        ("num_return_sequences", "it is called n"),
        ("sampling", "give its fields by name"),
        ("temprature", "its fields are max_new_tokens, temperature"),
    ],
)
def test_names_from_elsewhere_get_a_hint(engine, name, hint):
    for call in (lambda: generate(engine, "x", **{name: 1}), lambda: Sampling(**{name: 1})):
        with pytest.raises(TypeError, match=f"there is no '{name}' in kvjax.Sampling: {hint}"):
            call()


def test_a_positional_sampling_gets_a_hint(engine):
    with pytest.raises(TypeError, match=r"Sampling\(.* came third: give its fields by name"):
        generate(engine, "x", Sampling(temperature=0.5))
    with pytest.raises(TypeError, match="'top:8' came third: name every other argument"):
        generate(engine, "x", "top:8")


def test_stream_takes_a_function(engine):
    with pytest.raises(ValueError, match=r"stream must be a function, as in stream=lambda number, text: .*, got True"):
        generate(engine, "x", stream=True)


def test_sampling_is_copied_as_before():
    sampling = Sampling(5, temperature=0.5, n=2)
    assert pickle.loads(pickle.dumps(sampling)) == sampling == dataclasses.replace(sampling)
    assert dataclasses.replace(sampling, seed=3).seed == 3


def test_an_engine_and_score_say_what_they_take(engine):
    with pytest.raises(ValueError, match=r"an engine takes token ids, got text, 'One': engine.model.tokenizer\(text\)"):
        engine.prefill(["One"])
    with pytest.raises(ValueError, match=r"got 5: one prompt among several is \[ids\]"):
        engine.prefill([5, 6])
    encoding = engine.model.tokenizer("One")
    with pytest.raises(ValueError, match=r"got a mapping with 'input_ids', .*: give its \['input_ids'\]"):
        engine.prefill([encoding])
    with pytest.raises(ValueError, match=r"a list of prompts is needed, got .*: .* of what a tokenizer returned give its \['input_ids'\]"):
        engine.prefill(encoding)
    with pytest.raises(ValueError, match=r"one continuation and a list of 2 prompts: .*\[continuation\] \* 2"):
        score(engine, ["a", "b"], " 42")
    with pytest.raises(ValueError, match=r"one continuation and a list of 3 prompts"):
        score(engine, ["a", "b", "c"], " 42")
    with pytest.raises(ValueError, match=r"one prompt and a list of 2 continuations: .*\[prompt\] \* 2"):
        score(engine, "a", [" 42", " 43"])
    assert score(engine, [], []) == []
    assert np.isfinite(score(engine, engine.model.tokenizer("a"), [5, 6]).logprob)


def test_ids_are_looked_at_once():
    """A prompt may have a million ids: who has looked at them says so by their type, and nobody looks again."""
    given = np.array([3, 1, 2])
    ids = encode(None, given)
    given[0] = 9  # what a caller changes later is not in them
    assert (list(ids), ids[1:], ids[0], len(ids)) == ([3, 1, 2], [1, 2], 3, 3)
    assert encode(None, ids) is ids
    assert token_ids(ids, 4) is ids
    part = ids[1:]
    assert part.array.base is not None, "a slice is a view"
    assert token_ids(part, 3) is part, "a slice may be inside a vocabulary that the whole is not in"
    with pytest.raises(ValueError, match="token 3 is outside the vocabulary of 3"):
        token_ids(ids, 3)
    with pytest.raises(ValueError, match="assignment destination is read-only"):
        ids.array[0] = 0
    assert pickle.loads(pickle.dumps(ids)) == ids
    assert {ids: 1}[encode(None, (3, 1, 2))] == 1
    assert encode(None, range(3)) == encode(None, jnp.arange(3)) == encode(None, [np.int64(0), 1, np.int32(2)]) == [0, 1, 2]


@pytest.mark.parametrize("number", [2**31, 2**63, -(2**63) - 1, 10**30])
def test_numbers_of_any_size_are_outside_the_vocabulary(number):
    for prompt in ([number], [1, number, -1], (number,)):
        outside = min(prompt) if min(prompt) < 0 else number
        with pytest.raises(ValueError, match=f"token {outside} is outside the vocabulary of 97"):
            token_ids(encode(None, prompt), 97)
        with pytest.raises(ValueError, match=f"token {outside} is outside the vocabulary of 97"):
            token_ids(prompt, 97)


@pytest.mark.parametrize("wrong", [b"12", "12", [1.0], ["1"], [[1], [2]], [[1], [2, 3]], np.ones((2, 2), int), np.ones(2), {1}, iter([1])])
def test_what_is_no_row_of_whole_numbers_is_no_token_ids(wrong):
    assert TokenIds.read(wrong) is None


@pytest.mark.parametrize("value", ["False", 1, None, np.True_])
def test_parse_special_is_true_or_false(value):
    """Whatever counts as true would let those who write messages end them."""
    with pytest.raises(ValueError, match="parse_special must be True or False, got"):
        encode(None, [1, 2], parse_special=value)


def test_bytes_are_no_ids():
    for given in (b"ab", bytearray(b"ab"), memoryview(b"ab")):
        assert TokenIds.read(given) is None


@pytest.mark.parametrize("ids", [5, np.array(5), "text", None])
def test_input_ids_are_a_list(ids):
    with pytest.raises(ValueError, match="the input_ids of a prompt must be a list of token ids, got"):
        encode(None, {"input_ids": ids})
