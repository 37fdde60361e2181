"""Batch jobs on a real engine: answers equal those of `kvjax.generate`, one by one, whatever the company, the order,
and the crashes."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling
from kvjax.evaluation.oracle_blocks import OracleBlocks
from kvjax.generation import generate, run
from kvjax.models import CausalLM, init_params
from kvjax.scheduler.request import Request
from kvjax.serving.batch import file_jobs
from kvjax.serving.batch import job as batch
from kvjax.serving.batch.files import Reading
from kvjax.serving.batch.job import run_batch, run_file
from kvjax.serving.batch.records import Defaults, parse, read
from kvjax.serving.batch.setup import Setup, pages_of_job
from kvjax.text.tokenization import chat_ids

pytestmark = pytest.mark.bits

SLOTS = 3
RECORDS = [
    {"id": "short", "prompt": "amber basil"},
    {"id": "long", "prompt": "coral delta ember " * 18, "max_new_tokens": 9, "logprobs": True},
    {"id": "drawn", "prompt": "falcon " * 30, "temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 5, "max_new_tokens": 20},
    {"id": "ids", "prompt": [5, 6, 7, 8] * 12, "max_new_tokens": 17, "stop_token_ids": []},
    {"id": "one", "prompt": "garnet", "max_new_tokens": 1},
    {"id": "chat", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "quartz raven"}]},
    {"custom_id": "o-chat", "body": {"messages": [{"role": "user", "content": "umber"}], "max_tokens": 6, "logprobs": True}},
    {"custom_id": "o-text", "url": "/v1/completions", "method": "POST", "body": {"prompt": "velvet", "max_tokens": 6, "temperature": 0}},
]
DEFAULTS = Defaults(max_new_tokens=12)


def answers(engine, records=RECORDS, **options):
    options = {"slots": SLOTS, "defaults": DEFAULTS} | options
    found = list(run_batch(records, engine, **options))
    return {answer.get("id") if "custom_id" not in answer else answer["custom_id"]: answer for answer in found}


def alone(engine, record):
    """What the token loop makes of one record by itself; nothing of the code under test but the seed that an id
    gives."""
    fields = {key: value for key, value in (record.get("body") or record).items() if key not in ("id", "messages", "prompt", "max_tokens")}
    if "messages" in (record.get("body") or record):
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in (record.get("body") or record)["messages"]) + "<assistant>"
    else:
        text = (record.get("body") or record)["prompt"]
    limit = (record.get("body") or record).get("max_tokens", DEFAULTS.max_new_tokens)
    if "body" in record:
        fields.setdefault("temperature", 1.0)
    if fields.get("temperature") and "seed" not in fields:
        fields["seed"] = parse(record, 1).sampling["seed"]
    prompt = text if isinstance(text, str) else tuple(text)
    ((_, completion),) = run(engine, [Request(prompt, Sampling(**({"max_new_tokens": limit} | fields)))], slots=SLOTS)
    return completion


@pytest.fixture(scope="module")
def expected(engine):
    return {record.get("id", record.get("custom_id")): alone(engine, record) for record in RECORDS}


def test_answers_equal_those_of_each_record_alone(engine, expected):
    found = answers(engine)
    assert found.keys() == expected.keys()
    texts = {completion.text for completion in expected.values()}
    assert len(texts) > 5, "the model says too little for this test to mean anything"
    for name in ("short", "long", "drawn", "ids", "one", "chat"):
        answer, completion = found[name], expected[name]
        assert answer["text"] == completion.text, name
        assert answer["finish_reason"] == completion.finish_reason
        assert answer["prompt_tokens"] == completion.prompt_tokens
        assert answer["generated_tokens"] == len(completion.token_ids)
        assert (answer["blocks_per_step"], answer["keys_per_step"]) == (completion.blocks_per_step, completion.keys_per_step)
        assert answer["error"] is None
    assert found["long"]["token_ids"] == list(expected["long"].token_ids)
    assert found["long"]["logprobs"] == list(expected["long"].logprobs), "the same bits as alone"
    chat, text = found["o-chat"]["response"]["body"], found["o-text"]["response"]["body"]
    assert chat["choices"][0]["message"]["content"] == expected["o-chat"].text
    assert [entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]] == list(expected["o-chat"].logprobs)
    assert chat["usage"]["prompt_tokens"] == expected["o-chat"].prompt_tokens
    assert chat["model"] == "tiny"
    assert text["choices"][0]["text"] == expected["o-text"].text


@pytest.mark.long
def test_several_steps_per_launch_change_no_answer(engine):
    assert answers(engine, steps_per_launch=4) == answers(engine)


@pytest.mark.parametrize("wrong", [3, None])
def test_what_is_no_list_of_records_is_named_with_the_remedy(engine, wrong):
    with pytest.raises(TypeError, match=rf'run_batch takes a list .* as in \[{{"id": "a", "prompt": "Once"}}\], got {wrong}$'):
        run_batch(wrong, engine)


def test_a_text_is_what_generate_says(engine):
    found = answers(engine)
    for record in RECORDS[:2]:
        assert found[record["id"]]["text"] == generate(engine, record["prompt"], max_new_tokens=record.get("max_new_tokens", 12))


def test_order_of_the_input_changes_nothing(engine):
    forward, backward = answers(engine), answers(engine, RECORDS[::-1])
    for record in RECORDS:
        name = record.get("id")
        if name is not None:
            assert forward[name] == backward[name]


def test_lines_of_text_do_as_well(engine):
    record = {"id": "a", "prompt": "amber", "max_new_tokens": 3}
    assert list(run_batch([json.dumps(record)], engine)) == list(run_batch([record], engine))


def test_the_policy_decides_what_is_read(engine):
    record = [RECORDS[1]]
    window, dense = answers(engine, record)["long"], answers(engine, record, policy="dense")["long"]
    assert window["keys_per_step"] == 8 + 24
    # Prompt of n tokens: the first step reads n + 1 keys, and there are 8 steps for 9 tokens.
    assert dense["keys_per_step"] == dense["prompt_tokens"] + (1 + 8) / 2
    assert window["logprobs"] != dense["logprobs"]


def test_prompts_run_longest_first(engine, monkeypatch):
    asked = []

    def spy(engine, requests, **options):
        def noted():
            for request in requests:
                asked.append(request.id)
                yield request

        return real(engine, noted(), **options)

    real = batch.run
    monkeypatch.setattr(batch, "run", spy)
    records = [{"id": str(size), "prompt": "amber " * size, "max_new_tokens": 1} for size in (3, 30, 10, 20)]
    answers(engine, records)
    assert asked == [2, 4, 3, 1]


def test_bad_records_get_errors_and_the_job_goes_on(engine, expected):
    bad = [
        ("nonsense", {"id": "nonsense", "prompt": "x", "colour": "red"}, "'colour'"),
        ("range", {"id": "range", "prompt": "x", "temperature": -1}, "temperature"),
        ("vocabulary", {"id": "vocabulary", "prompt": [1, 480]}, "480"),
        ("positions", {"id": "positions", "prompt": [1] * 500, "max_new_tokens": 100}, "512"),
        ("o-bad", {"custom_id": "o-bad", "body": {"prompt": "x", "best_of": 3}}, "body.best_of"),
        ("o-n", {"custom_id": "o-n", "body": {"prompt": "x", "n": 300}}, "n must be at most 128, got 300"),
        ("top", {"id": "top", "prompt": "x", "top_logprobs": 3}, "top_logprobs 3 needs logprobs"),
    ]
    mixed = [RECORDS[0], *(record for _, record, _ in bad), RECORDS[1]]
    found = list(run_batch(mixed, engine, slots=SLOTS, defaults=DEFAULTS))
    assert len(found) == len(mixed)
    for name, _, said in bad:
        (answer,) = [a for a in found if name in (a.get("id"), a.get("custom_id")) and a.get("error")]
        error = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
        assert said in error
    good = {answer["id"]: answer["text"] for answer in found if not answer.get("error")}
    assert good == {name: expected[name].text for name in ("short", "long")}


def test_a_record_larger_than_the_pool_is_an_error_of_its_own(model, expected):
    small = Engine(model, "window:8+24", pages=8, page_size=16, prefill_chunk=64, batch_buckets=(3,))
    records = [RECORDS[0], {"id": "large", "prompt": [1] * 200}, RECORDS[4]]
    found = answers(small, records)
    assert "out of pages" in found["large"]["error"]
    assert found["short"]["text"] == expected["short"].text
    assert found["one"]["text"] == expected["one"].text
    assert small.allocators["full"].free == 8


def test_messages_need_a_chat_template(engine, model, monkeypatch):
    record = [{"id": "chat", "messages": [{"role": "user", "content": "x"}]}, RECORDS[0]]
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    found = answers(engine, record)
    assert "no chat template" in found["chat"]["error"]
    assert "chat_template.jinja" in found["chat"]["error"]
    assert found["short"]["error"] is None
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ raise_exception('no system messages here') }}")
    assert "no system messages here" in answers(engine, record)["chat"]["error"]


def test_what_a_tokenizer_raises_concerns_its_record_alone(engine, model, monkeypatch):
    said = [{"role": "user", "content": "x"}]
    records = [{"id": "chat", "messages": said}, RECORDS[0]]
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}{{ '\\ud800' }}")
    found = answers(engine, records)
    assert "half of a surrogate pair" in found["chat"]["error"]
    assert found["short"]["error"] is None
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}")
    monkeypatch.setattr(model.tokenizer, "model_max_length", "x")
    found = answers(engine, records)
    assert "the tokenizer cannot read this text: '>' not supported between" in found["chat"]["error"]
    assert "the tokenizer cannot read this text" in found["short"]["error"]


class Panic(BaseException):
    """As Rust's PanicException, no Exception."""


