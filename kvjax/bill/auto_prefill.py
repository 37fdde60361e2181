"""Prefill policy `auto`: for each chunk of a prompt, the fastest measured policy of those with evidence that they meet a level, or dense.

The host chooses from the positions at which the chunk starts and ends. The engine rounds them to whole chunks, so the choice does not
depend on how a prompt is cut, nor on other prompts. Then the chosen policy's step is compiled and run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jax

from kvjax.bill.evidence import Fidelity, PrefillEvidence, parse_level, qualified, recorded_prefill_evidence
from kvjax.bill.prefill_bill import LayerSizes, PrefillBill, known_prefill_bills, layer_sizes, nearest_quote, timed_as
from kvjax.bill.step_bill import PROJECTED_GAIN, worthwhile
from kvjax.identity import fingerprint
from kvjax.model import Model
from kvjax.policies.choice import ByFields, Choice, ChoosesPrefill
from kvjax.policies.prefill.base import indexes_of
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.lists import TileLists
from kvjax.policies.prefill.naming import parse_recorded_prefill


@dataclasses.dataclass(frozen=True, repr=False)
class PrefillBound:
    """The data by which an `AutoPrefill` decides, for one model on one device.

    bills: those of this device. evidence: that about this model. unusable: policies that cannot use pages of this size, and why.
    """

    sizes: LayerSizes
    fingerprint: str
    device: str
    bills: tuple[PrefillBill, ...]
    evidence: tuple[PrefillEvidence, ...]
    unusable: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """A short text for the journals of jobs. It differs if the data differ by which a choice is made."""
        tables = hashlib.sha256(repr((self.bills, self.evidence, self.unusable)).encode()).hexdigest()[:16]
        return f"PrefillBound({self.sizes}; {self.fingerprint}; {self.device}; tables {tables})"


@dataclasses.dataclass(frozen=True)
class AutoPrefill(ByFields, ChoosesPrefill):
    """Chooses a prefill policy for each chunk. level: how close to dense, by name or numbers (`kvjax.bill.evidence.parse_level`).

    An engine binds it to its model. Pass `bound` to decide by other times or other evidence. A chunk is dense if there is no evidence for
    its length or no time on this device, and the choice says so.
    """

    queries_stand_alone = False  # the engine asks the chosen policy, not this one

    level: str = "assured"
    bound: PrefillBound | None = None

    def __post_init__(self):
        self.fidelity  # noqa: B018  so that a wrong level raises here, not at the first chunk

    @property
    def fidelity(self) -> Fidelity:
        """The level in numbers."""
        return parse_level(self.level)

    def bind(
        self, model: Model, *, page_size: int, dtype: str, device: str | None = None, tensor: int = 1, context: int = 1
    ) -> AutoPrefill:
        """This policy for a model, with the evidence of its fingerprint and the built-in times of a device (None: the first one here).

        Nothing is timed. A policy that is bound already keeps its times and its evidence.

        tensor, context: of the engine's mesh. Each device along tensor attends with its part of the heads, and exchanges the same for every
        policy, so times of layers with as many heads count. Over context, pages are brought together and queries dealt out, and nothing was
        timed so: ValueError there, if there is anything to choose.
        """
        if self.bound is not None:
            own = self.bound.sizes if tensor == 1 else layer_sizes(model.config.on_shards(tensor), dtype, page_size)
            return dataclasses.replace(self, bound=dataclasses.replace(self.bound, sizes=own))._checked(context)
        mark = fingerprint(model)
        device = jax.local_devices()[0].device_kind if device is None else device
        rows = tuple(row for row in recorded_prefill_evidence() if row.fingerprint == mark)
        sizes = layer_sizes(model.config.on_shards(tensor), dtype, page_size)
        bills = tuple(bill for bill in known_prefill_bills() if bill.device == device)
        unusable = _unusable(dict.fromkeys(row.policy for row in rows), page_size)
        return dataclasses.replace(self, bound=PrefillBound(sizes, mark, device, bills, rows, unusable))._checked(context)

    def _checked(self, context: int) -> AutoPrefill:
        if context > 1 and self.candidates:
            names = ",".join(("dense", *self.candidates))
            raise ValueError(
                f"prefill {self} chooses by times of one device, and no prompt was timed with its pages on context={context} devices: name "
                f"the policy that it is to choose (on record as {self.level}: {names}), or use a mesh with context=1"
            )
        return self

    @functools.cached_property
    def candidates(self) -> tuple[str, ...]:
        """Policies that may be chosen for some chunk: their evidence meets the level at some length, they are timed, and can use these
        pages."""
        bound = self._bound()
        timed = {name for bill in bound.bills for name, _ in bill.seconds}
        lengths = sorted({row.length for row in bound.evidence})
        met = dict.fromkeys(name for length in lengths for name in qualified(bound.evidence, self.fidelity, length))
        return tuple(name for name in met if timed_as(name) in timed and name not in dict(bound.unusable))

    def choose(self, start: int, end: int) -> Choice:
        """The choice for the chunk at positions [start, end) of its prompt, whether the prompt fills it or not. It uses evidence for
        prompts of `end` tokens, and times at the chunk's middle. Its seconds are those of attention, per layer and token."""
        return self._decide(start, end)

    def indexes(self):
        """The indexes of all candidates."""
        return () if self.bound is None else self._indexes

    @functools.cached_property
    def _indexes(self):
        return tuple(dict.fromkeys(spec for name in self.candidates for spec in indexes_of(parse_recorded_prefill(name))))

    def attend(self, query, layer, ctx):
        """An engine never calls this: it asks `choose` first."""
        raise RuntimeError("prefill auto chooses on the host, before a chunk: run it through an Engine, or name what auto.choose gives")

    def __str__(self) -> str:
        return "auto" if self.level == "assured" else f"auto:{self.level}"

    def describe(self) -> str:
        """The policy in words, for reports."""
        level = f"mean KL to dense at most {self.fidelity.kl:g} nats, at most {self.fidelity.loss:.0%} lost of what dense recalls"
        if self.bound is None:
            return f"{self} prefill ({level})"
        if not self.candidates:
            return f"{self} prefill ({level}; dense: {self.choose(0, 1).why})"
        return f"{self} prefill ({level}; dense, {', '.join(self.candidates)} by times of {self.bound.device})"

    @functools.cached_property
    def _decide(self):
        """`_choose`, which remembers its results, because every chunk calls it."""
        return functools.lru_cache(maxsize=4096)(functools.partial(_choose, self))

    def _bound(self) -> PrefillBound:
        if self.bound is None:
            raise RuntimeError(f"prefill {self} is not bound to a model: an Engine binds it, or auto.bind(model, page_size=128, dtype=...)")
        return self.bound


