"""Policies that choose another policy on the host, before a step or a chunk runs. `auto` of `kvjax.cost_model` is one
of each kind.

An engine binds such a policy to its model once, when the engine is built or the policy first named, and runs what
`choose` returns.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from kvjax.cache.host_pool import FrameCounts
from kvjax.cache.index_spec import IndexSpec
from kvjax.model.protocols import Model
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.prefill.base import PrefillPolicy
from kvjax.policies.prefill.dense import DensePrefill


@dataclasses.dataclass(frozen=True)
class Choice:
    """The policy that runs, and why.

    seconds, dense_seconds: predicted for the choice and for dense; None if they were not compared. projection: why the
    prediction goes beyond what was measured, as in `kvjax.cost_model.Prediction`; empty if it does not.
    """

    policy: DecodePolicy | PrefillPolicy
    why: str
    seconds: float | None = None
    dense_seconds: float | None = None
    projection: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.policy}: {self.why}" + "".join(f"; PROJECTION: {reason}" for reason in self.projection)


class ByFields:
    """A dataclass that is pickled by its fields, without what was computed from them: for other processes."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class ChoosesDecode(abc.ABC):
    """A decode policy that chooses among others by lengths and batch. A subclass is also a decode policy."""

    @abc.abstractmethod
    def bind(self, model: Model, *, page_size: int, dtype: str, tensor: int = 1, context: int = 1) -> Self:
        """This policy, ready to choose for a model with pages of `page_size` tokens in `dtype`, on a mesh of these
        sizes. ValueError if it cannot choose there."""

    @abc.abstractmethod
    def indexes(self) -> tuple[IndexSpec, ...]:
        """What any policy that may be chosen needs sealing to build. Asked after `bind`."""

    @abc.abstractmethod
    def choose(self, lengths: Sequence[int], frames: FrameCounts | None = None) -> Choice:
        """The choice for sequences of these lengths in tokens, the current ones included. frames: those of an engine
        with pages in host memory; an engine without passes none."""

    @abc.abstractmethod
    def possible(self, longest: int, batch: int, frames: FrameCounts | None = None) -> tuple[DecodePolicy, ...]:
        """The policies that may be chosen for `batch` sequences of up to `longest` tokens. frames: as for `choose`."""


class ChoosesPrefill(abc.ABC):
    """A prefill policy that chooses another one for each chunk. A subclass is also a prefill policy."""

    @abc.abstractmethod
    def bind(self, model: Model, *, page_size: int, dtype: str, tensor: int = 1, context: int = 1) -> Self:
        """This policy, ready to choose for a model with pages of `page_size` tokens in `dtype`, on a mesh of these
        sizes. ValueError if it cannot choose there."""

    @abc.abstractmethod
    def indexes(self) -> tuple[IndexSpec, ...]:
        """What any policy that may be chosen needs sealing to build. Asked after `bind`."""

    @abc.abstractmethod
    def choose(self, start: int, end: int) -> Choice:
        """The choice for a chunk, positions [start, end) of its prompt."""


def possible_prefills(policy: PrefillPolicy | ChoosesPrefill, longest: int, chunk: int) -> tuple[PrefillPolicy, ...]:
    """The policies that may run prompts of up to `longest` tokens in chunks of `chunk`, however they are cut into
    calls.

    A policy that chooses is asked at lengths that double.
    """
    if not isinstance(policy, ChoosesPrefill):
        return (policy,) if policy.queries_stand_alone else (DensePrefill(), policy)
    last = -(-longest // chunk) * chunk
    ends = [*(chunk << power for power in range((last // chunk).bit_length() - 1)), last]
    return tuple(dict.fromkeys((DensePrefill(), *(policy.choose(end - chunk, end).policy for end in ends))))
