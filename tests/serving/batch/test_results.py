"""Answers: both output formats, errors in each, and the summary's arithmetic."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvjax.engine.missed import Missed
from kvjax.scheduler.request import Completion
from kvjax.scheduler.rounds import Rounds
from kvjax.serving.batch.records import CHAT, COMPLETIONS, parse
from kvjax.serving.batch.results import Result, Summary, answered, refused

COMPLETION = Completion(
    text="be",
    token_ids=(7, 8, 0),
    logprobs=(-0.5, -1.25, -2.0),
    finish_reason="stop",
    prompt_tokens=5,
    blocks_per_step=2.5,
    keys_per_step=37.0,
)


class Letters:
    """A tokenizer of sorts: token 7 is "h"."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + token) for token in ids)


def answer(line, completion=COMPLETION, **changes):
    return answered(parse(line, 3), dataclasses.replace(completion, **changes), model="tiny", tokenizer=Letters())


def openai(endpoint, **body):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": "x"}
    return {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "asked-for", **prompt, **body}}


def test_a_plain_answer():
    result = answer({"id": "a", "prompt": "x"})
    assert result.output == {
        "id": "a",
        "text": "be",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "generated_tokens": 3,
        "blocks_per_step": 2.5,
        "keys_per_step": 37.0,
        "error": None,
    }
    assert (result.line, result.failed, result.prompt_tokens, result.generated_tokens) == (3, False, 5, 3)


def test_log_probabilities_come_with_their_tokens():
    output = answer({"id": "a", "prompt": "x", "logprobs": True}).output
    assert output["token_ids"] == [7, 8, 0]
    assert output["logprobs"] == [-0.5, -1.25, -2.0]


