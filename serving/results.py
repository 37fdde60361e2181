"""What a batch job answers: one output line per record, in the record's own format, and the summary of a job."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from typing import TYPE_CHECKING, Any

from kvjax.serving.records import CHAT, Record
from pallas_kernels.results import finite

if TYPE_CHECKING:
    from kvjax.generation import Completion

INVALID = "invalid_request_error"


@dataclasses.dataclass(frozen=True)
class Result:
    """A record's answer. output: the line, ready for JSON. Counts in tokens; blocks and keys per step as `Completion` has them."""

    line: int
    output: dict[str, Any]
    failed: bool
    prompt_tokens: int = 0
    generated_tokens: int = 0
    blocks_per_step: float = 0.0
    keys_per_step: float = 0.0


def answered(record: Record, completion: Completion, *, model: str, tokenizer: Any) -> Result:
    """The result of a completion; one that carries an error, or log-probabilities that are not finite, becomes `refused`."""
    if completion.error is not None:
        return refused(record, str(completion.error))
    output = _plain(record, completion) if record.endpoint is None else _openai(record, completion, model, tokenizer)
    if finite(output) is not output:
        return refused(record, "the model gave log-probabilities that are not finite; try --dtype float32")
    return Result(
        line=record.line,
        output=output,
        failed=False,
        prompt_tokens=completion.prompt_tokens,
        generated_tokens=len(completion.token_ids),
        blocks_per_step=completion.blocks_per_step,
        keys_per_step=completion.keys_per_step,
    )


def refused(record: Record, error: str) -> Result:
    """The result of a record that cannot be answered.

    In OpenAI's format the error stands both where their output files have it (a response with status 400) and in `error`.
    """
    error = " ".join(error.split())
    if record.endpoint is None:
        return Result(record.line, {"id": record.id, "error": error}, failed=True)
    body = {"error": {"message": error, "type": INVALID, "param": None, "code": None}}
    return Result(record.line, _envelope(record, 400, body, {"code": INVALID, "message": error}), failed=True)


def _plain(record: Record, completion: Completion) -> dict[str, Any]:
    output = {
        "id": record.id,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": len(completion.token_ids),
        "blocks_per_step": completion.blocks_per_step,
        "keys_per_step": completion.keys_per_step,
        "error": None,
    }
    if record.sampling["logprobs"]:
        output |= {"token_ids": list(completion.token_ids), "logprobs": list(completion.logprobs)}
    return output


def _openai(record: Record, completion: Completion, model: str, tokenizer: Any) -> dict[str, Any]:
    chat = record.endpoint == CHAT
    choice = {"index": 0, "finish_reason": completion.finish_reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": completion.text, "refusal": None}} if chat else {"text": completion.text}
    if record.sampling["logprobs"]:
        tokens = [tokenizer.decode([token]) for token in completion.token_ids]
        choice["logprobs"] = _chat_logprobs(tokens, completion) if chat else _text_logprobs(tokens, completion)
    prompt, generated = completion.prompt_tokens, len(completion.token_ids)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_digest(record)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
        "kvjax": {"blocks_per_step": completion.blocks_per_step, "keys_per_step": completion.keys_per_step},
    }
    return _envelope(record, 200, body, None)


def _chat_logprobs(tokens: list[str], completion: Completion) -> dict[str, Any]:
    """No `bytes`: a token that is part of a character has no text of its own, and its bytes are the tokenizer's secret."""
    pairs = zip(tokens, completion.logprobs, strict=True)
    return {"content": [{"token": token, "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs], "refusal": None}


def _text_logprobs(tokens: list[str], completion: Completion) -> dict[str, Any]:
    return {"tokens": tokens, "token_logprobs": list(completion.logprobs), "top_logprobs": None, "text_offset": None}


def _envelope(record: Record, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    digest = _digest(record)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{digest}", "custom_id": record.id, "response": response, "error": error}


def _digest(record: Record) -> str:
    """Names the answer by line and id, so that a job that is run again gives its answers the same names."""
    return hashlib.sha256(f"{record.line}:{record.id}".encode(errors="backslashreplace")).hexdigest()[:24]


@dataclasses.dataclass
class Summary:
    """The closing figures of a job.

    records, errors, prompt_tokens, generated_tokens: of the whole output. earlier: records that a run before this one had finished.
    seconds, and the tokens per second: of this run alone. blocks_per_step and keys_per_step: means over all decode steps.
    """

    records: int = 0
    errors: int = 0
    earlier: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    _new_prompt_tokens: int = 0
    _new_generated_tokens: int = 0
    _steps: int = 0
    _blocks: float = 0.0
    _keys: float = 0.0

    def add(self, result: Result, *, earlier: bool = False) -> None:
        """Count a result; earlier: one that an earlier run had finished."""
        self.records += 1
        self.errors += result.failed
        self.earlier += earlier
        self.prompt_tokens += result.prompt_tokens
        self.generated_tokens += result.generated_tokens
        if not earlier:
            self._new_prompt_tokens += result.prompt_tokens
            self._new_generated_tokens += result.generated_tokens
        # The first token comes from the prompt's own pass; each later one took a step.
        steps = max(result.generated_tokens - 1, 0)
        self._steps += steps
        self._blocks += steps * result.blocks_per_step
        self._keys += steps * result.keys_per_step

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of this run."""
        return self._new_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def all_tokens_per_second(self) -> float:
        """Prompt and generated tokens per second of this run."""
        return (self._new_prompt_tokens + self._new_generated_tokens) / self.seconds if self.seconds else 0.0

    @property
    def blocks_per_step(self) -> float:
        """Blocks one KV head of one layer read per step; 0 where no step was taken."""
        return self._blocks / self._steps if self._steps else 0.0

    @property
    def keys_per_step(self) -> float:
        """Keys one KV head of one layer read per step; 0 where no step was taken."""
        return self._keys / self._steps if self._steps else 0.0

    def __str__(self) -> str:
        earlier = f", {self.earlier:,} from an earlier run" if self.earlier else ""
        rates = f"{self.tokens_per_second:,.1f} generated, {self.all_tokens_per_second:,.1f} with prompts"
        rows = [
            ("records", f"{self.records:,} ({self.errors:,} errors{earlier})"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("tokens per second", f"{rates} (in {self.seconds:,.1f} s, compilation included)"),
        ]
        if self._steps:
            rows += [("blocks per step", f"{self.blocks_per_step:,.1f}"), ("keys per step", f"{self.keys_per_step:,.0f}")]
        return "\n".join(f"{name:<18} {value}" for name, value in rows)
