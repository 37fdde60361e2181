"""What the tests of the scheduler share: one shape of engine, requests, and what becomes of one that runs alone."""

import dataclasses

import jax.numpy as jnp

from kvjax import Engine, Request, Sampling, Scheduler
from kvjax.policies.decode import AttentionMass, Stateless, largest_blocks

PAGES = 64


def make_engine(model):
    """As in test_generation, so that programs are compiled once."""
    return Engine(model, "dense", policies=["top:2", "quest:2"], pages=PAGES, page_size=128, prefill_chunk=128, batch_buckets=(1, 4))


def assert_nothing_is_left(engine):
    """Frees what is left, so that only one test fails."""
    left = engine.allocators["full"].free, set(engine.sequences), dict(engine._runs)
    for sequence in left[1]:
        engine.free(sequence)
    assert left == (PAGES, set(), {})


def asked(prompt, tokens=6, *, policy=None, priority=0, **sampling):
    return Request(prompt, Sampling(tokens, stop_token_ids=(), logprobs=True, **sampling), policy=policy, priority=priority)


def state_of(scheduler, handle):
    """What the scheduler knows of a request that has not ended."""
    (state,) = [each for each in scheduler._requests() if each.handle is handle]
    return state


def finish(scheduler, most=2000):
    """Step until nothing is left; the handles in the order in which they finished."""
    finished = []
    for _ in range(most):
        if scheduler.idle:
            return finished
        finished += scheduler.step()
    raise AssertionError(f"not done after {most} steps: {scheduler}")


def alone(engine, request, slots=4):
    """What becomes of it when nothing else runs, in the same batch bucket."""
    scheduler = Scheduler(engine, slots=slots)
    handle = scheduler.submit(request)
    finish(scheduler)
    return handle.completion


def until_preempted(scheduler):
    for _ in range(50):
        scheduler.step()
        if scheduler.preemptions:
            return
    raise AssertionError("nothing was suspended")


def pages_held(engine):
    return PAGES - engine.allocators["full"].free


BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Masses(Stateless):
    """A policy whose states are kept per sequence: the blocks of most mass so far, in prefill and in steps."""

    learns = AttentionMass(BLOCK)

    def init(self, spec, batch):
        return jnp.zeros((batch, spec.num_heads, spec.max_pages))

    def select(self, query, layer, ctx, state):
        scores = state.reshape(state.shape[0], layer.pages.kv_heads, -1, state.shape[2]).sum(axis=2)
        return largest_blocks(scores, ctx, k=1, sink=0, local=1, block_size=BLOCK), state

    def observe(self, mass, ctx, state):
        return state + mass


MASSES = Masses()
