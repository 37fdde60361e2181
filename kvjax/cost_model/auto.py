"""Policies `auto`: the fastest policy of those with evidence that they meet a fidelity level, or dense.

For decoding, it is the one whose step the cost model predicts to be fastest; the host chooses from the lengths of the
sequences that are decoded together. For prefill, it is the one that was measured to be fastest, chosen for each chunk
of a prompt from the positions at which it starts and ends; the engine rounds them to whole chunks, so the choice does
not depend on how a prompt is cut, nor on other prompts. Then the chosen policy's step is compiled and run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache import OutOfPages
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import IndexSpec
from kvjax.cost_model.bytes import pages_on_host, step_bytes
from kvjax.cost_model.evidence import (
    Evidence,
    Fidelity,
    PrefillEvidence,
    known_evidence,
    parse_level,
    qualified,
    recorded_prefill_evidence,
)
from kvjax.cost_model.fitting import Cell, Key, fit
from kvjax.cost_model.predict import OWN, PROJECTED_GAIN, CostModel, known_cost_model, sizes_of, with_known, worthwhile
from kvjax.cost_model.prefill_times import LayerSizes, PrefillTimes, known_prefill_times, layer_sizes, nearest_quote, timed_as
from kvjax.engine.engine import Engine
from kvjax.engine.memory import memory_plan
from kvjax.engine.sampling import SamplingRows
from kvjax.engine.sequence import CachedSequence
from kvjax.model.config import ModelConfig
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Model
from kvjax.model.weight_formats import FormatOf, packing_of
from kvjax.policies.choice import ByFields, Choice, ChoosesDecode, ChoosesPrefill
from kvjax.policies.decode.base import DecodePolicy, Stateless
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.naming import name_of, parse, parse_recorded
from kvjax.policies.prefill.base import indexes_of
from kvjax.policies.prefill.dense import DensePrefill
from kvjax.policies.prefill.lists import TileLists
from kvjax.policies.prefill.naming import parse_recorded_prefill

logger = logging.getLogger(__name__)

_calibrated: dict[tuple[str, tuple[str, ...], int], CostModel] = {}
"""Cost models that this process has calibrated, by fingerprint, policies and page size. All engines on this device
share them."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The evidence and the cost model by which an `Auto` decides, for one model. If `cost` is None, every step is
    dense, and `lacking` says why. `lacking` is empty where no policy but dense meets the level, so that no cost model
    was needed. weights: how they are packed, as for `step_bytes`. tensor, context: of the engine's mesh."""

    config: ModelConfig
    dtype: str
    page_size: int
    fingerprint: str
    cost: CostModel | None
    evidence: tuple[Evidence, ...]
    lacking: str = ""
    weights: str | FormatOf | None = None
    tensor: int = 1
    context: int = 1

    @property
    def on_mesh(self) -> bool:
        """Whether steps run on several devices."""
        return self.tensor * self.context > 1


class _ByLevel(ByFields):
    """What both kinds of `auto` share. A subclass has the fields `level` and `bound`, and the names of its
    `candidates`."""

    def __post_init__(self):
        self.fidelity  # noqa: B018  so that a wrong level raises here, not at the first step

    @property
    def fidelity(self) -> Fidelity:
        """The level in numbers."""
        return parse_level(self.level)

    def indexes(self) -> tuple[IndexSpec, ...]:
        """The indexes of all candidates."""
        return () if self.bound is None else self._indexes

    @functools.cached_property
    def _indexes(self) -> tuple[IndexSpec, ...]:
        return tuple(dict.fromkeys(spec for name in self.candidates for spec in self._indexes_of(name)))

    @functools.cached_property
    def _decide(self) -> Callable[..., Choice]:
        """`_choose`, which remembers its results, because every step and chunk calls it."""
        return functools.lru_cache(maxsize=4096)(self._choose)

    def _bound(self) -> Any:
        if self.bound is None:
            raise RuntimeError(f"{self} is not bound to a model: an Engine binds it, or auto.bind(model, page_size=128, dtype=...)")
        return self.bound

    def _qualified(self, length: int) -> tuple[str, ...]:
        return qualified(self._bound().evidence, self.fidelity, length)

    def _ever_qualified(self) -> tuple[str, ...]:
        """Policies whose evidence meets the level at some length."""
        lengths = sorted({row.length for row in self._bound().evidence})
        return tuple(dict.fromkeys(name for length in lengths for name in self._qualified(length)))

    def _recorded_lengths(self) -> str:
        return "recorded lengths: " + ", ".join(f"{length:,}" for length in sorted({row.length for row in self._bound().evidence}))

    def _why(self, times: str, best: str, chosen: str, error: float, projected: Sequence[str]) -> str:
        """The end of a choice's reason. chosen: what `worthwhile` gave."""
        if chosen == "dense":
            return f"{times}, no gain above the {max(error, PROJECTED_GAIN if best in projected else 0):.1%} that is asked for"
        return f"{times}; evidence: {', '.join(sorted({row.source for row in self._bound().evidence if row.policy == chosen}))}"

    def __str__(self) -> str:
        return "auto" if self.level == "assured" else f"auto:{self.level}"