def _unusable(names, page_size: int) -> tuple[tuple[str, str], ...]:
    """Names of policies that refuse pages of `page_size` tokens, each with its message."""
    found = []
    for name in names:
        policy = parse_recorded_prefill(name)
        try:
            if isinstance(policy, TileLists):
                policy.check_pages(page_size)
        except ValueError as error:
            found.append((name, str(error)))
    return tuple(found)


def _choose(auto: AutoPrefill, start: int, end: int) -> Choice:
    bound, level = auto._bound(), auto.level
    if not bound.evidence:
        advice = "measure it with kvjax echo and record it with kvjax bill evidence-prefill"
        what = f"this model as it is loaded, in {bound.sizes.dtype} (fingerprint {bound.fingerprint})"
        return _dense(f"no prefill evidence is recorded for {what}; {advice}")
    met = qualified(bound.evidence, auto.fidelity, end)
    if not met:
        recorded = ", ".join(f"{length:,}" for length in sorted({row.length for row in bound.evidence}))
        return _dense(f"no prefill policy is on record as {level} for {end:,} tokens; recorded lengths: {recorded}")
    if not bound.bills:
        advice = f"kvjax bench prefill --ops --policies {','.join(met)} --json FILE, then kvjax bill fit-prefill FILE --json TABLE"
        return _dense(f"no prefill was timed on {bound.device}; on record as {level} are {', '.join(met)}; measure it: {advice}")
    names = [name for name in met if name not in dict(bound.unusable)]
    quotes = {name: nearest_quote(bound.bills, bound.sizes, name, start, end) for name in names}
    priced = {name: quote for name, quote in quotes.items() if quote is not None}
    if not priced:
        why = "; ".join(dict(bound.unusable).get(name, f"{name} was not timed at {end:,} tokens on {bound.device}") for name in met)
        return _dense(f"no policy that is on record as {level} can be chosen: {why}")
    # Relative to dense of the same bill, because times of different sizes cannot be compared.
    share = {"dense": 1.0} | {name: quote.seconds / quote.dense_seconds for name, quote in priced.items()}
    projected, error = [name for name, quote in priced.items() if quote.projection], max(quote.error for quote in priced.values())
    best, chosen = min(priced, key=share.__getitem__), worthwhile(share, error, projected)
    named = best if chosen == "dense" else chosen
    quote, covered = priced[named], getattr(parse_recorded_prefill(named), "dense_tokens", 0)
    if covered >= end:
        why = f"{named}, the fastest on record as {level}, is itself dense up to {covered:,} tokens"
        return Choice(DensePrefill(), why, quote.dense_seconds, quote.dense_seconds)
    times = (
        f"of those on record as {level}, {named} is the fastest on {bound.device}: {quote.seconds * 1e6:.3f} us of attention per token and "
        f"layer from token {start:,} to {end:,}, {quote.dense_seconds * 1e6:.3f} dense ({quote.dense_seconds / quote.seconds:.2f}x)"
    )
    if chosen == "dense":
        asked = max(error, PROJECTED_GAIN if best in projected else 0)
        return Choice(DensePrefill(), f"{times}, no gain above the {asked:.1%} that is asked for", quote.dense_seconds, quote.dense_seconds)
    sources = ", ".join(sorted({row.source for row in bound.evidence if row.policy == chosen}))
    return Choice(parse_recorded_prefill(chosen), f"{times}; evidence: {sources}", quote.seconds, quote.dense_seconds, quote.projection)


def _dense(why: str) -> Choice:
    return Choice(DensePrefill(), why)
