"""An adapter for EleutherAI's lm-evaluation-harness: it runs the harness's tasks on an engine with any decode policy.

    python -m kvjax.serving.harness --model kvjax --model_args pretrained=needle,policy=cascade:8 --tasks arc_easy

is `lm_eval` with one more model. lm_eval up to 0.4.13 knows only the models of its own package. Later releases find
kvjax by its entry point (group `lm_eval.models`), and `lm_eval --model kvjax ...` does the same. In Python:

    lm_eval.simple_evaluate(model=KvjaxLM(engine), tasks=["arc_easy"])

Contexts are prefilled once for all continuations that share them. Continuations are decoded through the policy, token
by token (under the dense policy they are prefilled in chunks). Nothing is cut to fit: text longer than the model's
positions or the pool is an error. This module does not need lm_eval. If lm_eval is installed, `KvjaxLM` is one of its
models.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from kvjax.engine.engine import Engine
from kvjax.engine.sampling import Sampling, derived_seed
from kvjax.engine.sequence import CachedSequence
from kvjax.generation import run
from kvjax.model.identity import fingerprint
from kvjax.models import load
from kvjax.policies import prefill
from kvjax.policies.decode import DecodePolicy, identity, parse
from kvjax.scheduler.request import Request
from kvjax.scheduler.scoring import continuation_logprobs

if importlib.util.find_spec("lm_eval"):
    from lm_eval.api.model import LM
else:
    LM = object

MAX_NEW_TOKENS = 256
"""The most tokens that `generate_until` generates if a task does not say; the same as in the harness's own models."""

MODEL_ARGS = (
    "pretrained",
    "policy",
    "prefill",
    "dtype",
    "lora",
    "max_positions",
    "pages",
    "page_size",
    "prefill_chunk",
    "max_length",
    "seed",
)
"""The arguments that `--model_args` may have."""