def test_a_special_token_that_cannot_be_read_as_text_concerns_its_record_alone(engine, model, monkeypatch):
    """Nothing but words of a list has a token here, and a special token's text is no word."""
    words = Tokenizer(WordLevel({"user": 0, "hello": 1, "xxxxx": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    own = PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    monkeypatch.setattr(engine, "model", dataclasses.replace(model, tokenizer=own))
    said = [{"id": each, "messages": [{"role": "user", "content": each}], "max_new_tokens": 1} for each in ("hello <|end|>", "hello")]
    found = answers(engine, said)
    assert "the tokenizer cannot read this text: WordLevel error" in found["hello <|end|>"]["error"]
    assert found["hello"]["error"] is None


def test_whatever_preparing_a_record_raises_concerns_it_alone(engine, model, monkeypatch):
    """A number that Python refuses to write, an array that has no truth, and a tokenizer whose template panics."""
    odd = {"id": 10**5000, "prompt": "hello"}, {"custom_id": "tools", "body": {"prompt": "hello", "tools": np.array([1, 2])}}
    found = answers(engine, [*odd, RECORDS[0]])
    assert "the record cannot be read: ValueError: Exceeds the limit" in found[10**5000]["error"]
    assert "the record cannot be read: ValueError: operands could not be broadcast" in found["tools"]["error"]["message"]
    assert found["short"]["error"] is None

    class Raises(type(model.tokenizer)):
        def apply_chat_template(self, *args, **kwargs):
            raise Panic("no template")

    monkeypatch.setattr(model.tokenizer, "__class__", Raises)
    found = answers(engine, [{"id": "chat", "messages": [{"role": "user", "content": "x"}]}, RECORDS[0]])
    assert found["chat"]["error"] == "the record cannot be prepared: Panic: no template"
    assert found["short"]["error"] is None


def test_a_tokenizer_that_panics_concerns_its_record_alone(engine, model, monkeypatch):
    """Encoding a prompt, writing an answer, and writing the text of one token."""

    class Panics(type(model.tokenizer)):
        def __call__(self, text, *args, **kwargs):
            if "amber amber" in text:
                raise Panic("retry-limit-in-match over")
            return super().__call__(text, *args, **kwargs)

        def decode(self, ids, *args, **kwargs):
            if self.word in ids:
                raise Panic("range end index 1 out of range")
            return super().decode(ids, *args, **kwargs)

    expected = answers(engine, RECORDS)
    monkeypatch.setattr(model.tokenizer, "__class__", Panics)
    monkeypatch.setattr(model.tokenizer, "word", None, raising=False)
    found = answers(engine, [*RECORDS, {"id": "bad", "prompt": "amber amber"}])
    assert "the tokenizer cannot read this text: retry-limit-in-match over" in found.pop("bad")["error"]
    assert without_times(found) == without_times(expected)
    record = {"id": "it", "prompt": "amber basil", "max_new_tokens": 4, "ignore_eos": True, "logprobs": True}
    monkeypatch.setattr(model.tokenizer, "word", answers(engine, [record])["it"]["token_ids"][1])
    for stop in ({}, {"stop": ["never there"]}):
        found = answers(engine, [record | stop])
        assert "the tokenizer cannot write the text of these tokens: range end index" in found["it"]["error"]
    assert engine.allocators["full"].free == engine.allocators["full"].total


def test_a_stop_string_before_half_a_character_is_the_reason_of_the_end(engine, model):
    """The last token ends inside a character, so its text comes only when the answer is over."""
    for number in range(5, 13):
        ids = generate(engine, [number], max_new_tokens=40, ignore_eos=True, slots=SLOTS, details=True).token_ids
        texts = [model.tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(1, 41)]
        end = next(count for count, text in enumerate(texts, 1) if text.endswith("\ufffd"))
        record = {"id": "it", "prompt": [number], "max_new_tokens": end, "ignore_eos": True, "stop": "\ufffd"}
        found = answers(engine, [record])["it"]
        assert (found["text"], found["finish_reason"]) == (texts[end - 1].removesuffix("\ufffd"), "stop")


def test_options_reach_the_chat_template(engine, model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ messages[0].content }}{% if loud %} coral{% endif %}")
    messages = [{"role": "user", "content": "amber basil"}]
    records = [
        {"id": "quiet", "messages": messages},
        {"id": "loud", "messages": messages, "chat_template_kwargs": {"loud": True}},
        {"id": "as text", "prompt": "amber basil coral"},
        {"id": "no", "messages": messages, "chat_template_kwargs": {"tokenize": True}},
    ]
    found = answers(engine, records)
    assert found["loud"]["text"] == found["as text"]["text"] != found["quiet"]["text"]
    assert "'tokenize' is not one" in found["no"]["error"]


@pytest.mark.long
def test_several_samples_are_choices_of_one_answer(engine):
    settings = {"max_new_tokens": 9, "temperature": 1.0, "logprobs": True, "top_logprobs": 2, "repetition_penalty": 1.3}
    sampled = {"prompt": "amber basil", "n": 4, "seed": 7} | settings
    body = {"messages": [{"role": "user", "content": "umber"}], "n": 2, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    text = {"prompt": "velvet", "n": 2, "max_tokens": 6, "logprobs": 2}
    found = answers(engine, [{"id": "many", **sampled}, {"custom_id": "chat", "body": body}, {"custom_id": "text", "body": text}])
    alone = [next(run(engine, [Request("amber basil", Sampling(seed=7 + index, **settings))], slots=SLOTS))[1] for index in range(4)]
    many = found["many"]
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in many["choices"]] == [completion.text for completion in alone]
    assert [choice["logprobs"] for choice in many["choices"]] == [list(completion.logprobs) for completion in alone]
    assert many["choices"][1]["top_logprobs"][0] == [list(pair) for pair in alone[1].top_logprobs[0]]
    assert many["generated_tokens"] == sum(len(completion.token_ids) for completion in alone)
    assert many["keys_per_step"] == pytest.approx(
        sum(completion.keys_per_step * (len(completion.token_ids) - 1) for completion in alone)
        / sum(len(completion.token_ids) - 1 for completion in alone)
    )
    for name in ("chat", "text"):
        answer = found[name]["response"]["body"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 12
    places = found["chat"]["response"]["body"]["choices"][1]["logprobs"]["content"]
    assert all(place["top_logprobs"][0]["logprob"] >= place["logprob"] for place in places)
    assert all(len(place["top_logprobs"]) == 2 for place in places)
    logprobs = found["text"]["response"]["body"]["choices"][0]["logprobs"]
    assert all(logprobs["tokens"][place] in top for place, top in enumerate(logprobs["top_logprobs"]))


def test_the_chat_template_writes_the_special_tokens_itself():
    class Beginning:
        chat_template = "there is one"

        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
            assert (tokenize, add_generation_prompt) == (False, True)
            return "<s>" + "".join(message["content"] for message in messages)

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": ([1] if add_special_tokens else []) + [ord(letter) for letter in text]}

    assert chat_ids([{"role": "user", "content": "ab"}], Beginning(), {}) == tuple(b"<s>ab")
    with pytest.raises(ValueError, match="no tokenizer"):
        chat_ids([{"role": "user", "content": "ab"}], None, {})


def test_equal_prompts_under_different_ids_are_different_samples(engine):
    records = [{"id": i, "prompt": "amber basil", "temperature": 1.0} for i in range(6)]
    first, again = answers(engine, records), answers(engine, records[::-1])
    assert len({answer["text"] for answer in first.values()}) > 3
    assert first == again


# The file job


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(outputs):
    return json.loads(json.dumps(outputs, sort_keys=True), object_hook=lambda fields: {k: v for k, v in fields.items() if k != "created"})


def file_job(tmp_path, engine, **options):
    return run_file(tmp_path / "in.jsonl", tmp_path / "out.jsonl", engine, **({"slots": SLOTS, "defaults": DEFAULTS} | options))


@pytest.fixture
def job(tmp_path):
    write(tmp_path / "in.jsonl", [*RECORDS, {"id": "bad"}])
    return tmp_path


@pytest.fixture
def seen(monkeypatch):
    """The input lines that the engine was asked for."""
    asked, real = [], batch.run

    def spy(engine, requests, **options):
        for request, completion in real(engine, requests, **options):
            asked.append(request.id)
            yield request, completion

    monkeypatch.setattr(batch, "run", spy)
    return asked


def interrupt_after(monkeypatch, count):
    """Die when `count` results are in the file, as a killed job does."""
    real = file_jobs.Partial.append
    left = [count]

    def append(self, result):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, result)

    monkeypatch.setattr(file_jobs.Partial, "append", append)


def test_a_file_job_answers_in_input_order(job, engine):
    summary = file_job(job, engine)
    outputs = lines(job / "out.jsonl")
    by_name = answers(engine)
    expected = [by_name[record.get("id", record.get("custom_id"))] for record in RECORDS]
    assert without_times(outputs[:-1]) == without_times(expected)
    assert outputs[-1] == {"id": "bad", "error": "prompt or messages is missing"}
    assert sorted(path.name for path in job.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert (summary.records, summary.errors, summary.earlier) == (len(RECORDS) + 1, 1, 0)
    plain = [output for output in outputs if "generated_tokens" in output]
    usages = [output["response"]["body"]["usage"] for output in outputs if "response" in output]
    assert summary.generated_tokens == sum(o["generated_tokens"] for o in plain) + sum(u["completion_tokens"] for u in usages)
    assert summary.prompt_tokens == sum(o["prompt_tokens"] for o in plain) + sum(u["prompt_tokens"] for u in usages)
    assert summary.tokens_per_second == pytest.approx(summary.generated_tokens / summary.seconds)
    assert 0 < summary.keys_per_step <= 32


def test_ignored_fields_and_first_errors_are_in_the_summary(tmp_path, engine, monkeypatch):
    records = [{"id": n, "prompt": "amber", "max_new_tokens": 1, "user": "me"} for n in range(4)] + [
        {"id": 10 + n, "colour": n} for n in range(5)
    ]
    write(tmp_path / "in.jsonl", records)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            file_job(tmp_path, engine)
    summary = file_job(tmp_path, engine)
    assert summary.ignored == {"user": 4}
    assert summary.errors == 5
    assert [line for line, _ in summary.first_errors] == [5, 6, 7], "also those that an earlier run had"
    assert "'colour'" in summary.first_errors[0][1]
    assert "ignored fields     user (4 records)" in str(summary)


def test_a_pool_is_as_large_as_the_longest_records_together(tmp_path, model):
    records = [{"id": n, "prompt": [5] * 20, "max_new_tokens": 13} for n in range(50)]  # 32 tokens are written: 2 pages
    records += [{"id": "bad"}, {"id": "long", "prompt": [5] * 500, "max_new_tokens": 100}, {"id": "wrong", "prompt": "x", "top_k": -2}]
    source = write(tmp_path / "in.jsonl", records)

    def pages(slots):
        return pages_of_job(Reading(source).records(DEFAULTS), model, slots, 16)

    assert (pages(1), pages(8), pages(64)) == (2, 16, 100)
    write(source, [*records, {"id": "n", "prompt": [5] * 40, "max_new_tokens": 9, "n": 3}])
    assert pages(4) == 3 * 3 + 2 + 1
    write(source, [{"id": "bad"}])
    assert pages(8) == 1


def test_a_pool_has_room_for_answers_that_are_clipped(tmp_path, model):
    """By default the pool is as large as the records need. A clipped answer takes the rest of the model's positions."""
    clipped = {"id": "clipped", "prompt": [5] * 500, "max_new_tokens": 2**31 - 1, "clip": True, "ignore_eos": True}
    records = [{"id": "small", "prompt": "amber", "max_new_tokens": 2}, clipped]
    setup = Setup("tiny", policy="window:8+24", slots=1, page_size=16, prefill_chunk=64)
    setup = setup.sized(model, read(records, DEFAULTS))
    assert setup.pages == 512 // 16
    found = answers(setup.engines(model), records, slots=1)
    assert {name: answer["error"] for name, answer in found.items()} == {"small": None, "clipped": None}
    assert found["clipped"]["generated_tokens"] == 13, "the positions behind the prompt, and one token that needs none"
    too_long = clipped | {"prompt": [5] * 513}
    assert pages_of_job(read([records[0], too_long], DEFAULTS), model, 1, 16) == 1, "no clip makes room for a prompt"


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_an_interrupted_job_does_only_what_is_missing(job, engine, monkeypatch, seen, count):
    file_job(job, engine)
    whole = lines(job / "out.jsonl")
    (job / "out.jsonl").unlink()
    with monkeypatch.context() as patch:
        interrupt_after(patch, count)
        with pytest.raises(KeyboardInterrupt):
            file_job(job, engine)
    assert not (job / "out.jsonl").exists()
    partial = job / "out.jsonl.partial"
    done = [entry["line"] for entry in lines(partial)[1:]]
    assert len(done) == count
    with open(partial, "ab") as file:
        file.write(b'{"line": 2, "counts": [fal')
    seen.clear()
    summary = file_job(job, engine)
    assert without_times(lines(job / "out.jsonl")) == without_times(whole)
    # Line 9 is wrong as it stands, so no engine is asked for it.
    assert sorted({*seen, 9} - set(done)) == sorted({*range(1, 10)} - set(done))
    assert len(seen) == len(set(seen) - set(done))
    assert summary.earlier == count
    assert summary.records == len(whole)
    assert not partial.exists()


def test_a_job_is_not_continued_as_another(job, engine, model, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            file_job(job, engine)
    kept = (job / "out.jsonl.partial").read_bytes()

    def refused(said, engine=engine, **options):
        with pytest.raises(ValueError, match=said):
            file_job(job, engine, **options)
        assert (job / "out.jsonl.partial").read_bytes() == kept

    refused(r"with --policy window:8\+24, and this run has --policy dense: run it as", policy="dense")
    refused("with --max-new-tokens 12, and this run has --max-new-tokens 13", defaults=Defaults(max_new_tokens=13))
    refused("with --max-batch 3, and this run has --max-batch 1: .*--continue-anyway", slots=1)
    refused("with no --temperature, and this run has --temperature 0.5", defaults=dataclasses.replace(DEFAULTS, temperature=0.5))
    refused("--seed", defaults=dataclasses.replace(DEFAULTS, seed=1))
    listing = OracleBlocks(4, key_block=16)
    refused(
        "with --prefill dense, and this run has --prefill OracleBlocks",
        Engine(model, "window:8+24", pages=8, page_size=16, prefill=listing),
    )
    refused("--page-size 16, and this run has --page-size 32", Engine(model, "window:8+24", pages=8, page_size=32, prefill_chunk=64))
    refused("--prefill-chunk", Engine(model, "window:8+24", pages=8, page_size=16, prefill_chunk=32))
    other = CausalLM(model.decoder, init_params(model.config, jax.random.key(4), std=0.6), model.tokenizer, "tiny")
    refused("with --model tiny, which has changed since", Engine(other, "window:8+24", pages=8, page_size=16, prefill_chunk=64))
    monkeypatch.setattr(model.tokenizer, "chat_template", model.tokenizer.chat_template + " ")
    refused("begun with another tokenizer")
    monkeypatch.undo()
    write(job / "in.jsonl", RECORDS)
    refused("with an input whose lines have changed since")
    write(job / "in.jsonl", [*RECORDS, {"id": "bad"}])
    file_job(job, engine)
    assert len(lines(job / "out.jsonl")) == len(RECORDS) + 1


def test_an_output_that_exists_is_kept_unless_told(job, engine):
    out = job / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ValueError, match="--overwrite"):
        file_job(job, engine)
    assert out.read_text() == "mine\n"
    assert not (job / "out.jsonl.partial").exists()
    file_job(job, engine, overwrite=True)
    assert len(lines(out)) == len(RECORDS) + 1


def test_paths_are_checked_first(tmp_path, engine):
    source = write(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}])
    with pytest.raises(ValueError, match=r"no input file .*none\.jsonl"):
        run_file(tmp_path / "none.jsonl", tmp_path / "out.jsonl", engine)
    with pytest.raises(ValueError, match="no folder"):
        run_file(source, tmp_path / "none" / "out.jsonl", engine)
    with pytest.raises(ValueError, match="is a folder"):
        run_file(source, tmp_path, engine, overwrite=True)
    with pytest.raises(ValueError, match="is the input"):
        run_file(source, source, engine, overwrite=True)
    with pytest.raises(ValueError, match="is empty"):
        run_file(write(tmp_path / "empty.jsonl", []), tmp_path / "out.jsonl", engine)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no records"):
        run_file(tmp_path / "empty.jsonl", tmp_path / "out.jsonl", engine)


def test_progress_shows_rates(job, engine):
    text = io.StringIO()
    file_job(job, engine, console=Console(file=text, force_terminal=True, width=120))
    assert "9/9" in text.getvalue()
    assert "generated tokens/s" in text.getvalue()
    assert "1 errors" in text.getvalue()


def test_progress_in_a_log_is_a_line_now_and_then(job, engine, monkeypatch):
    monkeypatch.setattr("kvjax.serving.progress.LOG_SECONDS", 0.0)
    text = io.StringIO()
    file_job(job, engine, console=Console(file=text, width=120))
    last = text.getvalue().splitlines()[-1]
    assert last.startswith("9/9 records, ")
    assert "\x1b" not in text.getvalue()


def test_progress_is_whole_on_a_narrow_terminal(job, engine):
    """Rates and times are not cut short; the bar gives way."""
    text = io.StringIO()
    file_job(job, engine, console=Console(file=text, force_terminal=True, width=80))
    assert "tokens/s, 1 errors" in text.getvalue()
    assert "…" not in text.getvalue()


def test_a_model_is_no_engine(model):
    with pytest.raises(TypeError, match="needs an engine, or a list of replicas, got CausalLM"):
        run_batch([{"prompt": "a"}], model)
