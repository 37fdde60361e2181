"""Choosing the next token: greedy, temperature, top-k, top-p, min-p, penalties; per row, so that a batch may mix
them."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.checks import check_flag, whole_number
from pallas_kernels.core.messages import shown

MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 2**20
"""Of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS = 2**16
SEEDS = range(-(2**63), 2**63)
"""Seeds are signed integers of 64 bits, as in OpenAI's API."""
NOISE_VERSION = 2
"""How a seed becomes draws. A new version draws other tokens from the same seed, so a job does not go on under another
one."""
_WHOLE = (
    ("max_new_tokens", 1, 2**31),
    ("top_k", -1, 2**31),
    ("seed", SEEDS.start, SEEDS.stop),
    ("n", 1, MAX_SAMPLES + 1),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS + 1),
)
_BETWEEN = (
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0.001, 1000),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_HINTS = {
    "do_sample": "a temperature above 0 samples, 0 is greedy",
    "max_length": "use max_new_tokens, which counts only the new tokens, not the prompt",
    "num_return_sequences": "it is called n",
    "num_beams": "there is no beam search; n draws several samples",
    "eos_token_id": "it is called stop_token_ids, a list",
    "pad_token_id": "prompts of different lengths need no padding; leave it out",
    "streamer": "give generate a function, stream=lambda number, text: print(text, end='')",
    "device": "JAX chooses the device: load and run the model inside `with jax.default_device(...)`",
    "sampling": "give its fields by name, as in temperature=0.7",
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_gen_toks"), "it is called max_new_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences", "until"), "it is called stop"),
    **dict.fromkeys(("torch_dtype", "dtype"), "the model is loaded in its dtype, kvjax.load(name, dtype='bfloat16')"),
    "device_map": "JAX chooses the device: load and run the model inside `with jax.default_device(...)`",
}
FLOAT32_MAX = float(np.finfo(np.float32).max)
"""At this temperature every token is equally likely; higher ones change nothing."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request is sampled and when it ends.

    max_new_tokens: the most tokens to generate. temperature: 0 is greedy. top_k, top_p: 0 (or -1) and 1, in this order,
    keep every token; a top_p of 0 keeps the best one. seed: the same seed, prompt and policy give the same tokens,
    whatever else is in a batch of the same bucket; from -2**63 to 2**63 - 1. stop: strings that end the text (they are
    left out of it); they may hold special tokens, which the text leaves out. stop_token_ids: None: the model's
    end-of-sequence tokens; (): none. logprobs: return the log-probability of each token under the model's own
    distribution (temperature 1, no cut, no penalty).

    min_p: drop tokens less probable than this share of the best token's probability. repetition_penalty: divides
    positive and multiplies negative logits of tokens in the prompt or the answer (as transformers does).
    presence_penalty and frequency_penalty: subtracted from the logit of a token in the answer, once and once per
    occurrence (OpenAI's definition, -2 to 2). Penalties act first, also on greedy rows. n: how many samples of the
    prompt, which is prefilled once; the first draws with the seed, each other one with a seed derived from it
    (`derived_seed`). ignore_eos: do not stop at the model's end-of-sequence tokens. top_logprobs: how many of the most
    likely tokens to return at each place; needs logprobs. clip: lower max_new_tokens to what the model has positions
    for behind the prompt; False: a request for more is an error.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    logprobs: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    top_logprobs: int = 0
    clip: bool = False

    def __new__(cls, *values: Any, **fields: Any) -> Sampling:
        """An instance. A name that is not a field is a TypeError, with a hint for names that other libraries use."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise TypeError(f"there is no {name!r} in kvjax.Sampling: {_HINTS.get(name, f'its fields are {", ".join(known)}')}")
        return super().__new__(cls)

    def __post_init__(self):
        stops = (self.stop,) if isinstance(self.stop, str) else _items(self.stop, MAX_STOP_STRINGS)
        if stops is None or any(not isinstance(text, str) or not text for text in stops):
            raise ValueError(f"stop must be strings that are not empty, got {shown(self.stop)}; leave it out, or give (), for none")
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has more than {MAX_STOP_STRINGS:,} strings, the most that are taken: give fewer")
        if (characters := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
            raise ValueError(f"the stop strings have {characters:,} characters, and {MAX_STOP_CHARACTERS:,} are the most: cut them")
        object.__setattr__(self, "stop", stops)
        for name in ("logprobs", "ignore_eos", "clip"):
            check_flag(name, getattr(self, name))
        for name, least, below in _WHOLE:
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least, below))
        object.__setattr__(self, "top_k", max(0, self.top_k))
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if not _is_number(self.temperature) or not 0 <= self.temperature < np.inf:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature!r}")
        for name, least, most in _BETWEEN:
            value = getattr(self, name)
            if not _is_number(value) or not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least} to {most}, got {value!r}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs=True")

    def __repr__(self) -> str:
        differs = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Sampling({', '.join(f'{name}={getattr(self, name)!r}' for name in differs)})"

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty, so that logits depend on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def ends(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a text, which leaves them out. eos_token_ids: the model's end-of-sequence tokens."""
        if self.stop_token_ids is not None:
            return frozenset(self.stop_token_ids)
        return frozenset() if self.ignore_eos else frozenset(eos_token_ids)


# Without this, notebooks would show the arguments of __new__.
Sampling.__signature__ = inspect.Signature(list(inspect.signature(Sampling.__init__).parameters.values())[1:])


class OneSample(TypedDict, total=False):
    """Fields of `Sampling` as options of a function, for editors and type checkers, without `n`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int] | None
    logprobs: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    top_logprobs: int
    clip: bool


class SamplingOptions(OneSample, total=False):
    """Fields of `Sampling` as options of a function, for editors and type checkers."""

    n: int


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _items(given: object, most: int) -> tuple[Any, ...] | None:
    """The items of an iterable, which may never end, and at most one more than `most`; None for anything else, and for
    a mapping."""
    if isinstance(given, Mapping):
        return None
    try:
        return tuple(itertools.islice(given, most + 1))  # an array of no dimension says that it is iterable, and is not
    except TypeError:
        return None


def _stop_token_ids(given: object) -> tuple[int, ...]:
    ids = None if isinstance(given, str | bytes) else _items(given, MAX_STOP_TOKEN_IDS)
    if ids is None:
        raise ValueError(f"stop_token_ids must be a list of token ids, got {shown(given)}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS:,} ids, the most that are taken: give fewer")
    return tuple(whole_number("a stop token id", token) for token in ids)


def derived_seed(seed: int, kind: str, number: int) -> int:
    """The seed of the `number`th stream of draws that one seed names, such as ("sample", 2). Number 0 is the seed
    itself.

    Other numbers give 64 bits of SHA-256, so the streams of two seeds are independent: seed 1 is not the second sample
    of seed 0.
    """
    if not number:
        return seed
    digest = hashlib.sha256(json.dumps([seed, kind, number]).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@flax.struct.dataclass
class SamplingRows:
    """The sampling of every row of a batch, as arrays.

    seed: the upper and the lower 32 bits of each row's seed, which are its random key. draws: whether any row draws at
    random instead of taking the largest logit. penalises: whether any row has a penalty. ranks: how many of the most
    likely tokens are returned. These are static, so a step of greedy rows is compiled without the sort that drawing
    needs and without counts of tokens. A condition on the device would make the host wait for its answer in every step.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition_penalty: Float[Array, "B"]
    presence_penalty: Float[Array, "B"]
    frequency_penalty: Float[Array, "B"]
    seed: UInt32[Array, "B 2"]
    draws: bool = flax.struct.field(pytree_node=False, default=True)
    penalises: bool = flax.struct.field(pytree_node=False, default=False)
    ranks: int = flax.struct.field(pytree_node=False, default=0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays, by name."""
        arrays = [field.name for field in dataclasses.fields(self) if field.metadata.get("pytree_node", True)]
        return {name: np.shape(getattr(self, name)) for name in arrays}

    @classmethod
    def of(cls, samplings: Sequence[Sampling | None]) -> SamplingRows:
        """One row each; None (an empty slot) is greedy. The arrays cannot be changed in place, so that steps put them
        on the device once."""
        filled = [sampling or Sampling() for sampling in samplings]
        rows = cls(
            temperature=np.array([min(s.temperature, FLOAT32_MAX) for s in filled], np.float32),
            top_k=np.array([s.top_k for s in filled], np.int32),
            top_p=np.array([s.top_p for s in filled], np.float32),
            min_p=np.array([s.min_p for s in filled], np.float32),
            repetition_penalty=np.array([s.repetition_penalty for s in filled], np.float32),
            presence_penalty=np.array([s.presence_penalty for s in filled], np.float32),
            frequency_penalty=np.array([s.frequency_penalty for s in filled], np.float32),
            seed=np.array([divmod(s.seed % 2**64, 2**32) for s in filled], np.uint32),
            draws=any(s.temperature > 0 for s in filled),
            penalises=any(s.penalises for s in filled),
            ranks=MAX_TOP_LOGPROBS if any(s.top_logprobs for s in filled) else 0,
        )
        for array in jax.tree.leaves(rows):
            array.flags.writeable = False
        return rows


def check_rows(rows: SamplingRows, tokens: Array, counts: Array | None, slots: int, vocab_size: int) -> None:
    """ValueError unless the arguments of a step of so many slots fit together."""
    if not isinstance(rows, SamplingRows):
        raise ValueError(
            f"a step takes kvjax.engine.sampling.SamplingRows, got {shown(rows)}: SamplingRows.of([Sampling(), ...]), one per slot"
        )
    if rows.penalises and counts is None:
        raise ValueError("a row has a penalty, which needs counts of its tokens: pass counts from kvjax.engine.sampling.seen_tokens")
    for name, shape in {"tokens": tokens.shape, **rows.shapes()}.items():
        if shape != ((slots, 2) if name == "seed" else (slots,)):
            raise ValueError(f"{name} must have one entry for each of {slots} slots, got shape {shape}")
    if counts is not None and ((shape := np.shape(counts)) != (slots, vocab_size) or jnp.result_type(counts) != jnp.int32):
        dtype = jnp.result_type(counts)
        raise ValueError(f"counts must be int32 of {slots} slots and {vocab_size} token ids, got shape {shape} of {dtype}")


class NotFinite(FloatingPointError):
    """A model's logits were NaN or infinite, so there is no next token. position: its place in the sequence."""

    def __init__(self, position: int):
        self.position = position
        super().__init__(
            f"the logits for the token at position {position:,} are not finite (NaN or infinity): load the model in float32 or bfloat16 "
            "if it runs in float16; if that does not help, check its weights for NaN. With a policy of your own, check that each list "
            "has a block of the sequence"
        )


@flax.struct.dataclass
class Sampled:
    """The result of sampling, per row: the token, its log-probability, and whether the logits could be sampled.

    finite: False where the row's logits hold NaN or +inf, or only -inf. (Some -inf are fine: such a token is never
    chosen.) Token and log-probability are then meaningless, and the reader raises `NotFinite` for the row.
    Log-probabilities are those of softmax(logits), natural log, float32. top_tokens and top_logprobs: the `rows.ranks`
    most likely tokens, best first; None if ranks is 0. counts: those that were passed in (see `seen_tokens`), for the
    next step. accepted: only after drafts (`accept`): how many of the row's tokens stay; then everything except counts
    has an axis T after the batch.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    finite: Bool[Array, "B"]
    top_tokens: Int[Array, "B R"] | None = None
    top_logprobs: Float[Array, "B R"] | None = None
    counts: Int[Array, "B V"] | None = None
    accepted: Int[Array, "B"] | None = None


def sample(logits: Float[Array, "B V"], rows: SamplingRows, positions: Int[Array, "B"], counts: Int[Array, "B V"] | None = None) -> Sampled:
    """The next token of every row.

    positions: the token's place in its sequence. It and the row's seed make the row's random key, so a draw does not
    depend on other rows. A drawn token is the one with the largest sum of scaled logit and Gumbel noise, which is keyed
    by seed, place and token id. counts: the tokens that each row holds, from `seen_tokens` and `count_tokens`; needed
    if `rows.penalises`. Order: penalties (repetition, then frequency and presence), temperature, top-k, top-p over what
    is left, min-p. The best token always stays. Greedy rows take the largest logit; of equal ones, the lowest token id.
    Memory: a few arrays of `[B, V]` float32.
    """
    logits = jax.lax.optimization_barrier(logits.astype(jnp.float32))  # the logits have the same bits whether or not rows draw
    weighed = penalised(logits, rows, counts) if rows.penalises else logits
    chosen = jnp.argmax(weighed, axis=-1).astype(jnp.int32)
    if rows.draws:
        chosen = jnp.where(rows.temperature > 0, _draw(weighed, rows, positions), chosen)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    largest, log_sum = jax.lax.optimization_barrier((largest, log_sum))  # the same sum whether or not the most likely tokens are returned
    logprobs = (jnp.take_along_axis(logits, chosen[:, None], axis=1) - largest - log_sum)[:, 0]
    if not rows.ranks:
        return Sampled(chosen, logprobs, all_finite(logits), counts=counts)
    top_logits, top_tokens = jax.lax.top_k(logits, min(rows.ranks, logits.shape[-1]))
    return Sampled(chosen, logprobs, all_finite(logits), top_tokens, top_logits - largest - log_sum, counts)


def accept(
    logits: Float[Array, "B T V"],
    rows: SamplingRows,
    lengths: Int[Array, "B"],
    drafted: Int[Array, "B T"],
    active: Bool[Array, "B"],
    counts: Int[Array, "B V"] | None,
) -> Sampled:
    """Sample after each of T written tokens, and keep the longest run of drafts that equal the tokens sampled in their
    places.

    lengths: each row's length before these tokens. drafted: the row's certain token, then drafts; -1 (no draft) is
    never kept. An inactive row keeps nothing. A draw depends only on the row's seed and the token's place, so the
    tokens kept are those that T steps of one token would have drawn from these logits.
    """
    found = []
    for token in range(drafted.shape[1]):
        if rows.penalises:
            counts = count_tokens(counts, jnp.maximum(drafted[:, token], 0), active)
        found.append(sample(logits[:, token], rows, lengths + token + 1, counts).replace(counts=None))
    sampled = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *found)
    kept = (drafted[:, 1:] == sampled.tokens[:, :-1]) & sampled.finite[:, :-1]
    accepted = jnp.where(active, 1 + jnp.cumprod(kept, axis=1, dtype=jnp.int32).sum(axis=1), 0)
    if rows.penalises:
        for token in range(1, drafted.shape[1]):
            counts = count_tokens(counts, jnp.maximum(drafted[:, token], 0), active & (accepted <= token), -1)
    return sampled.replace(counts=counts, accepted=accepted)


def all_finite(logits: Float[Array, "... V"]) -> Bool[Array, "..."]:
    """Whether rows of logits can be sampled from (see `Sampled.finite`). The largest logit is NaN if one is NaN."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def seen_tokens(prompt: Sequence[int], vocab_size: int) -> Int[np.ndarray, " V"]:
    """Counts of a row before its first new token: 1 for each token id in the prompt. Each occurrence in the answer adds
    2."""
    counts = np.zeros(vocab_size, np.int32)
    counts[np.asarray(prompt)] = 1
    return counts


def count_tokens(counts: Int[Array, "B V"], tokens: Int[Array, "B"], active: Bool[Array, "B"], times: int = 1) -> Int[Array, "B V"]:
    """Counts with one more token in the answer of every active row, or with `times` -1 one fewer."""
    return counts.at[jnp.arange(tokens.shape[0]), tokens].add(jnp.where(active, 2 * times, 0))


def penalised(logits: Float[Array, "B V"], rows: SamplingRows, counts: Int[Array, "B V"]) -> Float[Array, "B V"]:
    """Logits after the penalties. Rows without a penalty keep their bits."""
    generated, repetition = counts >> 1, rows.repetition_penalty[:, None]
    logits = jnp.where(counts > 0, jnp.where(logits < 0, logits * repetition, logits / repetition), logits)
    return logits - rows.frequency_penalty[:, None] * generated - rows.presence_penalty[:, None] * (generated > 0)


def kept(ranked: Float[Array, "B V"], rows: SamplingRows) -> Bool[Array, "B V"]:
    """Which of the scaled logits, largest first, stay after top-k, top-p and min-p."""
    rank = jnp.arange(ranked.shape[-1])[None]
    keep = (rows.top_k[:, None] == 0) | (rank < rows.top_k[:, None])
    mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    # A token stays while the mass before it is less than top_p, so the token that reaches top_p stays. A top_p of 1
    # cuts nothing: the rounded sum may reach 1 before the last token.
    keep &= (before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1)
    keep &= jnp.exp(ranked - ranked[:, :1]) >= rows.min_p[:, None]
    return keep | (rank == 0)


def _draw(logits: Float[Array, "B V"], rows: SamplingRows, positions: Int[Array, "B"]) -> Int[Array, "B"]:
    """One random draw per row; the caller drops the draws of rows with temperature 0.

    The row's maximum is subtracted before the division, so the best token stays at 0 however small T is: logits / T
    overflows below T of about 1e-36. 0 and minus infinity do not change, even where a device flushes T, or its inverse,
    to 0.
    """
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = below / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = jnp.where((below == 0) | jnp.isinf(below), below, scaled)
    order = jnp.argsort(-below, axis=-1, stable=True)  # a high temperature flushes `scaled` to 0, and makes different logits equal
    ranked = jnp.take_along_axis(scaled, order, axis=-1)

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32, mode="low")

    # Noise belongs to a token's id, not to its rank: two steps whose logits nearly agree draw the same token nearly
    # always.
    ranked_noise = jnp.take_along_axis(jax.vmap(noise)(rows.seed, positions), order, axis=-1)
    index = jnp.argmax(jnp.where(kept(ranked, rows), ranked + ranked_noise, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, index[:, None], axis=-1)[:, 0].astype(jnp.int32)
