"""Requests and their completions."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any

from kvjax.checks import check_salt, whole_number
from kvjax.engine.missed import Missed
from kvjax.engine.sampling import Sampling
from kvjax.policies.decode import DecodePolicy
from kvjax.scheduler.rounds import NO_ROUNDS, Rounds
from kvjax.text.tokenization import Prompt
from pallas_kernels.core.messages import shown

SHORT = reprlib.Repr(maxstring=60, maxother=200)
"""Shortens prompts, texts and token ids for display."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt (text, token ids, or chat messages) and how to continue it. `id` is the caller's own.

    policy: the decode policy of all its steps; None: that of the scheduler. priority: requests of higher priority go
    first. cache_salt: only requests of the same salt share pages, where the engine reuses them.
    """

    prompt: Prompt
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    id: Any = None
    policy: str | DecodePolicy | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self):
        if not isinstance(self.sampling, Sampling):
            raise ValueError(f"sampling must be a kvjax.Sampling, got {shown(self.sampling)}: Request(prompt, Sampling(max_new_tokens=64))")
        whole_number("priority", self.priority, -(2**31))
        check_salt(self.cache_salt)

    def __repr__(self) -> str:
        return f"Request({SHORT.repr(self.prompt)}, {self.sampling}, id={SHORT.repr(self.id)})"


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of a request.

    text: the continuation, without stop string and special tokens. token_ids: every generated token, including the one
    that ended it. logprobs: one per token, if requested. top_logprobs: for each token, pairs (token id,
    log-probability) of the most likely ones, best first, if requested. finish_reason: "stop" (stop token or string),
    "length" (max_new_tokens), "cancelled" or "error". choices: with n above 1, all samples in order, this one first;
    else (). blocks_per_step and keys_per_step: what one KV head of one layer read on average per decoded token (0 if no
    step ran). found_tokens: those of the prompt that the engine found, and did not compute. prompt_end: the last token
    ids of the prompt, for `kvjax.text.detokenizer.token_text`. missed: what its steps missed of dense's attention; None
    where its policy is not watched. rounds: of drafting. error: the exception that ended the request; everything else
    is then empty.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: str = "length"
    prompt_tokens: int = 0
    blocks_per_step: float = 0.0
    keys_per_step: float = 0.0
    error: Exception | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    choices: tuple[Completion, ...] = ()
    found_tokens: int = 0
    prompt_end: tuple[int, ...] = ()
    missed: Missed | None = None
    rounds: Rounds = NO_ROUNDS

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Completion(error={SHORT.repr(self.error)})"
        counts = f"tokens={len(self.token_ids)}, keys_per_step={self.keys_per_step:.0f}"
        return f"Completion({SHORT.repr(self.text)}, finish_reason={self.finish_reason!r}, {counts})"


OnToken = Callable[[Request, int, str], None]
"""Called with the request, the token id, and the text that became certain with it (possibly empty)."""
