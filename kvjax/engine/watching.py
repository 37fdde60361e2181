"""Which program runs the steps of a watched policy: that of the policy alone, or the one that measures and reads more.

An unwatched job and the quiet steps of a watched one run the same program. The other one runs where a row is due, and
where a head of a row may read more than the policy's list. Both give a row that is neither the same bits, so a choice
costs time and changes no answer. It depends on counts of steps, never on the clock.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from kvjax.compilation import program
from kvjax.engine.decode_batch import DecodeBatch, Written, of_slot
from kvjax.engine.page_eviction import LAG
from kvjax.engine.sequence import Alarm, CachedSequence, States
from kvjax.policies.decode.base import DecodePolicy
from kvjax.policies.decode.watched import DUE, LEVEL, OWN, Watched


def program_of(policy: Watched, slots: DecodeBatch, written: Written, *, several: bool) -> DecodePolicy:
    """The policy whose program runs the next launch: `policy`, or the one that it watches.

    several: whether the launch has several steps. It then waits for what the launch before measured, so that all its
    steps can be quiet.
    """
    if any(_measured(policy, slots, written)):
        return policy
    alarms = [each.alarms[policy] for each in slots.live if policy in each.alarms]
    # A list, because every alarm counts launches.
    return policy if any([alarm.raised(waits=several) for alarm in alarms]) else policy.policy  # noqa: C419


def after_prompts(policy: Watched, slots: DecodeBatch, states: States) -> States:
    """The states of the slots, in which a sequence that was prefilled since its latest step is due."""
    rows = [row for row, each in zip(slots.rows, slots.live, strict=True) if each.logits is not None and policy in each.states]
    return _due(states, np.isin(np.arange(slots.size), rows)) if rows else states


def alarms_of(policy: Watched, slots: DecodeBatch, written: Written, states: States) -> dict[CachedSequence, Alarm]:
    """The alarms of the sequences that a launch has measured. written: how many of its tokens stay. states: after it.
    Call it before the sequences grow."""
    if policy.max_missed == 1 or not any(measured := _measured(policy, slots, written)):
        return {}
    flags = _raised(states)
    flags.copy_to_host_async()
    return {each: Alarm(flags, row, LAG - 1) for each, row, due in zip(slots.live, slots.rows, measured, strict=True) if due}


def _measured(policy: Watched, slots: DecodeBatch, written: Written) -> list[bool]:
    """Whether a launch that writes so many tokens of each sequence measures it."""
    return [_is_due(policy, each, of_slot(written, row)) for each, row in zip(slots.live, slots.rows, strict=True)]


def _is_due(policy: Watched, sequence: CachedSequence, tokens: int) -> bool:
    """Whether one of the next tokens is the first after a prompt, or at a position that is measured."""
    first = sequence.logits is not None or policy not in sequence.states
    return first or -sequence.length % policy.every < tokens


@program
def _due(states: States, rows: Bool[Array, "B"]) -> States:
    return jax.tree.map(lambda state: state.at[:, :, DUE].max(rows[:, None].astype(state.dtype)), states)


@program
def _raised(states: States) -> Bool[Array, "B"]:
    """Whether a head of each row reads more than the policy's list, in any layer."""
    return functools.reduce(jnp.logical_or, [(state[:, :, LEVEL] > OWN).any(axis=1) for state in states])
