"""The lines of a batch job: the fields of a record, and one clear sentence if something is wrong with it.

There are two formats; each line may have either:

* plain: `id` (text or whole number; the line number where there is none, see `read`), and the fields of
  `bodies.Fields.PLAIN`.
* OpenAI's batch file format: `custom_id`, `body`, and `method`, `url` where given; chat completions and completions.

`kvjax.serving.bodies` says which fields there are, which of them change nothing, and which values ask for nothing.

Defaults: plain records are greedy and OpenAI requests have that API's temperature of 1, unless the job names a
temperature. The length limit is the job's. The seed is made from the record's id and the job's seed, so equal prompts
with different ids give different samples, and a job that is run again gives the same ones. `model` in an OpenAI body is
not checked: the answer's `model` names the model that ran.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvjax.engine.sampling import Sampling
from kvjax.scheduler.request import Request
from kvjax.serving.bodies import Fields, WrongField, check_known, check_once, from_json, kind, prompt_ids, read_body, show, text

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_ENVELOPE = {"custom_id", "method", "url", "body"}
_FORMS = {None: Fields.PLAIN, CHAT: Fields.CHAT, COMPLETIONS: Fields.COMPLETIONS}
_ENDPOINTS = (CHAT, COMPLETIONS)


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The job's settings for records without them: max_new_tokens (tokens), temperature (None: the format's default),
    seed."""

    max_new_tokens: int = 128
    temperature: float | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the input. Exactly one of prompt (text or token ids), messages and error is set.

    line: its number in the input, from 1. id: None only for an OpenAI request without a usable one. numbered: whether
    the id is the line's number, because the line gives none that can be used. endpoint: None for a plain record, else
    the OpenAI endpoint. sampling: arguments of `kvjax.Sampling`. template_options: variables of the chat template.
    parse_special: as in `prompt_ids`. ignored: given fields that change nothing. cache_salt: the request's own.
    """

    line: int
    id: str | int | None
    numbered: bool = False
    endpoint: str | None = None
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parse_special: bool = False
    ignored: tuple[str, ...] = ()
    cache_salt: str | None = None
    error: str | None = None

    @property
    def size(self) -> int:
        """Rough length of the prompt in characters. It groups prompts of similar length without tokenising them."""
        if self.messages is not None:
            return sum(len(message["content"]) for message in self.messages)
        if isinstance(self.prompt, tuple):
            return 4 * len(self.prompt)
        return len(self.prompt or "")


def read(
    lines: Iterable[bytes | str | Mapping[str, Any]],
    defaults: Defaults = Defaults(),
    repeated: list[int] | None = None,
    taken: list[int] | None = None,
) -> Iterator[Record]:
    """Records of the lines (JSON text, or objects already parsed), in order; blank lines are skipped but counted.

    A bad line gives a record with `error`. A line that is equal to an earlier one with the same id is the same record:
    it is skipped, and its number is added to `repeated`. ValueError at the end of the lines if some with the same id
    differ: which of them an answer with this id belongs to, nobody could tell. A line without an id has its number,
    which no line may have given as its id: at the end of the lines, `taken` gets the numbers for which one did, and
    `results.named` gives their answers another id.
    """
    seen: dict[str | tuple[str], tuple[int, bytes]] = {}
    differ: list[tuple[str | int, int, int]] = []
    numbered: list[int] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, bytes | str) and _is_blank(line):
            continue
        record = parse(line, number, defaults)
        if record.numbered:
            numbered.append(number)
        elif record.id is not None:
            first, digest = seen.setdefault(_key(record.id), (number, digest_of(line)))
            if first != number:
                if digest != digest_of(line):
                    differ.append((record.id, first, number))
                elif repeated is not None:
                    repeated.append(number)
                continue
        yield record
    if differ:
        name, first, second = differ[0]
        others = f", and {len(differ) - 1:,} more lines repeat an id" if len(differ) > 1 else ""
        raise ValueError(
            f"the id {show(name)} is given on line {first} and, with other content, on line {second}{others}: give each record an id "
            "of its own. Nothing was run"
        )
    clashing = [number for number in numbered if _key(number) in seen]
    if (both := next((number for number in clashing if by_line(number) in seen), None)) is not None:
        said = f"line {both} has no id, and both {both} and {by_line(both)!r} are ids of other lines: give it one. Nothing was run"
        raise ValueError(said)
    if taken is not None:
        taken.extend(clashing)


def _key(record_id: str | int) -> str | tuple[str]:
    """An id as the key of a table. Whole numbers are keys by their digits: of numbers themselves, many can be chosen
    that share one place in a table."""
    return (hex(record_id),) if isinstance(record_id, int) else record_id


def _is_blank(line: bytes | str) -> bool:
    """Whether a line holds nothing, but perhaps the byte order mark at the beginning of a file."""
    if isinstance(line, bytes):
        return not line.removeprefix(codecs.BOM_UTF8).strip()
    return not line.removeprefix("\ufeff").strip()


def by_line(number: int) -> str:
    """The id of a line without one, if another line has its number as id."""
    return f"line {number}"


def digest_of(line: bytes | str | Mapping[str, Any]) -> bytes:
    """16 bytes that are equal for equal lines, but for space around them."""
    if isinstance(line, Mapping):
        try:
            line = json.dumps(line, sort_keys=True, default=str)
        except (RecursionError, TypeError, ValueError):  # it cannot be compared, so it is equal to no other
            return os.urandom(16)
    text = line.strip()
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="surrogatepass")).digest()[:16]


class DamagedRow(dict[str, Any]):
    """A row of a Parquet file: the fields that can be read, and what is wrong with another one. Or a line that is too
    long."""

    def __init__(self, fields: Mapping[str, Any], problem: str):
        super().__init__(fields)
        self.problem = problem


def parse(line: bytes | str | Mapping[str, Any], number: int, defaults: Defaults = Defaults()) -> Record:
    """The record of one line. If something is wrong with it, `Record.error` says what."""
    record = Record(number, None)
    try:
        fields, twice = (line, []) if isinstance(line, Mapping) else _load(line)
        openai = "custom_id" in fields or "body" in fields
        record = dataclasses.replace(record, endpoint=_endpoint(fields)) if openai else record
        check_once([each for each in twice if each[0] is fields and each[1] in ("id", "custom_id")])  # else the error has the line's id
        record = dataclasses.replace(record, id=_custom_id(fields) if openai else _plain_id(fields))
        record = _numbered(record) if record.id is None else record
        check_once(twice)
        if isinstance(line, DamagedRow):
            raise WrongField(line.problem)
        body = _unwrap(fields) if openai else {name: value for name, value in fields.items() if name != "id"}
        return _fill(record, body, "body." if openai else "", defaults)
    except WrongField as wrong:
        error = str(wrong)
    except RecursionError:
        error = "lists and objects of the line are nested too deeply"
    except Exception as raised:  # an object of Python that compares or converts itself may raise anything
        error = f"the record cannot be read: {type(raised).__name__}: {raised!s:.200}"
    if record.id is None:  # only the line number identifies the record
        error = f"input line {number}: {error}"
        record = _numbered(record) if record.endpoint is None else record
    return Record(record.line, record.id, record.numbered, record.endpoint, error=error)


def _numbered(record: Record) -> Record:
    return dataclasses.replace(record, id=record.line, numbered=True)


def _fill(record: Record, fields: Mapping[str, Any], where: str, defaults: Defaults) -> Record:
    body = read_body(fields, _FORMS[record.endpoint], where)
    if body.stream:
        raise WrongField(f"{where}stream true is not supported in a batch job; leave it out or give false", "stream")
    return dataclasses.replace(
        record,
        prompt=body.prompt,
        messages=body.messages,
        sampling=_sampling(body.sampling, record, defaults),
        template_options=body.template_options,
        parse_special=body.parse_special,
        ignored=body.ignored,
        cache_salt=body.cache_salt,
    )


def _sampling(given: Mapping[str, Any], record: Record, defaults: Defaults) -> dict[str, Any]:
    """Arguments of `kvjax.Sampling`: what the record gives, else what the job does."""
    temperature = defaults.temperature if defaults.temperature is not None else (0.0 if record.endpoint is None else 1.0)
    job = {"max_new_tokens": defaults.max_new_tokens, "temperature": temperature, "logprobs": False, "top_logprobs": 0}
    return job | {"seed": seed_of(record.id, defaults.seed)} | dict(given)


def _load(line: bytes | str) -> tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]:
    """The JSON object of a line, and its fields that are given twice, as `from_json`."""
    try:
        fields, twice = from_json(line.decode("utf-8-sig") if isinstance(line, bytes) else line)
    except UnicodeDecodeError as error:
        raise WrongField(f"the line is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise WrongField(f"the line is not JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(fields, dict):
        raise WrongField(f"the line must be a JSON object, got {kind(fields)}")
    return fields, twice


def _plain_id(fields: Mapping[str, Any]) -> str | int | None:
    """The id of a plain record; None if it has none."""
    value = fields.get("id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise WrongField(f"id must be text or a whole number, got {show(value)}")
    return text("id", value) if isinstance(value, str) else value


def _custom_id(fields: Mapping[str, Any]) -> str:
    if fields.get("custom_id") is None:
        raise WrongField("custom_id is missing")
    return text("custom_id", fields["custom_id"])


def _endpoint(fields: Mapping[str, Any]) -> str:
    """The endpoint of an OpenAI line: its url, else by the fields of its body. Unclear lines count as chat; `_unwrap`
    checks them."""
    body = fields.get("body")
    if isinstance(fields.get("url"), str) and fields["url"] in _ENDPOINTS:
        return fields["url"]
    return COMPLETIONS if isinstance(body, Mapping) and "prompt" in body and "messages" not in body else CHAT


def _unwrap(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of an OpenAI line, its envelope checked."""
    check_known(fields, _ENVELOPE, "")
    if fields.get("method") not in (None, "POST"):
        raise WrongField(f"method must be 'POST', got {show(fields['method'])}")
    if fields.get("url") not in (None, *_ENDPOINTS):
        raise WrongField(f"url {show(fields['url'])} is not served; there are {', '.join(_ENDPOINTS)}")
    body = fields.get("body")
    if not isinstance(body, Mapping):
        raise WrongField(f"body must be a JSON object, got {kind(body)}")
    return body


def seed_of(record_id: str | int | None, job_seed: int) -> int:
    """The seed of a record without one: 32 bits of SHA-256 of the job's seed and the record's id."""
    return int.from_bytes(hashlib.sha256(json.dumps([job_seed, record_id]).encode()).digest()[:4], "big")


def request_of(record: Record, tokenizer: Any, positions: int) -> Request:
    """The engine's request of a record: messages rendered, and text tokenised. ValueError says what is wrong with
    it."""
    sampling = Sampling(**record.sampling)
    options, parse_special = record.template_options, record.parse_special
    ids = prompt_ids(record.prompt, record.messages, options, tokenizer, positions, parse_special=parse_special)
    return Request(ids, sampling, record.line, cache_salt=record.cache_salt)
