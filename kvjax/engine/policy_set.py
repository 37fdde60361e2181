"""The policies of an engine: they are bound to its model, checked against its sizes, and asked which policy they
choose."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax.axes import Shards
from kvjax.cache.formats import CacheFormat, parse_cache_format
from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import without_covered
from kvjax.cache.page_tables import table_width
from kvjax.checks import listed
from kvjax.engine.page_eviction import kept_from_the_start
from kvjax.engine.policy_state import PolicyStates
from kvjax.engine.sequence_parallel import uneven_work
from kvjax.model.config import ModelConfig
from kvjax.model.protocols import Model
from kvjax.policies.choice import Choice, ChoosesDecode, ChoosesPrefill
from kvjax.policies.decode import DecodePolicy, check_budgets, parse
from kvjax.policies.decode.base import attends_by_list, chooses_over_devices, is_watched
from kvjax.policies.prefill import PrefillPolicy, indexes_of, parse_prefill
from pallas_kernels.core.messages import shown

logger = logging.getLogger(__name__)


def own_policies(config: ModelConfig) -> tuple[DecodePolicy, PrefillPolicy]:
    """The policies of a model where the caller names none: dense, or tokens:K with the K that its indexer was trained
    with."""
    counts = {mixer.index_topk for mixer in config.latent}
    if not counts:
        return parse("dense"), parse_prefill("dense")
    if len(counts) > 1:
        raise ValueError(f"the indexers of this model's layers choose {sorted(counts)} tokens: name a policy, as tokens:{max(counts)}")
    (k,) = counts
    return parse(f"tokens:{k}"), parse_prefill(f"tokens:{k}")


def programs_of(policy: DecodePolicy) -> tuple[DecodePolicy, ...]:
    """The policies whose programs run the steps of `policy`, the first step's first."""
    return (policy, policy.policy) if is_watched(policy) else (policy,)


class IndexNotBuilt(ValueError):
    """A policy scans an index that the engine's pages do not have."""


