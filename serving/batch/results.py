"""Answers of a batch job: one output line per record, in the record's own format, and the summary of the job."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvjax.cache import OutOfPages
from kvjax.engine.missed import Missed, all_of
from kvjax.scheduler.rounds import NO_ROUNDS, Rounds
from kvjax.serving.batch.records import CHAT, Record, by_line
from kvjax.text.detokenizer import CONTEXT, token_text
from pallas_kernels.core.files import finite

if TYPE_CHECKING:
    from kvjax.scheduler.request import Completion

FIRST_ERRORS = 3
ERROR_CHARACTERS = 1000
INVALID = "invalid_request_error"


@dataclasses.dataclass(frozen=True)
class Result:
    """A record's answer. output: the line, ready for JSON. Counts are in tokens; blocks and keys per step as in
    `Completion`.

    Tokens, blocks and keys count all samples. found_tokens: those of the prompt that were found, and not computed.
    rounds: as in `Completion`, of all samples. out_of_pages: whether it failed because the pool is too small. missed:
    the fields of `kvjax.engine.missed.Missed`, where the policy is watched.
    """

    line: int
    output: dict[str, Any]
    failed: bool
    prompt_tokens: int = 0
    generated_tokens: int = 0
    blocks_per_step: float = 0.0
    keys_per_step: float = 0.0
    samples: int = 1
    found_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    out_of_pages: bool = False
    missed: dict[str, Any] | None = None


def answered(record: Record, completion: Completion, *, model: str, tokenizer: Any) -> Result:
    """The result of a completion. If it has an error, or log-probabilities that are not finite, the result is that of
    `refused`."""
    if completion.error is not None:
        return dataclasses.replace(refused(record, str(completion.error)), out_of_pages=isinstance(completion.error, OutOfPages))
    choices = completion.choices or (completion,)
    generated = sum(len(choice.token_ids) for choice in choices)
    blocks, keys = (_per_step(choices, field) for field in ("blocks_per_step", "keys_per_step"))
    counts = {"prompt_tokens": completion.prompt_tokens, "generated_tokens": generated, "blocks_per_step": blocks, "keys_per_step": keys}
    found = all_of(choice.missed for choice in choices)
    missed = None if found is None else dataclasses.asdict(found)
    try:
        plain = record.endpoint is None
        output = _plain(record, choices, counts, missed) if plain else _openai(record, choices, counts, missed, model, tokenizer)
    except ValueError as error:  # the tokenizer cannot write the text of a token
        return refused(record, str(error))
    if finite(output) is not output:
        return refused(record, "the model gave log-probabilities that are not finite; try --dtype float32")
    rounds = sum((choice.rounds for choice in choices), NO_ROUNDS)
    told = {"samples": len(choices), "found_tokens": completion.found_tokens, "missed": missed, "rounds": rounds}
    return Result(record.line, output, failed=False, **told, **counts)


def _per_step(choices: Sequence[Completion], field: str) -> float:
    """The mean over the steps of all samples; 0 if there was no step."""
    if len(choices) == 1:
        return getattr(choices[0], field)
    steps = [len(choice.token_ids) - 1 for choice in choices]
    return sum(count * getattr(choice, field) for count, choice in zip(steps, choices, strict=True)) / max(sum(steps), 1)


def error_of(output: Mapping[str, Any]) -> str | None:
    """The error in an output line, or None."""
    error = output.get("error")
    return error["message"] if isinstance(error, Mapping) else error


def named(output: dict[str, Any], line: int, taken: Collection[int]) -> dict[str, Any]:
    """An output line with its id. taken: the lines without an id whose number is the id of another line
    (`records.read`)."""
    return output | {"id": by_line(line)} if line in taken else output


def shortened(error: str) -> str:
    """An error without its middle if it is long: templates and tokenizers may put a whole prompt into theirs."""
    kept = ERROR_CHARACTERS // 2
    return error if len(error) <= ERROR_CHARACTERS else f"{error[:kept]} ... {error[-kept:]}"


def refused(record: Record, error: str) -> Result:
    """The result of a record that cannot be answered.

    In OpenAI's format the error is given twice: as in their output files (a response with status 400), and in `error`.
    """
    error = shortened(" ".join(error.split()))
    if record.endpoint is None:
        return Result(record.line, {"id": record.id, "error": error}, failed=True)
    body = {"error": {"message": error, "type": INVALID, "param": None, "code": None}}
    return Result(record.line, _envelope(record, 400, body, {"code": INVALID, "message": error}), failed=True)


def _plain(record: Record, choices: Sequence[Completion], counts: Mapping[str, Any], missed: Mapping[str, Any] | None) -> dict[str, Any]:
    """With n above 1, the samples are in `choices`, each with its own number of generated tokens."""
    counts = counts if missed is None else {**counts, "missed": missed}
    said = []
    for choice in choices:
        said.append({"text": choice.text, "finish_reason": choice.finish_reason})
        if record.sampling["logprobs"]:
            said[-1] |= {"token_ids": list(choice.token_ids), "logprobs": list(choice.logprobs)}
        if record.sampling["top_logprobs"]:
            said[-1]["top_logprobs"] = [[list(pair) for pair in best] for best in choice.top_logprobs]
    if len(choices) == 1:
        return {"id": record.id, **said[0], **counts, "error": None}
    numbered = enumerate(zip(said, choices, strict=True))
    several = [{"index": index, **each, "generated_tokens": len(choice.token_ids)} for index, (each, choice) in numbered]
    return {"id": record.id, "choices": several, **counts, "error": None}


def _openai(
    record: Record,
    choices: Sequence[Completion],
    counts: Mapping[str, Any],
    missed: Mapping[str, Any] | None,
    model: str,
    tokenizer: Any,
) -> dict[str, Any]:
    chat = record.endpoint == CHAT
    prompt, generated = counts["prompt_tokens"], counts["generated_tokens"]
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{_digest(record)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(index, choice, record, tokenizer) for index, choice in enumerate(choices)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
        "kvjax": {name: counts[name] for name in ("blocks_per_step", "keys_per_step")} | ({} if missed is None else {"missed": missed}),
    }
    return _envelope(record, 200, body, None)


def _choice(index: int, completion: Completion, record: Record, tokenizer: Any) -> dict[str, Any]:
    chat = record.endpoint == CHAT
    choice = {"index": index, "finish_reason": completion.finish_reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": completion.text, "refusal": None}} if chat else {"text": completion.text}
    if record.sampling["logprobs"]:
        chosen, best = _entries(completion, tokenizer)
        choice["logprobs"] = _chat_logprobs(chosen, best) if chat else _text_logprobs(chosen, best)
    return choice


def _entries(completion: Completion, tokenizer: Any) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Text, log-probability and bytes of each chosen token, and of the most likely ones in its place."""
    ids, chosen, best = [*completion.prompt_end], [], []
    places = completion.top_logprobs or [()] * len(completion.token_ids)
    for token, value, place in zip(completion.token_ids, completion.logprobs, places, strict=True):
        entries = []
        for each, logprob in ((token, value), *place):
            text, own = token_text(tokenizer, ids[-CONTEXT:], each)
            entries.append({"token": text, "logprob": logprob, "bytes": None if own is None else list(own)})
        chosen.append(entries[0])
        best.append(entries[1:])
        ids.append(token)
    return chosen, best


