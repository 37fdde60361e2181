"""Batch jobs, the server with OpenAI's client, and sessions on the real checkpoint say what `generate` says."""

import json
import re
import subprocess
import sys

import openai
import pytest
from real_checkpoint import CHATS, GREEDY_TOKENS, PROMPTS

from kvjax import Engine, SessionRuntime, generate

COMMAND = [sys.executable, "-m", "kvjax.serving.cli"]
POOL = ("--pages", "40", "--page-size", "32", "--prefill-chunk", "128", "--dtype", "float32", "--max-batch", "2")
START_SECONDS = 240


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, pages=64, page_size=32, prefill_chunk=128, batch_buckets=(2,))


@pytest.fixture(scope="module")
def answers(engine):
    """What greedy decoding answers to each chat."""
    return [generate(engine, [chat], temperature=0.0, max_new_tokens=GREEDY_TOKENS, slots=2)[0] for chat in CHATS]


@pytest.fixture(scope="module")
def server(gguf_file):
    """`kvjax serve` as a process; gives the address of its HTTP."""
    command = [*COMMAND, "serve", "--model", str(gguf_file), "--port", "0", "--http-port", "0", *POOL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            line = next(line for line in running.stderr if line.startswith("listening"))
            yield re.search(r"http://\S+", line)[0]
        finally:
            running.terminate()
            running.stderr.close()
            running.wait(START_SECONDS)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=START_SECONDS) as made:
        yield made


def greedy(client, chat, **more):
    name = next(iter(client.models.list())).id
    return client.chat.completions.create(model=name, messages=chat, temperature=0, max_tokens=GREEDY_TOKENS, **more)


def test_batch_jobs_answer_chats(gguf_file, answers, tmp_path):
    """A bad line among them is an error in its place."""
    body = {"temperature": 0, "max_tokens": GREEDY_TOKENS, "logprobs": True, "top_logprobs": 2}
    lines = [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body | {"messages": chat}})
        for number, chat in enumerate(CHATS)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines[:2], '{"custom_id": "bad", "body": {"messages": 7}}', *lines[2:], ""]))
    done = subprocess.run(
        [*COMMAND, "batch", str(source), "--out", str(out), "--model", str(gguf_file), *POOL], capture_output=True, text=True, check=False
    )
    found = {each["custom_id"]: each for each in map(json.loads, out.read_text().splitlines())}
    assert len(found) == len(CHATS) + 1, done.stderr
    assert "messages" in found["bad"]["error"]["message"]
    choices = [found[f"c{number}"]["response"]["body"]["choices"][0] for number in range(len(CHATS))]
    said = [choice["message"]["content"] for choice in choices]
    assert said == answers
    for choice in choices:
        for token in choice["logprobs"]["content"]:
            assert token["logprob"] == token["top_logprobs"][0]["logprob"] >= token["top_logprobs"][1]["logprob"]


def test_the_server_answers_chats(client, answers):
    for number in (0, 3):
        answer = greedy(client, CHATS[number])
        assert answer.choices[0].message.content == answers[number]
        assert 1 < answer.usage.completion_tokens <= GREEDY_TOKENS
    with pytest.raises(openai.BadRequestError, match="the server returns no log-probabilities"):
        greedy(client, CHATS[0], logprobs=True)


def test_the_server_streams(client, answers):
    pieces = [piece.choices[0].delta.content or "" for piece in greedy(client, CHATS[1], stream=True)]
    assert "".join(pieces) == answers[1]
    assert sum(map(bool, pieces)) > 1


def test_sessions_equal_whole_prompts(engine, golden):
    """Histories in pieces, and forks, go on as the whole prompt does."""
    ids, expected = golden["ids_6"].tolist(), golden["greedy_6"].tolist()[:8]
    other = golden["ids_0"].tolist()
    with SessionRuntime(engine, slots=2, capacity=4) as runtime, runtime.create(ids[:5]) as session:
        session.append(ids[5:12])
        with session.fork() as fork:
            session.append(ids[12:])
            fork.append(other)
            sampling = {"temperature": 0.0, "max_new_tokens": 8}
            assert list(session.generate(**sampling)) == expected, PROMPTS[6]
            changed = list(fork.generate(**sampling))
            assert changed == list(generate(engine, [ids[:12] + other], details=True, **sampling)[0].token_ids) != expected
            session.append(other)
            whole = [ids + expected + other]
            assert list(session.generate(**sampling)) == list(generate(engine, whole, details=True, **sampling)[0].token_ids)