class PolicySet:
    """Decode policies and the prefill policy of an engine, and the indexes that sealing builds for them.

    policy, prefill: the engine's own; None: the model's (`own_policies`). policies: all that calls may name, `policy`
    first. named: those that were declared by a name, by that name. states: those of learning policies. reach: what
    every sequence keeps from its first token on (`kvjax.engine.page_eviction.kept_from_the_start`). last_choice,
    last_prefill_choice: the latest choices of policies such as `auto`. mesh: of the engine; None: one device.
    cache_format: of its pages, which the policies must be able to read. frames: those of the engine, for policies that
    choose; None where all pages lie on the device. ValueError for policies that do not fit the sizes or the layers.
    """

    def __init__(
        self,
        model: Model,
        policy: str | DecodePolicy | None,
        others: str | DecodePolicy | Iterable[str | DecodePolicy],
        prefill: str | PrefillPolicy | None,
        *,
        page_size: int,
        prefill_chunk: int,
        mesh: Mesh | None = None,
        cache_format: str | CacheFormat | None = None,
    ):
        self.cache_format = parse_cache_format(cache_format, model.config.compute_dtype)
        self.model, self.page_size, self.prefill_chunk = model, page_size, prefill_chunk
        self._shards = Shards(mesh)
        self._choosers: dict[ChoosesDecode, ChoosesDecode] = {}
        self._told: set[tuple[PrefillPolicy, bool]] = set()
        self.frames: FrameCounts | None = None
        self.last_choice: Choice | None = None
        self.last_prefill_choice: Choice | None = None
        self.policy = self._bound(own_policies(model.config)[0] if policy is None else policy)
        others = (others,) if isinstance(others, str) or hasattr(others, "select") else listed(others, "policies", "a name, or several")
        bound = [self._bound(each) for each in others]
        self.policies = tuple(dict.fromkeys((self.policy, *bound)))
        declared = zip((policy, *others), (self.policy, *bound), strict=True)
        self.named = {name.strip(): each for name, each in declared if isinstance(name, str)}
        sizes = {"page_size": page_size, "prefill_chunk": prefill_chunk, "tensor": self._shards.tensor}
        sizes |= {"packed": self.cache_format is not None}
        self.states = PolicyStates(self.policies, model.config, **sizes)
        self.prefill = own_policies(model.config)[1] if prefill is None else parse_prefill(prefill)
        for each in (*self.policies, self.prefill):
            self._check_mesh(each)
            self._check_format(each)
        _check_layers(f"prefill {self.prefill}", self.prefill, model.config)
        if isinstance(self.prefill, ChoosesPrefill):
            self.prefill = self.prefill.bind(model, **self._bound_to)
        scanned = [each.indexes() for each in self.policies] + [indexes_of(self.prefill)]
        self.indexes = without_covered(itertools.chain.from_iterable(scanned))
        _check_pages(f"prefill {self.prefill}", self.prefill, model.config, page_size)
        self.reach = kept_from_the_start(self.policies, self.prefill, page_size)
        # All that `find` checks was checked above. One that chooses is bound when it is named.
        self._found: dict[str | DecodePolicy | None, DecodePolicy] = {None: self.policy}
        self._found |= {each: each for each in self.policies if not isinstance(each, ChoosesDecode)}
        if said := self.uneven_work(self._shards.context):
            logger.warning("%s", said)

    def find(self, policy: str | DecodePolicy | None) -> DecodePolicy:
        """The policy of a call; None is the engine's own. ValueError if it scans an index that the engine does not
        build."""
        try:
            if policy in self._found:
                return self._found[policy]
        except TypeError:
            raise ValueError(f"a policy is a name, or an object of a hashable class of policies, got {shown(policy)}") from None
        chosen = self.policy if policy is None else self._bound(policy)
        missing = [spec for spec in chosen.indexes() if not any(built.covers(spec) for built in self.indexes)]
        if missing:
            raise IndexNotBuilt(
                f"policy {chosen} needs the index {' and the index '.join(map(str, missing))}, which this engine of "
                f"{', '.join(map(str, self.policies))} does not build: make the engine with Engine(..., policies=[{str(chosen)!r}])"
            )
        self.states.check_declared(chosen)
        self._check_mesh(chosen)
        self._check_format(chosen)
        self._found[policy] = chosen
        return chosen

    def choose(self, policy: DecodePolicy, lengths: Sequence[int]) -> DecodePolicy:
        """The policy that decodes sequences of these lengths in tokens: `policy`, or the one that it chooses. Logs a
        new choice."""
        if not isinstance(policy, ChoosesDecode):
            return policy
        choice = policy.choose(lengths, *self._sizes)
        if self.last_choice is None or choice.policy != self.last_choice.policy:
            logger.info("%s: %s", policy, choice)
        self.last_choice = choice
        return choice.policy

    def choose_prefill(self, policy: PrefillPolicy, start: int) -> PrefillPolicy:
        """The policy that prefills the chunk from position `start` on: `policy`, or the one that it chooses. Logs each
        kind of choice once."""
        if not isinstance(policy, ChoosesPrefill):
            return policy
        self.last_prefill_choice = choice = policy.choose(start, start + self.prefill_chunk)
        kind = choice.policy, choice.seconds is None
        if kind not in self._told:
            self._told.add(kind)
            logger.info("prefill %s: %s", policy, choice)
        return choice.policy

    def prefill_at(self, start: int) -> PrefillPolicy:
        """The policy that prefills the chunk from position `start` on, in a new prompt."""
        policy = self.prefill
        return policy.choose(start, start + self.prefill_chunk).policy if isinstance(policy, ChoosesPrefill) else policy

    def uneven_work(self, context: int) -> str:
        """`kvjax.engine.sequence_parallel.uneven_work` of the prefill policy, on so many devices."""
        if isinstance(self.prefill, ChoosesPrefill):
            return ""  # with context it has nothing but dense to choose
        return uneven_work(self.prefill, self.prefill_chunk, context, learns=bool(self.states.policies))

    def possible(self, policy: str | DecodePolicy | None, longest: int, batch: int) -> tuple[DecodePolicy, ...]:
        """The policies that may run for `batch` sequences of up to `longest` tokens when this one is named."""
        policy = self.find(policy)
        return policy.possible(longest, batch, *self._sizes) if isinstance(policy, ChoosesDecode) else programs_of(policy)

    @property
    def _sizes(self) -> tuple[FrameCounts, ...]:
        """What policies that choose are told besides lengths."""
        return () if self.frames is None else (self.frames,)

    def _bound(self, policy: str | DecodePolicy) -> DecodePolicy:
        """The policy of a name. A policy that chooses another, such as `auto`, is bound to this model, once."""
        policy = parse(policy)
        check_budgets(policy, table_width(-(-self.model.config.max_positions // self.page_size)) * self.page_size, self.page_size)
        _check_layers(f"policy {policy}", policy, self.model.config)
        _check_pages(f"policy {policy}", policy, self.model.config, self.page_size)
        if not isinstance(policy, ChoosesDecode):
            return policy
        if policy not in self._choosers:
            self._choosers[policy] = policy.bind(self.model, **self._bound_to)
        return self._choosers[policy]

    @property
    def _bound_to(self) -> dict[str, Any]:
        """What policies that choose are bound to, besides the model."""
        sizes = {"page_size": self.page_size, "dtype": self.model.config.compute_dtype}
        return sizes | {"tensor": self._shards.tensor, "context": self._shards.context}

    def _check_format(self, policy: DecodePolicy | PrefillPolicy) -> None:
        """NotImplementedError for a policy that cannot read packed pages yet, where the engine has some."""
        if self.cache_format is None:
            return
        said = f"{'policy' if isinstance(policy, DecodePolicy) else 'prefill'} {policy}"
        if isinstance(policy, ChoosesDecode | ChoosesPrefill):
            raise NotImplementedError(f"{said} chooses by times of pages that are not packed: name a policy, or leave out cache_format")
        if not isinstance(policy, DecodePolicy) and not getattr(policy, "reads_packed", False):
            raise NotImplementedError(f"{said} reads keys as numbers and does not unpack pages yet: use dense, or leave out cache_format")

    def _check_mesh(self, policy: DecodePolicy | PrefillPolicy) -> None:
        """ValueError for a policy that cannot run over the devices of the engine's mesh."""
        shards = self._shards
        if is_watched(policy) and shards.mesh is not None and jax.process_count() > 1:
            raise ValueError(f"policy {policy} is watched by one process, which reads the figures of all heads: leave out --max-missed")
        if shards.context == 1 or not isinstance(policy, DecodePolicy) or isinstance(policy, ChoosesDecode):
            return  # one that chooses has been bound to the mesh
        if not chooses_over_devices(policy) or not attends_by_list(policy):
            raise ValueError(
                f"policy {policy} does not say that it chooses the same on every device where pages are sharded (chooses_over_devices): "
                "use a mesh with context=1, or another policy"
            )


def _check_layers(said: str, policy: DecodePolicy | PrefillPolicy, config: ModelConfig) -> None:
    """ValueError for a policy that the model's layers cannot run. One that chooses another needs evidence and times,
    which models of latent attention do not have."""
    paged = len(config.attention) + len(config.latent)
    if getattr(policy, "needs_indexer", False) and len(config.latent) < paged:
        raise ValueError(f"{said} needs latent pages and a lightning indexer in every layer of attention, which this model does not have")
    chooses = isinstance(policy, ChoosesDecode | ChoosesPrefill)
    if config.latent and (chooses or getattr(policy, "needs_kv_heads", False) or indexes_of(policy)):
        own = " or ".join(dict.fromkeys(map(str, own_policies(config))))
        scanned = [f"scans the index {index.name}, not kept in" for index in indexes_of(policy)]
        needs = "has no evidence about" if chooses else (*scanned, "reads keys of each KV head, not kept in")[0]
        raise ValueError(f"{said} {needs} layers of latent attention, as this model has: leave it out for {own}, or name dense or window")


def _check_pages(said: str, policy: DecodePolicy | PrefillPolicy, config: ModelConfig, page_size: int) -> None:
    """ValueError for a policy that cannot read pages of this size, or that counts positions in the cache where the
    model does not allow it."""
    if hasattr(policy, "check_pages"):
        policy.check_pages(page_size)
    if not getattr(policy, "counts_in_cache", False):
        return
    if config.latent:
        raise ValueError(f"{said} turns rotated queries, which layers of latent attention do not have: leave out +remap")
    if (keys := policy.sink_tokens + policy.window_tokens) > config.max_positions:
        raise ValueError(f"{said} counts {keys:,} positions in the cache, and the model has {config.max_positions:,}: use a smaller window")