@dataclasses.dataclass(frozen=True)
class Auto(_ByLevel, ChoosesDecode, Stateless):
    """Chooses a decode policy for each step. level: how close to dense, by name or numbers
    (`kvjax.cost_model.evidence.parse_level`).

    An engine binds it to its model. Pass `bound` to decide by another cost model or other evidence. Without evidence
    for the model or the length, every step is dense, and the choice says so. The choice depends on the lengths of all
    sequences that `choose` gets. If results must not depend on other sequences bit for bit, name a policy instead.
    """

    level: str = "assured"
    bound: Bound | None = None

    def bind(self, model: Model, *, page_size: int, dtype: str, tensor: int = 1, context: int = 1) -> Auto:
        """This policy for a model. Evidence is looked up by the model's fingerprint. If some policy has evidence that
        it meets the level, a cost model is needed: the built-in cost model of this model and device, of launches of one
        step, or else a calibration. A calibration runs steps for about 20 seconds, once in a process for a model, its
        candidates and a page size.

        tensor, context: of the engine's mesh. Nothing is calibrated on a mesh of several devices: the cost model must
        have terms of a mesh (`kvjax.cost_model.exchanges.ExchangeTerm`). ValueError if a cost model is needed there and
        has none.

        A policy that is bound already keeps its cost model and its evidence.
        """
        if self.bound is not None:
            return _checked(dataclasses.replace(self, bound=dataclasses.replace(self.bound, tensor=tensor, context=context)))
        mark = fingerprint(model)
        evidence, weights = known_evidence(mark), packing_of(model.params)
        bound = Bound(model.config, dtype, page_size, mark, None, evidence, weights=weights, tensor=tensor, context=context)
        found = dataclasses.replace(self, bound=bound)
        if names := found.candidates:
            named = OWN if callable(weights) else weights
            cost, lacking = known_cost_model(jax.local_devices()[0].device_kind, model.config, dtype, named), ""
            same = sizes_of(model.config), dtype, named, None, 1
            # Another model's would be a guess, and one of longer launches leaves out the host's part, which may be the
            # longer one.
            if cost is None or (cost.sizes, cost.dtype, cost.weights, cost.cache_format, cost.steps_per_launch) != same:
                cost = None
            if cost is None and not bound.on_mesh:
                try:
                    cost = _calibrated.get((mark, names, page_size)) or calibrate(model, names, page_size=page_size)
                    _calibrated[mark, names, page_size] = cost
                except (ValueError, OutOfPages) as error:  # bad times, for instance on a busy machine, must not stop a job
                    lacking = f"there is no built-in cost model of this model on this device, and none can be measured: {error}"
                    logger.warning("%s: %s; every step is dense", self, lacking)
            cost = None if cost is None else with_known(cost, "bus")
            found = _checked(dataclasses.replace(self, bound=dataclasses.replace(bound, cost=cost, lacking=lacking)))
        return found

    @functools.cached_property
    def candidates(self) -> tuple[str, ...]:
        """Policies whose evidence meets the level at some length."""
        return self._ever_qualified()

    def choose(self, lengths: Sequence[int], frames: FrameCounts | None = None) -> Choice:
        """The choice for one step over sequences of these lengths in tokens, the current token of each included.

        frames: those of an engine with pages in host memory. Which pages lie there, and what is found in the hot
        buffer, is then computed from sizes and the cost model's share of hits, never from what the engine holds at the
        moment. Of these sequences as many count as its pool holds.
        """
        size = self._bound().page_size
        mean = sum(lengths) / len(lengths)
        # Lengths are rounded up to whole pages, so that most steps find their decision among the earlier ones.
        mean, longest, batch = int(-(-mean // size)) * size, -(-max(lengths) // size) * size, len(lengths)
        if frames is not None:
            batch = min(batch, max(1, (frames.device + frames.host) * size // mean))
        return self._decide(mean, longest, batch, frames)

    def possible(self, longest: int, batch: int, frames: FrameCounts | None = None) -> tuple[DecodePolicy, ...]:
        """The policies that may be chosen for `batch` sequences of up to `longest` tokens. frames: as for `choose`."""
        size = self._bound().page_size
        lengths = [size << power for power in range(max(1, longest // size).bit_length())]
        return tuple(dict.fromkeys(self.choose([min(length, longest)] * batch, frames).policy for length in (*lengths, longest)))

    def _indexes_of(self, name: str) -> tuple[IndexSpec, ...]:
        return parse_recorded(name).indexes()

    def select(self, query, layer, ctx, state):
        """An engine never calls this: it asks `choose` first."""
        raise RuntimeError("auto chooses on the host, before a step: run it through an Engine, or pass auto.choose(lengths).policy")

    def describe(self) -> str:
        """The policy in words, for reports."""
        level = f"mean KL to dense at most {self.fidelity.kl:g} nats, at most {self.fidelity.loss:.0%} lost of what dense finds"
        if self.bound is None:
            return f"{self} ({level})"
        names = self.candidates
        if self.bound.cost is None or not names:
            return f"{self} ({level}; dense, as {self.bound.lacking or 'nothing else is on record for this model'})"
        return f"{self} ({level}; dense, {', '.join(names)} by the cost model of {self.bound.cost.device})"

    def _choose(self, mean: int, longest: int, batch: int, frames: FrameCounts | None) -> Choice:
        bound, level = self.bound, self.level
        if not bound.evidence:
            packed = "" if bound.weights is None else ", with packed weights"
            another = "without --weights" if packed else "in another (--dtype bfloat16, say)"
            why = (
                f"no evidence is recorded for this model (fingerprint {bound.fingerprint}), so no budget can be trusted; evidence holds "
                f"for one dtype and one packing of weights, and this model runs in {bound.dtype}{packed}: load it {another}, or measure it "
                "with kvjax evaluate --record"
            )
            return Choice(Dense(), why)
        names, cost = self._qualified(longest), bound.cost
        if not names:
            return Choice(Dense(), f"nothing is on record as {level} for {longest:,} tokens; {self._recorded_lengths()}")
        if cost is None:
            return Choice(Dense(), bound.lacking)
        error, unknown, counted = cost.error, (), frames
        if frames is not None and cost.bus is None:
            counted = None
            unknown = (f"the cost model of {cost.device} has no term for pages in host memory, and counts them as on the device",)
        elif frames is not None:
            error = max(error, cost.bus.error)
        found, unpriced = {}, {}
        sizes = {"dtype": bound.dtype, "weights": bound.weights, "page_size": bound.page_size, "frames": counted}
        for name in ("dense", *names):
            try:
                found[name] = cost.predict(bound.config, name, mean, batch, **sizes, tensor=bound.tensor, context=bound.context)
            except (NotImplementedError, ValueError) as problem:
                unpriced[name] = str(problem)
        priced = [name for name in names if name in found]
        if "dense" in unpriced or not priced:
            why = f"on record as {level} are {', '.join(names)}, which the cost model of {cost.device} cannot price"
            return Choice(Dense(), f"{why}: {'; '.join(unpriced.values())}")
        if bound.on_mesh:
            error = max(error, cost.exchanges.error)
        seconds = {name: each.seconds for name, each in found.items()}
        projected = [name for name in priced if found[name].projection or unknown]
        best, chosen = min(priced, key=seconds.__getitem__), worthwhile(seconds, error, projected)
        named = best if chosen == "dense" else chosen
        times = (
            f"the cost model of {cost.device} gives {named}, the fastest on record as {level}, {seconds[named] * 1e3:.3f} ms against "
            f"{seconds['dense'] * 1e3:.3f} dense ({seconds['dense'] / seconds[named]:.3f}x) at {mean:,} tokens, batch {batch}"
        )
        if bound.on_mesh:
            times += f", tensor {bound.tensor} x context {bound.context}"
        if counted is not None:
            pages = batch * -(-mean // bound.page_size)
            times += f", {pages_on_host(frames, mean, batch, bound.page_size):,} of {pages:,} pages in host memory"
        why = self._why(times, best, chosen, error, projected)
        return Choice(parse_recorded(chosen), why, seconds[chosen], seconds["dense"], (*found[chosen].projection, *unknown))


def _checked(auto: Auto) -> Auto:
    """ValueError for a policy that would choose by times of one device on a mesh of several. Where nothing but dense is
    on record, no times are needed."""
    bound, names = auto.bound, auto.candidates
    if not bound.on_mesh or not names or (bound.cost is not None and bound.cost.exchanges is not None):
        return auto
    device = jax.local_devices()[0].device_kind if bound.cost is None else bound.cost.device
    named, mesh = ",".join(names), f"tensor {bound.tensor} x context {bound.context}"
    measured = (
        f"kvjax bench decode --shape MODEL --policies dense,{named} --tensor 1,{bound.tensor} --context 1,{bound.context} --json FILE"
    )
    raise ValueError(
        f"policy {auto} chooses by times of steps, and the mesh is {mesh}: no cost model of this model on {device} has a term of "
        f"exchanges. Name the policy that it is to choose (on record as {auto.level}: {named}), or measure them: {measured}, then "
        "kvjax cost fit FILE --json MODELS, and put MODELS into kvjax/cost_model/fitted of a checkout"
    )


@dataclasses.dataclass(frozen=True, repr=False)
class PrefillBound:
    """The data by which an `AutoPrefill` decides, for one model on one device.

    times: those of this device. evidence: that about this model. unusable: policies that cannot use pages of this size,
    and why.
    """

    sizes: LayerSizes
    fingerprint: str
    device: str
    times: tuple[PrefillTimes, ...]
    evidence: tuple[PrefillEvidence, ...]
    unusable: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """A short text for the journals of jobs. It differs if the data differ by which a choice is made."""
        tables = hashlib.sha256(repr((self.times, self.evidence, self.unusable)).encode()).hexdigest()[:16]
        return f"PrefillBound({self.sizes}; {self.fingerprint}; {self.device}; tables {tables})"


@dataclasses.dataclass(frozen=True)
class AutoPrefill(_ByLevel, ChoosesPrefill):
    """Chooses a prefill policy for each chunk. level: how close to dense, by name or numbers
    (`kvjax.cost_model.evidence.parse_level`).

    An engine binds it to its model. Pass `bound` to decide by other times or other evidence. A chunk is dense if there
    is no evidence for its length or no time on this device, and the choice says so.
    """

    queries_stand_alone = False  # the engine asks the chosen policy, not this one

    level: str = "assured"
    bound: PrefillBound | None = None

    def bind(
        self, model: Model, *, page_size: int, dtype: str, device: str | None = None, tensor: int = 1, context: int = 1
    ) -> AutoPrefill:
        """This policy for a model, with the evidence of its fingerprint and the built-in times of a device (None: the
        first one here).

        Nothing is timed. A policy that is bound already keeps its times and its evidence.

        tensor, context: of the engine's mesh. Each device along tensor attends with its part of the heads, and
        exchanges the same for every policy, so times of layers with as many heads count. Over context, pages are
        brought together and queries sharded, and nothing was timed so: ValueError there, if there is anything to
        choose.
        """
        if self.bound is not None:
            own = self.bound.sizes if tensor == 1 else layer_sizes(model.config.on_shards(tensor), dtype, page_size)
            return dataclasses.replace(self, bound=dataclasses.replace(self.bound, sizes=own))._checked(context)
        mark = fingerprint(model)
        device = jax.local_devices()[0].device_kind if device is None else device
        rows = tuple(row for row in recorded_prefill_evidence() if row.fingerprint == mark)
        sizes = layer_sizes(model.config.on_shards(tensor), dtype, page_size)
        times = tuple(each for each in known_prefill_times() if each.device == device)
        unusable = _unusable(dict.fromkeys(row.policy for row in rows), page_size)
        return dataclasses.replace(self, bound=PrefillBound(sizes, mark, device, times, rows, unusable))._checked(context)

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
        """Policies that may be chosen for some chunk: their evidence meets the level at some length, they are timed,
        and can use these pages."""
        bound = self._bound()
        timed = {name for each in bound.times for name, _ in each.seconds}
        return tuple(name for name in self._ever_qualified() if timed_as(name) in timed and name not in dict(bound.unusable))

    def choose(self, start: int, end: int) -> Choice:
        """The choice for the chunk at positions [start, end) of its prompt, whether the prompt fills it or not. It uses
        evidence for prompts of `end` tokens, and times at the chunk's middle. Its seconds are those of attention, per
        layer and token."""
        return self._decide(start, end)

    def _indexes_of(self, name: str) -> tuple[IndexSpec, ...]:
        return indexes_of(parse_recorded_prefill(name))

    def attend(self, query, layer, ctx):
        """An engine never calls this: it asks `choose` first."""
        raise RuntimeError("prefill auto chooses on the host, before a chunk: run it through an Engine, or name what auto.choose gives")

    def describe(self) -> str:
        """The policy in words, for reports."""
        level = f"mean KL to dense at most {self.fidelity.kl:g} nats, at most {self.fidelity.loss:.0%} lost of what dense recalls"
        if self.bound is None:
            return f"{self} prefill ({level})"
        if not self.candidates:
            return f"{self} prefill ({level}; dense: {self.choose(0, 1).why})"
        return f"{self} prefill ({level}; dense, {', '.join(self.candidates)} by times of {self.bound.device})"

    def _choose(self, start: int, end: int) -> Choice:
        bound, level = self._bound(), self.level
        if not bound.evidence:
            advice = "measure it with kvjax recall and record it with kvjax cost evidence"
            what = f"this model as it is loaded, in {bound.sizes.dtype} (fingerprint {bound.fingerprint})"
            return _dense(f"no prefill evidence is recorded for {what}; {advice}")
        met = self._qualified(end)
        if not met:
            return _dense(f"no prefill policy is on record as {level} for {end:,} tokens; {self._recorded_lengths()}")
        if not bound.times:
            advice = f"python -m benchmarks.prefill_ops --policies {','.join(met)} --json FILE, then kvjax cost fit FILE --json TABLE"
            return _dense(f"no prefill was timed on {bound.device}; on record as {level} are {', '.join(met)}; measure it: {advice}")
        names = [name for name in met if name not in dict(bound.unusable)]
        quotes = {name: nearest_quote(bound.times, bound.sizes, name, start, end) for name in names}
        priced = {name: quote for name, quote in quotes.items() if quote is not None}
        if not priced:
            why = "; ".join(dict(bound.unusable).get(name, f"{name} was not timed at {end:,} tokens on {bound.device}") for name in met)
            return _dense(f"no policy that is on record as {level} can be chosen: {why}")
        # Relative to dense of the same table, because times of different sizes cannot be compared.
        share = {"dense": 1.0} | {name: quote.seconds / quote.dense_seconds for name, quote in priced.items()}
        projected, error = [name for name, quote in priced.items() if quote.projection], max(quote.error for quote in priced.values())
        best, chosen = min(priced, key=share.__getitem__), worthwhile(share, error, projected)
        named = best if chosen == "dense" else chosen
        quote, covered = priced[named], getattr(parse_recorded_prefill(named), "dense_tokens", 0)
        if covered >= end:
            why = f"{named}, the fastest on record as {level}, is itself dense up to {covered:,} tokens"
            return Choice(DensePrefill(), why, quote.dense_seconds, quote.dense_seconds)
        times = (
            f"of those on record as {level}, {named} is the fastest on {bound.device}: {quote.seconds * 1e6:.3f} us of attention per token "
            f"and layer from token {start:,} to {end:,}, {quote.dense_seconds * 1e6:.3f} dense ({quote.dense_seconds / quote.seconds:.2f}x)"
        )
        why = self._why(times, best, chosen, error, projected)
        if chosen == "dense":
            return Choice(DensePrefill(), why, quote.dense_seconds, quote.dense_seconds)
        return Choice(parse_recorded_prefill(chosen), why, quote.seconds, quote.dense_seconds, quote.projection)


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


def _dense(why: str) -> Choice:
    return Choice(DensePrefill(), why)


# Calibration

CALIBRATION_SECONDS = 20.0
STEPS, ROUNDS = 8, 5
MAX_LENGTH, FRACTIONS = 65_536, (1, 2, 4, 8)
"""The longest sequence in tokens, if memory allows it, and the fractions of it that are timed too."""


def calibrate(
    model: Model, policies: Sequence[str], *, page_size: int = 128, batches: Sequence[int] = (1, 4), seconds: float = CALIBRATION_SECONDS
) -> CostModel:
    """Time dense and `policies` on this device, over a cache of zeros, and fit a cost model.

    seconds: how long it may take, including compilation, in equal shares for the batches. It takes longer only if
    compiling and one round of every policy at every length take longer. A batch is left out if half of its share is
    gone when its turn comes. Allocates pages for the longest sequences that fit in half of the free memory. ValueError
    if fewer than two lengths fit, or if time does not grow with bytes.
    """
    if any(isinstance(parse(name), ChoosesDecode) for name in policies):
        raise ValueError("a calibration times single policies, and auto chooses among several: name those")
    if not policies:
        raise ValueError("a calibration needs at least one policy besides dense, such as top:32")
    started = time.perf_counter()
    names = ["dense", *dict.fromkeys(name for policy in policies if (name := name_of(parse(policy))) != "dense")]
    cells: list[Cell] = []
    for number, batch in enumerate(batches):
        share = seconds / len(batches)
        if number and time.perf_counter() > started + share * (number + 0.5):
            break
        cells += _timed_cells(model, names, page_size, batch, started + share * (number + 1))
    took, weights = time.perf_counter() - started, packing_of(model.params)
    named = OWN if callable(weights) else weights
    key = Key(jax.local_devices()[0].device_kind, model.config.family, model.config.num_layers, model.config.compute_dtype, named)
    return fit(cells, model.config, key, source=f"a calibration of {took:.0f} s")


def _timed_cells(model: Model, names: Sequence[str], page_size: int, batch: int, until: float) -> list[Cell]:
    """Times every policy at every length, in rounds, until the clock shows `until`. All lengths have page tables of one
    width, so each policy is compiled once."""
    lengths = _timed_lengths(model, page_size, batch, names)
    pages = batch * (lengths[-1] // page_size)
    engine = Engine(model, "dense", policies=names, pages=pages, page_size=page_size, prefill_chunk=page_size, batch_buckets=(batch,))
    sequences = [CachedSequence([], lengths[-1] - STEPS, {group.name: [] for group in engine.spec.groups}) for _ in range(batch)]
    engine.sequences.update(sequences)
    engine.reserve(sequences, STEPS)
    rows = SamplingRows.of([None] * batch)
    found: dict[tuple[int, str], list[float]] = {}
    for number, length, name in itertools.product(range(ROUNDS + 1), lengths, names):
        if number > 1 and time.perf_counter() > until:
            break
        for sequence in sequences:
            sequence.length = length - STEPS
        tokens = np.zeros(batch, np.int32)
        started = time.perf_counter()
        for _ in range(STEPS):
            sampled = engine.decode_and_sample(sequences, tokens, rows, name)
            tokens = sampled.tokens
        jax.block_until_ready(sampled)
        if number:  # the first round compiles
            found.setdefault((length, name), []).append((time.perf_counter() - started) / STEPS)
    sizes = {"dtype": engine.dtype.name, "weights": packing_of(model.params), "page_size": page_size}
    return [
        Cell(length, batch, name, float(np.median(times)), step_bytes(model.config, parse(name), length, batch, **sizes))
        for (length, name), times in found.items()
    ]


def _timed_lengths(model: Model, page_size: int, batch: int, names: Sequence[str]) -> list[int]:
    """Lengths in tokens, ascending, each a number of whole pages: the longest that the model's positions and half of
    the free memory allow, and fractions of it."""
    indexes = tuple(dict.fromkeys(spec for name in names for spec in parse(name).indexes()))
    fit_in = memory_plan(model.config, page_size=page_size, indexes=indexes, weights_bytes=0).pages_that_fit // 2
    longest = min(min(MAX_LENGTH, model.config.max_positions) // page_size, fit_in // batch)
    lengths = sorted({longest // part * page_size for part in FRACTIONS} - {0})
    if len(lengths) < 2 or lengths[0] <= STEPS:
        raise ValueError(
            f"a calibration needs room for {batch} sequences of at least two pages of {page_size} tokens each, and has room for {longest}: "
            f"free memory, or give a smaller page_size; the model has {model.config.max_positions:,} positions"
        )
    return lengths
