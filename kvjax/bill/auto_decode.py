"""Policy `auto`: the policy whose step the bill predicts to be fastest, of those with evidence that they meet a fidelity level, or dense.

The host chooses from the lengths of the sequences that are decoded together. Then the chosen policy's step is compiled and run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax

from kvjax.bill.calibration import calibrate
from kvjax.bill.evidence import Evidence, Fidelity, parse_level, qualified, recorded_evidence
from kvjax.bill.step_bill import OWN, PROJECTED_GAIN, Bill, known_bill, sizes_of, with_known_bus, worthwhile
from kvjax.bill.volume import pages_on_host
from kvjax.cache import OutOfPages
from kvjax.cache.spanning import FrameCounts
from kvjax.identity import fingerprint
from kvjax.model import Model, ModelConfig
from kvjax.packing import FormatOf, packing_of
from kvjax.policies.choice import ByFields, Choice, ChoosesDecode
from kvjax.policies.decode.base import DecodePolicy, Stateless, chooses_over_devices
from kvjax.policies.decode.dense import Dense
from kvjax.policies.decode.naming import parse_recorded

logger = logging.getLogger(__name__)

_calibrated: dict[tuple[str, tuple[str, ...], int], Bill] = {}
"""Bills that this process has calibrated, by fingerprint, policies and page size. All engines on this device share them."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The evidence and the bill by which an `Auto` decides, for one model. If `bill` is None, every step is dense, and `lacking` says why.
    `lacking` is empty where no policy but dense meets the level, so that no bill was needed. weights: how they are packed, as for
    `step_bytes`. tensor, context: of the engine's mesh."""

    config: ModelConfig
    dtype: str
    page_size: int
    fingerprint: str
    bill: Bill | None
    evidence: tuple[Evidence, ...]
    lacking: str = ""
    weights: str | FormatOf | None = None
    tensor: int = 1
    context: int = 1

    @property
    def on_mesh(self) -> bool:
        """Whether steps run on several devices."""
        return self.tensor * self.context > 1