class KvjaxLM(LM):
    """A language model for lm-evaluation-harness. Requests are its `Instance`s, or anything with `.args`.

    engine: its model needs a tokenizer. policy: the decode policy; None is the engine's. slots: sequences that
    `generate_until` decodes together; None is 8, or as many as the engine's largest batch bucket. max_length: tokens of
    the windows that `loglikelihood_rolling` cuts long documents into; None is the model's positions. seed: for tasks
    that sample; each request of a call gets a different seed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        policy: str | DecodePolicy | None = None,
        slots: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        if engine.model.tokenizer is None:
            raise ValueError("lm-evaluation-harness works with text, but the engine's model has no tokenizer")
        if max_length is not None and not 2 <= max_length <= engine.config.max_positions:
            raise ValueError(f"max_length must be from 2 to the model's {engine.config.max_positions} positions, got {max_length}")
        self.engine, self.tokenizer, self.slots, self.seed = engine, engine.model.tokenizer, slots, seed
        self.policy = engine.policy if policy is None else parse(policy)
        self.max_length = max_length or engine.config.max_positions

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None) -> Self:
        """The model of a command line.

        arg_dict: `--model_args`. pretrained: a folder, Hub id or "needle"; dtype, lora and max_positions as for
        `kvjax.load`; policy, prefill, pages, page_size and prefill_chunk as for `kvjax.Engine`; max_length and seed as
        here. additional_config: batch_size is `slots` ("auto": max_batch_size); the harness always names a device, and
        JAX's default device is used. ValueError for any other argument.
        """
        given, more = dict(arg_dict), dict(additional_config or {})
        if unknown := sorted(set(given) - set(MODEL_ARGS)):
            raise ValueError(f"model_args name {unknown[0]!r}, which kvjax does not have; there are {', '.join(MODEL_ARGS)}")
        if "pretrained" not in given:
            raise ValueError("model_args need pretrained=, a model folder, a Hub id or needle")
        batch, most = more.get("batch_size"), more.get("max_batch_size")
        slots = most if batch is None or str(batch).startswith("auto") else int(batch)
        own = {name: given.pop(name) for name in ("max_length", "seed") if name in given}
        loading = {name: given.pop(name) for name in ("dtype", "lora", "max_positions") if name in given}
        model = load(str(given.pop("pretrained")), **loading)
        return cls(Engine(model, **given), slots=slots, **own)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        """The same from "pretrained=needle,policy=cascade:8"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes under "config" in its results: checkpoint, policies, sizes and versions."""
        engine = self.engine
        return {
            "model_name": getattr(engine.model, "name", ""),
            "model_fingerprint": fingerprint(engine.model),
            "model_num_parameters": engine.config.num_params,
            "model_dtype": engine.dtype.name,
            "model_device": next(iter(jax.tree.leaves(engine.model.params)[0].devices())).device_kind,
            "policy": str(self.policy),
            "policy_in_full": identity(self.policy),
            "prefill": str(engine.prefill_policy),
            "prefill_in_full": prefill.identity(engine.prefill_policy),
            "page_size": engine.page_size,
            "prefill_chunk": engine.prefill_chunk,
            "max_length": self.max_length,
            "kvjax_version": importlib.metadata.version("kvjax"),
            "jax_version": importlib.metadata.version("jax"),
        }

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Per request (context, continuation): the continuation's log-probability, and whether greedy decoding would
        write it."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (context, _) in enumerate(pairs):
            by_context.setdefault(tuple(context), []).append(number)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for context, numbers in by_context.items():
            (sequence,) = self.engine.prefill([context])
            try:
                for number in numbers:
                    answers[number] = self._score_fork(sequence, pairs[number][1])
            finally:
                self.engine.free(sequence)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Per request (text,): the log-probability of the whole text, after the model's prefix token.

        A text longer than `max_length` is cut into windows. Every token is predicted once. The last window begins
        earlier, to be full.
        """
        return [sum(self._score_windows(*request.args)) for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Per request (context, arguments): the text generated up to, and without, the first of `until`.

        Arguments: until, max_gen_toks, do_sample, temperature, top_k, top_p. ValueError for any other.
        """
        asked = [
            Request(tuple(self.tok_encode(context)), self._sampling(arguments, number), number)
            for number, (context, arguments) in enumerate(request.args for request in requests)
        ]
        texts = [""] * len(asked)
        longest_first = sorted(asked, key=lambda request: -len(request.prompt))
        for request, completion in run(self.engine, longest_first, policy=self.policy, slots=self.slots):
            if completion.error is not None:
                raise completion.error
            texts[request.id] = completion.text
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation rendered by the model's chat template. Without the generation prompt, the last message is left
        open."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's chat template, which the harness notes in its results; another one by name is not available."""
        if isinstance(chat_template, str):
            raise ValueError(f"chat template {chat_template!r} cannot be chosen by name; the model's own is used")
        return (self.tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's request cache."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: beginning-of-sequence, else end-of-sequence."""
        config = self.engine.config
        if config.bos_token_id is None and not config.eos_token_ids:
            raise ValueError("an empty context needs a beginning- or end-of-sequence token, and the model's configuration names none")
        return config.eos_token_ids[0] if config.bos_token_id is None else config.bos_token_id

    def tok_encode(self, text: str) -> list[int]:
        """Token ids of a context, with the special tokens that the tokenizer adds, but not twice: a chat template may
        have written them."""
        bos = self.tokenizer.bos_token
        return list(self.tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)))["input_ids"])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Context and continuation as tokens, tokenised together; spaces at the end of the context belong to the
        continuation."""
        if context == "":
            head, rest = [self.prefix_token_id], list(self.tokenizer(continuation, add_special_tokens=False)["input_ids"])
            # Some tasks put the prefix token into the continuation themselves.
            rest = rest[1:] if rest[:1] == head and len(rest) > 1 else rest
        else:
            kept = len(context.rstrip())
            head = self.tok_encode(context[:kept])
            whole = self.tok_encode(context + continuation)
            joined = whole[: len(head)] == head and len(whole) > len(head)
            # Where a token straddles the border, the continuation is tokenised by itself, so that no text is lost.
            alone = context[kept:] + continuation
            rest = whole[len(head) :] if joined else list(self.tokenizer(alone, add_special_tokens=False)["input_ids"])
        if not head or not rest:
            raise ValueError(f"no tokens in the {'continuation' if head else 'context'} of {(context[-40:], continuation[:40])}")
        return head, rest

    def _score_fork(self, sequence: CachedSequence, continuation: Sequence[int]) -> tuple[float, bool]:
        fork = self.engine.fork(sequence)
        try:
            logprobs, greedy = continuation_logprobs(self.engine, fork, continuation, self.policy)
            return float(np.sum(logprobs, dtype=np.float64)), bool(np.all(greedy))
        finally:
            self.engine.free(fork)

    def _score_windows(self, text: str) -> Iterator[float]:
        """The log-probability of each window of a text."""
        tokens = [self.prefix_token_id, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        for start, first, stop in windows(len(tokens), self.max_length):
            (sequence,) = self.engine.prefill([tokens[start:first]])
            try:
                logprobs, _ = continuation_logprobs(self.engine, sequence, tokens[first:stop], self.policy)
                yield float(np.sum(logprobs, dtype=np.float64))
            finally:
                self.engine.free(sequence)

    def _sampling(self, arguments: Mapping[str, Any], number: int) -> Sampling:
        left = dict(arguments)
        until, limit = left.pop("until", ()), left.pop("max_gen_toks", MAX_NEW_TOKENS)
        sample, temperature = left.pop("do_sample", None), left.pop("temperature", None)
        top_k, top_p = left.pop("top_k", 0), left.pop("top_p", 1.0)
        if left:
            raise ValueError(f"generation argument {sorted(left)[0]!r} is not supported")
        if sample is None:
            sample = bool(temperature)
        if sample and not temperature:
            temperature = 1.0
        stop = (until,) if isinstance(until, str) else tuple(text for text in until or () if text)
        return Sampling(limit, temperature if sample else 0.0, top_k, top_p, derived_seed(self.seed, "request", number), stop)


def windows(length: int, max_length: int) -> Iterator[tuple[int, int, int]]:
    """Cut `length` tokens, of which the first is given, into (start, first, stop): predict [first, stop) from start on.

    A window reads at most `max_length` tokens: all but the last predicted. Every token from 1 on is predicted once, and
    the last window reaches back so as to read as many tokens as the others.
    """
    for first in range(1, length, max_length):
        stop = min(first + max_length, length)
        yield max(0, stop - 1 - max_length), first, stop


def main() -> None:
    """lm_eval's own command line, with kvjax among its models."""
    if LM is object:
        sys.exit("lm_eval is not installed: pip install lm_eval")
    import lm_eval.models  # noqa: F401 (registers the harness's own models)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "kvjax" not in model_registry:
        model_registry.register("kvjax", target="kvjax.serving.harness:KvjaxLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