def _chat_logprobs(chosen: list[dict[str, Any]], best: list[list[dict[str, Any]]]) -> dict[str, Any]:
    return {"content": [entry | {"top_logprobs": place} for entry, place in zip(chosen, best, strict=True)], "refusal": None}


def _text_logprobs(chosen: list[dict[str, Any]], best: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The most likely tokens of a place are an object by text, including the chosen token. Of tokens with equal text
    the likeliest is kept."""
    tops = []
    for entry, place in zip(chosen, best, strict=True):
        top: dict[str, float] = {}
        for each in sorted((entry, *place), key=lambda each: -each["logprob"]):
            top.setdefault(each["token"], each["logprob"])
        tops.append(top)
    return {
        "tokens": [entry["token"] for entry in chosen],
        "token_logprobs": [entry["logprob"] for entry in chosen],
        "top_logprobs": tops if any(best) else None,
        "text_offset": None,
    }


def _envelope(record: Record, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> dict[str, Any]:
    digest = _digest(record)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{digest}", "custom_id": record.id, "response": response, "error": error}


def _digest(record: Record) -> str:
    """A name for the answer from line and id, so that a job that is run again uses the same names."""
    return hashlib.sha256(f"{record.line}:{record.id}".encode(errors="backslashreplace")).hexdigest()[:24]


@dataclasses.dataclass
class Summary:
    """The closing figures of a job.

    records, errors, prompt_tokens, generated_tokens: counts of the whole output. earlier: records that an earlier run
    had finished. seconds, and the tokens per second: those of this run alone. blocks_per_step and keys_per_step: means
    over all decode steps. found_tokens: of the prompts of this run, those that were found and not computed. rounds: of
    drafting in this run.
    first_errors: (line, message) of the first records that failed, by line. ignored: how many records gave each field
    that changes nothing. repeated: lines that are equal to an earlier one with the same id, and have no answer of their
    own. slots: each number of slots that a run of the job had, in turn. missed: what was measured in all answers; None
    where the policy is not watched.
    """

    records: int = 0
    errors: int = 0
    earlier: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    found_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    seconds: float = 0.0
    first_errors: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    ignored: dict[str, int] = dataclasses.field(default_factory=dict)
    repeated: int = 0
    slots: Sequence[int | None] = ()
    missed: Missed | None = None
    _new_prompt_tokens: int = 0
    _new_generated_tokens: int = 0
    _out_of_pages: int = 0
    _steps: int = 0
    _blocks: float = 0.0
    _keys: float = 0.0

    def add(self, result: Result, *, earlier: bool = False) -> None:
        """Count a result. earlier: whether an earlier run had finished it."""
        self.records += 1
        self.errors += result.failed
        if result.failed:
            self.first_errors = sorted([*self.first_errors, (result.line, error_of(result.output))])[:FIRST_ERRORS]
        self.earlier += earlier
        self.prompt_tokens += result.prompt_tokens
        self.generated_tokens += result.generated_tokens
        if not earlier:
            self._new_prompt_tokens += result.prompt_tokens
            self.found_tokens += result.found_tokens
            self.rounds += result.rounds
            self._out_of_pages += result.out_of_pages
            self._new_generated_tokens += result.generated_tokens
        # The first token of a sample comes from prefill; each later one took a step.
        steps = max(result.generated_tokens - result.samples, 0)
        self._steps += steps
        self._blocks += steps * result.blocks_per_step
        self._keys += steps * result.keys_per_step
        self.missed = all_of((self.missed, None if result.missed is None else Missed(**result.missed)))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of this run."""
        return self._new_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def all_tokens_per_second(self) -> float:
        """Computed tokens per second of this run, of prompts and answers. Tokens that were found are not computed."""
        computed = self._new_prompt_tokens - self.found_tokens + self._new_generated_tokens
        return computed / self.seconds if self.seconds else 0.0

    @property
    def nothing_fitted(self) -> bool:
        """Whether no record has an answer, and some because the pool is too small for them."""
        return self._out_of_pages > 0 and self.errors == self.records

    @property
    def blocks_per_step(self) -> float:
        """Blocks that one KV head of one layer read per step; 0 if no step ran."""
        return self._blocks / self._steps if self._steps else 0.0

    @property
    def keys_per_step(self) -> float:
        """Keys that one KV head of one layer read per step; 0 if no step ran."""
        return self._keys / self._steps if self._steps else 0.0

    def __str__(self) -> str:
        earlier = f", {self.earlier:,} from an earlier run" if self.earlier else ""
        rates = f"{self.tokens_per_second:,.1f} generated, {self.all_tokens_per_second:,.1f} with prompts"
        found = ""
        if self.found_tokens:
            found = f" ({self.found_tokens:,} of this run were found, not computed)"
            every = self.all_tokens_per_second + self.found_tokens / self.seconds if self.seconds else 0.0
            rates = rates.replace("with prompts", f"with computed prompt tokens, {every:,.1f} with all prompt tokens")
        rows = [
            ("records", f"{self.records:,} ({self.errors:,} errors{earlier})"),
            ("prompt tokens", f"{self.prompt_tokens:,}{found}"),
            ("generated tokens", f"{self.generated_tokens:,}"),
            ("tokens per second", f"{rates} (in {self.seconds:,.1f} s, compilation included)"),
        ]
        if self._steps:
            rows += [("blocks per step", f"{self.blocks_per_step:,.1f}"), ("keys per step", f"{self.keys_per_step:,.0f}")]
        if self.rounds:
            rows.append(("drafts of this run", str(self.rounds)))
        if self.missed is not None:
            rows.append(("attention missed", str(self.missed)))
        if self.ignored:
            counts = (f"{name} ({count:,} record{'s' * (count > 1)})" for name, count in sorted(self.ignored.items()))
            rows.append(("ignored fields", ", ".join(counts)))
        if self.repeated:
            rows.append(("repeated lines", f"{self.repeated:,}: equal to an earlier line, whose answer is theirs"))
        if len(self.slots) > 1:
            said = ", then ".join(str(slots) for slots in self.slots)
            rows.append(("continued anyway", f"--max-batch {said}: the last bits of answers may differ from those of one run"))
        return "\n".join(f"{name:<18} {value}" for name, value in rows)