@dataclasses.dataclass(frozen=True)
class Auto(ByFields, ChoosesDecode, Stateless):
    """Chooses a decode policy for each step. level: how close to dense, by name or numbers (`kvjax.bill.evidence.parse_level`).

    An engine binds it to its model. Pass `bound` to decide by another bill or other evidence. Without evidence for the model or the length,
    every step is dense, and the choice says so. The choice depends on the lengths of all sequences that `choose` gets. If results must not
    depend on other sequences bit for bit, name a policy instead.
    """

    level: str = "assured"
    bound: Bound | None = None

    def __post_init__(self):
        self.fidelity  # noqa: B018  so that a wrong level raises here, not at the first step

    @property
    def fidelity(self) -> Fidelity:
        """The level in numbers."""
        return parse_level(self.level)

    def bind(self, model: Model, *, page_size: int, dtype: str, tensor: int = 1, context: int = 1) -> Auto:
        """This policy for a model. Evidence is looked up by the model's fingerprint. If some policy has evidence that it meets the level,
        a bill is needed: the built-in bill of this model and device, of launches of one step, or else a calibration. A calibration runs
        steps for about 20 seconds, once in a process for a model, its candidates and a page size.

        tensor, context: of the engine's mesh. Nothing is calibrated on a mesh of several devices: the bill must have terms of a mesh
        (`kvjax.bill.mesh_terms`). ValueError if a bill is needed there and has none.

        A policy that is bound already keeps its bill and its evidence.
        """
        if self.bound is not None:
            return _checked(dataclasses.replace(self, bound=dataclasses.replace(self.bound, tensor=tensor, context=context)))
        mark = fingerprint(model)
        evidence, weights = tuple(row for row in recorded_evidence() if row.fingerprint == mark), packing_of(model.params)
        bound = Bound(model.config, dtype, page_size, mark, None, evidence, weights=weights, tensor=tensor, context=context)
        found = dataclasses.replace(self, bound=bound)
        if names := found.candidates:
            named = OWN if callable(weights) else weights
            bill, lacking = known_bill(jax.local_devices()[0].device_kind, model.config, dtype, named), ""
            same = sizes_of(model.config), dtype, named, None, 1
            # Another model's bill would be a guess, and one of longer launches leaves out the host's part, which may be the longer one.
            if bill is None or (bill.sizes, bill.dtype, bill.weights, bill.cache_format, bill.steps_per_launch) != same:
                bill = None
            if bill is None and not bound.on_mesh:
                try:
                    bill = _calibrated.get((mark, names, page_size)) or calibrate(model, names, page_size=page_size)
                    _calibrated[mark, names, page_size] = bill
                except (ValueError, OutOfPages) as error:  # bad times, for instance on a busy machine, must not stop a job
                    lacking = f"there is no built-in bill of this model on this device, and none can be measured: {error}"
                    logger.warning("%s: %s; every step is dense", self, lacking)
            bill = None if bill is None else with_known_bus(bill)
            found = _checked(dataclasses.replace(self, bound=dataclasses.replace(bound, bill=bill, lacking=lacking)))
        return found

    @functools.cached_property
    def candidates(self) -> tuple[str, ...]:
        """Policies whose evidence meets the level at some length."""
        rows = self._bound().evidence
        lengths = sorted({row.length for row in rows})
        return tuple(dict.fromkeys(name for length in lengths for name in qualified(rows, self.fidelity, length)))

    def choose(self, lengths: Sequence[int], frames: FrameCounts | None = None) -> Choice:
        """The choice for one step over sequences of these lengths in tokens, the current token of each included.

        frames: those of an engine with pages in host memory. Which pages lie there, and what is found in the hot buffer, is then computed
        from sizes and the bill's share of hits, never from what the engine holds at the moment. Of these sequences as many count as its
        pool holds.
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

    def indexes(self):
        """The indexes of all candidates."""
        return () if self.bound is None else self._indexes

    @functools.cached_property
    def _indexes(self):
        names = self.candidates
        return tuple(dict.fromkeys(spec for name in names for spec in parse_recorded(name).indexes()))

    def select(self, query, layer, ctx, state):
        """An engine never calls this: it asks `choose` first."""
        raise RuntimeError("auto chooses on the host, before a step: run it through an Engine, or pass auto.choose(lengths).policy")

    def __str__(self) -> str:
        return "auto" if self.level == "assured" else f"auto:{self.level}"

    def describe(self) -> str:
        """The policy in words, for reports."""
        level = f"mean KL to dense at most {self.fidelity.kl:g} nats, at most {self.fidelity.loss:.0%} lost of what dense finds"
        if self.bound is None:
            return f"{self} ({level})"
        names = self.candidates
        if self.bound.bill is None or not names:
            return f"{self} ({level}; dense, as {self.bound.lacking or 'nothing else is on record for this model'})"
        return f"{self} ({level}; dense, {', '.join(names)} by the bill of {self.bound.bill.device})"

    @functools.cached_property
    def _decide(self):
        """`_choose`, which remembers its results, because every step calls it."""
        return functools.lru_cache(maxsize=4096)(functools.partial(_choose, self))

    def _bound(self) -> Bound:
        if self.bound is None:
            raise RuntimeError(f"{self} is not bound to a model: an Engine binds it, or auto.bind(model, page_size=128, dtype=...)")
        return self.bound


def _checked(auto: Auto) -> Auto:
    """ValueError for a policy that would choose by times of one device on a mesh of several. Where nothing but dense is on record, no times
    are needed."""
    bound, names = auto.bound, auto.candidates
    if not bound.on_mesh or not names or (bound.bill is not None and bound.bill.mesh is not None):
        return auto
    device = jax.local_devices()[0].device_kind if bound.bill is None else bound.bill.device
    named, mesh = ",".join(names), f"tensor {bound.tensor} x context {bound.context}"
    measured = (
        f"kvjax bench decode --shape MODEL --policies dense,{named} --tensor 1,{bound.tensor} --context 1,{bound.context} --json FILE"
    )
    raise ValueError(
        f"policy {auto} chooses by times of steps, and the mesh is {mesh}: no bill of this model on {device} has terms of a mesh. Name the "
        f"policy that it is to choose (on record as {auto.level}: {named}), or measure them: {measured}, then kvjax bill fit FILE --json "
        "BILLS, and put BILLS into kvjax/bill/bills of a checkout"
    )


def _why_unpriced(bound: Bound, name: str) -> str:
    """Why the bill cannot price steps of a policy on the mesh; "" if it can."""
    if not bound.bill.has_price(name):
        return f"{name} has no c1"
    if bound.context > 1 and not chooses_over_devices(parse_recorded(name)):
        return f"{name} does not choose over the devices of context"
    try:
        bound.bill.predict(bound.config, name, bound.page_size, **_mesh_sizes(bound))
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def _mesh_sizes(bound: Bound) -> dict[str, int]:
    return {"tensor": bound.tensor, "context": bound.context}


def _choose(auto: Auto, mean: int, longest: int, batch: int, frames: FrameCounts | None) -> Choice:
    bound, level = auto.bound, auto.level
    if not bound.evidence:
        packed = "" if bound.weights is None else ", with packed weights"
        another = "without --weights" if packed else "in another (--dtype bfloat16, say)"
        advice = (
            f"evidence holds for one dtype and one packing of weights, and this model runs in {bound.dtype}{packed}: load it {another}, or "
            "measure it with kvjax fidelity and kvjax bill evidence"
        )
        return Choice(
            Dense(), f"no evidence is recorded for this model (fingerprint {bound.fingerprint}), so no budget can be trusted; {advice}"
        )
    names = qualified(bound.evidence, auto.fidelity, longest)
    if not names:
        recorded = ", ".join(f"{length:,}" for length in sorted({row.length for row in bound.evidence}))
        return Choice(Dense(), f"nothing is on record as {level} for {longest:,} tokens; recorded lengths: {recorded}")
    if bound.bill is None:
        return Choice(Dense(), bound.lacking)
    unpriced = {name: why for name in ("dense", *names) if (why := _why_unpriced(bound, name))}
    priced = [name for name in names if name not in unpriced]
    if bound.on_mesh and ("dense" in unpriced or not priced):
        return Choice(Dense(), f"the bill of {bound.bill.device} cannot price steps on this mesh: {'; '.join(unpriced.values())}")
    if not priced:
        advice = f"measure it: {bound.bill.how_to_measure(','.join(names))}"
        unpriced = f"on record as {level} are {', '.join(names)}, for which the bill of {bound.bill.device} has no c1"
        return Choice(Dense(), f"{unpriced}; {advice}")
    sizes = {"dtype": bound.dtype, "weights": bound.weights, "page_size": bound.page_size} | _mesh_sizes(bound)
    error, unknown = max(bound.bill.error, bound.bill.mesh.error if bound.on_mesh else 0.0), ()
    if frames is not None and not bound.bill.knows_bus:
        unknown = (f"the bill of {bound.bill.device} has no terms for pages in host memory, and counts them as on the device",)
    elif frames is not None:
        sizes["frames"], error = frames, max(error, bound.bill.bus.error if bound.bill.bus else 0.0)
    found = {name: bound.bill.predict(bound.config, name, mean, batch, **sizes) for name in ("dense", *priced)}
    seconds = {name: each.seconds for name, each in found.items()}
    projected = [name for name in priced if found[name].projection or unknown]
    best, chosen = min(priced, key=seconds.__getitem__), worthwhile(seconds, error, projected)
    times = (
        f"the bill of {bound.bill.device} gives {best}, the fastest on record as {level}, {seconds[best] * 1e3:.3f} ms against "
        f"{seconds['dense'] * 1e3:.3f} dense ({seconds['dense'] / seconds[best]:.3f}x) at {mean:,} tokens, batch {batch}"
    )
    if bound.on_mesh:
        times += f", tensor {bound.tensor} x context {bound.context}"
    if "frames" in sizes:
        pages = batch * -(-mean // bound.page_size)
        times += f", {pages_on_host(frames, mean, batch, bound.page_size):,} of {pages:,} pages in host memory"
    if chosen == "dense":
        asked = max(error, PROJECTED_GAIN if best in projected else 0)
        why = f"{times}, no gain above the {asked:.1%} that is asked for"
    else:
        why = f"{times}; evidence: {', '.join(sorted({row.source for row in bound.evidence if row.policy == best}))}"
    return Choice(parse_recorded(chosen), why, seconds[chosen], seconds["dense"], (*found[chosen].projection, *unknown))