def test_a_chat_answer_is_a_line_of_openais_output_file():
    output = answer(openai(CHAT, logprobs=True)).output
    assert output["custom_id"] == "a"
    assert output["error"] is None
    assert output["id"].startswith("batch_req_")
    assert output["response"]["status_code"] == 200
    assert output["response"]["request_id"]
    body = output["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert body["kvjax"] == {"blocks_per_step": 2.5, "keys_per_step": 37.0}
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert choice["message"] == {"role": "assistant", "content": "be", "refusal": None}
    tokens = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert tokens == [("h", -0.5), ("i", -1.25), ("a", -2.0)]


def test_a_completions_answer():
    body = answer(openai(COMPLETIONS, logprobs=0)).output["response"]["body"]
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert choice["text"] == "be"
    assert choice["logprobs"]["tokens"] == ["h", "i", "a"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -1.25, -2.0]
    assert answer(openai(COMPLETIONS)).output["response"]["body"]["choices"][0]["logprobs"] is None


def test_the_most_likely_tokens_stand_where_each_format_has_them():
    completion = dataclasses.replace(COMPLETION, top_logprobs=(((7, -0.5), (9, -1.0)), ((9, -0.25), (8, -1.25)), ((8, -0.1), (9, -0.2))))
    assert answer({"id": "a", "prompt": "x", "logprobs": True, "top_logprobs": 2}, completion).output["top_logprobs"] == [
        [[7, -0.5], [9, -1.0]],
        [[9, -0.25], [8, -1.25]],
        [[8, -0.1], [9, -0.2]],
    ]
    chat = answer(openai(CHAT, logprobs=True, top_logprobs=2), completion).output["response"]["body"]["choices"][0]["logprobs"]
    assert chat["content"][1] == {
        "token": "i",
        "logprob": -1.25,
        "bytes": [105],
        "top_logprobs": [{"token": "j", "logprob": -0.25, "bytes": [106]}, {"token": "i", "logprob": -1.25, "bytes": [105]}],
    }
    text = answer(openai(COMPLETIONS, logprobs=2), completion).output["response"]["body"]["choices"][0]["logprobs"]
    assert [list(top.items()) for top in text["top_logprobs"]] == [
        [("h", -0.5), ("j", -1.0)],
        [("j", -0.25), ("i", -1.25)],
        [("i", -0.1), ("j", -0.2), ("a", -2.0)],  # the chosen token too
    ]


def test_names_of_answers_stay_the_same():
    first, again = answer(openai(CHAT)).output, answer(openai(CHAT)).output
    other = answered(parse({**openai(CHAT), "custom_id": "b"}, 3), COMPLETION, model="tiny", tokenizer=None).output
    assert first["id"] == again["id"] != other["id"]
    assert first["response"]["body"]["id"] == again["response"]["body"]["id"] != other["response"]["body"]["id"]


def test_errors_stand_where_each_format_has_them():
    plain = refused(parse({"id": "a", "nonsense": 1}, 1), "too\n  long")
    assert plain.output == {"id": "a", "error": "too long"}
    assert plain.failed
    output = refused(parse(openai(CHAT), 1), "too long").output
    assert output["custom_id"] == "a"
    assert output["error"]["message"] == "too long"
    assert output["response"]["status_code"] == 400
    assert output["response"]["body"]["error"]["message"] == "too long"


def test_what_failed_in_the_engine_is_an_error_too():
    result = answer({"id": "a", "prompt": "x"}, Completion(error=RuntimeError("out of pages: 9 needed")))
    assert result.output == {"id": "a", "error": "out of pages: 9 needed"}
    broken = Completion(text="x", token_ids=(1,), logprobs=(float("nan"),))
    result = answer({"id": "a", "prompt": "x", "logprobs": True}, broken)
    assert "not finite" in result.output["error"]


@pytest.mark.parametrize("field", ["blocks_per_step", "keys_per_step"])
@pytest.mark.parametrize("line", [{"id": "a", "prompt": "x"}, openai(CHAT)])
def test_a_figure_that_is_not_finite_makes_an_error_of_its_record(line, field):
    result = answer(line, dataclasses.replace(COMPLETION, **{field: float("inf")}))
    assert result.failed
    assert "not finite" in json.dumps(result.output, allow_nan=False)


@pytest.mark.parametrize("line", [{"id": "é\u2028\x00", "prompt": "x"}, openai(CHAT), openai(COMPLETIONS, logprobs=0)])
def test_a_line_is_one_line_of_json(line):
    text = json.dumps(answer(line).output, ensure_ascii=False, allow_nan=False)
    assert "\n" not in text
    assert json.loads(text)


def test_the_summary_adds_up():
    summary = Summary(seconds=0.0)
    summary.add(Result(1, {}, False, 100, 5, 2.0, 20.0))
    summary.add(Result(2, {}, False, 50, 9, 5.0, 80.0), earlier=True)
    summary.add(Result(3, {}, False, 10, 1))
    summary.add(Result(4, {}, True))
    summary.seconds = 2.0
    assert (summary.records, summary.errors, summary.earlier) == (4, 1, 1)
    assert (summary.prompt_tokens, summary.generated_tokens) == (160, 15)
    assert summary.tokens_per_second == (5 + 1) / 2
    assert summary.all_tokens_per_second == (100 + 10 + 5 + 1) / 2
    # The first token of an answer takes no decode step: 4 steps and 8 steps.
    assert summary.blocks_per_step == pytest.approx((4 * 2.0 + 8 * 5.0) / 12)
    assert summary.keys_per_step == pytest.approx((4 * 20.0 + 8 * 80.0) / 12)
    text = str(summary)
    for said in ("4 (1 errors, 1 from an earlier run)", "160", "15", "3.0 generated", "58.0 with prompts", "4.0", "60"):
        assert said in text


def test_a_summary_without_steps_names_none():
    assert "per step" not in str(Summary(records=1, errors=1, seconds=1.0))


def test_tokens_that_were_found_are_in_no_rate_of_computed_ones():
    summary = Summary()
    summary.add(Result(1, {}, False, 1000, 50, found_tokens=900))
    summary.add(Result(2, {}, False, 5000, 50, found_tokens=4000), earlier=True)
    summary.seconds = 10.0
    assert (summary.found_tokens, summary.all_tokens_per_second) == (900, 15.0)
    assert "6,000 (900 of this run were found, not computed)" in str(summary)
    assert "5.0 generated, 15.0 with computed prompt tokens, 105.0 with all prompt tokens" in str(summary)


def test_rounds_say_how_often_each_draft_was_right():
    rounds = Rounds((1, 2, 0, 5)) + Rounds((2,))
    assert (rounds.count, rounds.tokens, bool(rounds), bool(Rounds())) == (10, 3 + 4 + 20, True, False)
    assert rounds.right == (7 / 10, 5 / 7, 5 / 5)
    assert Rounds((3, 0, 0)).right == (0.0,), "no round came to the second draft"
    assert str(Rounds()) == "no rounds"


def test_rounds_of_drafts_of_this_run_are_in_the_summary():
    found = answer({"id": "a", "prompt": "x"}, rounds=Rounds((1, 0, 0, 0, 0, 0, 0, 2)))
    assert "rounds" not in json.dumps(found.output), "the answer says the same without drafts"
    summary = Summary()
    summary.add(found, earlier=True)
    assert "drafts" not in str(summary)
    summary.add(found)
    assert "drafts of this run 17 tokens in 3 rounds, 5.7 in each; drafts right by place: 67%, 100%" in str(summary)


def test_a_pool_too_small_for_every_record_is_no_success():
    summary = Summary()
    summary.add(Result(1, {"error": "x"}, True, out_of_pages=True))
    summary.add(Result(2, {"error": "y"}, True))
    assert summary.nothing_fitted
    summary.add(Result(3, {}, False))
    assert not summary.nothing_fitted


def test_what_watched_steps_missed_stands_in_the_line_and_in_the_summary():
    missed = Missed(4, 0.25, 0.5, 1, 0, 1, 1, 0, 3, 60)
    plain, chat = (answer(record, missed=missed) for record in ({"id": "a", "prompt": "x"}, openai(CHAT)))
    assert plain.output["missed"] == chat.output["response"]["body"]["kvjax"]["missed"] == dataclasses.asdict(missed)
    assert "missed" not in answer({"id": "a", "prompt": "x"}).output
    summary = Summary()
    summary.add(plain, earlier=True)
    summary.add(chat)
    assert summary.missed == Missed(8, 0.25, 0.5, 1, 0, 2, 2, 0, 6, 120)
    assert "attention missed   25.00% on average of 8 samples, 50.00% at most (layer 1, KV head 0); 2 alarms: 2 heads read" in str(summary)
    assert "attention missed" not in str(Summary())
