"""Many tokens by teams of CTAs, on emulated threads: against the reference, with the bits of one token, with bugs
planted."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax.numpy as jnp
import paging
import projection_suite
import pytest
from emulator.kernels import kernels
from emulator.lanes import FAULTS
from projection_suite import Case, compare

from pallas_kernels.core import dispatch
from pallas_kernels.hopper.threads import lane_copies, lanes
from pallas_kernels.matmul.project_tokens import mosaic_gpu, project_tokens, team_tiles
from pallas_kernels.matmul.project_tokens.team_tiles import TeamShape, TeamTiles

CASES = {
    "one tile": Case(tokens=9, width=1088, features=(46,)),
    "a gate of two tiles": Case(tokens=20, width=640, features=(160, 160), norm=True, gated="silu"),
    "heads that turn": Case(tokens=24, width=448, features=(224, 32, 32), norm=True, biased=True, half=16, rotated=2),
    "one chunk a tile": Case(tokens=17, width=64, features=(800,), residual=True, norm_offset=1.0, norm=True),
    "tokens in phases": Case(tokens=12, width=7 * 512, features=(300,), out_dtype="float32", norm=True),
    "64 tokens in float16": Case(tokens=64, width=576, features=(90,), dtype="float16"),
}


@functools.cache
def arguments(name: str) -> tuple:
    case = CASES[name]

    def matrix(rng, features):
        numbers = jnp.asarray(rng.standard_normal((features, case.width)), case.dtype)
        return numbers * jnp.asarray(rng.uniform(0.5, 2, (features, 1)) * case.width**-0.5, case.dtype)

    return projection_suite.arguments(case, name, matrix)


@functools.cache
def expected(name: str) -> tuple:
    positional, keywords = arguments(name)
    return project_tokens(*positional, **keywords, implementation="reference")


@pytest.fixture
def emulated(monkeypatch):
    """The kernel on threads, by two teams with low tiles, so that there are several."""
    monkeypatch.setattr(dispatch, "multiprocessors", lambda: 24)
    monkeypatch.setattr(mosaic_gpu, "MAX_TOKENS_ALONE", 8)
    monkeypatch.setattr(team_tiles, "MOST_ROWS", (128,))

    def run(name: str, positional, keywords):
        room = team_tiles.LEAST_DEPTH * 2 * 128 * CASES[name].tokens if name == "tokens in phases" else team_tiles.TOKEN_BYTES
        with kernels(), mock.patch.object(team_tiles, "TOKEN_BYTES", room):
            return paging.implementation("project_tokens", "mosaic_gpu")(*positional, **keywords)

    return run


def check(tools, emulated, name: str, tokens=(0,)) -> None:
    """Each result is near the reference, and these tokens have the bits that they have alone."""
    found = emulated(name, *arguments(name))
    compare(found, expected(name), {"bfloat16": 8e-3, "float16": 1e-3}[CASES[name].dtype])
    for token in tokens:
        for a, b in zip(found, emulated(name, *projection_suite.of_token(*arguments(name), token)), strict=True):
            tools.assert_same_bits(a[token : token + 1], b)


@pytest.mark.quick("a gate of two tiles", "one chunk a tile", "tokens in phases")
@pytest.mark.parametrize("name", CASES)
def test_emulated_it_matches_the_reference_and_has_the_bits_of_one_token(tools, emulated, name):
    check(tools, emulated, name, (0, 8, CASES[name].tokens - 1))


def _of(owner, name: str, make):
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


PLANTED = {
    "copies are not awaited": _of(lane_copies, "wait_for_copies", lambda f: lambda groups: f(groups + 1)),
    "no barrier before tokens are read": _of(lanes, "cta_barrier", lambda f: lambda threads: None),
    "nobody waits for sums": _of(TeamTiles, "_finish_sent", lambda f: _without(f, "cluster_wait")),
    "sums are sent too early": _of(TeamTiles, "_finish", lambda f: _without(f, "cluster_wait")),
    "nothing is sent": _of(lanes, "store_cluster", lambda f: lambda *args: None),
    "all sum the same inputs": _of(TeamTiles, "part", lambda f: property(lambda self: self.rank * 0)),
    "parts in reverse": _of(TeamTiles, "part", lambda f: property(lambda self: 7 - self.rank)),
    "the next phase over this one": _of(TeamShape, "phase", lambda f: property(lambda s: f.fget(s) - (not s.resident))),
    "the norm twice": _of(TeamTiles, "_multiply_by_norm", lambda f: lambda self, n: (f(self, n), f(self, n))),
    "the norm of another chunk": _of(TeamTiles, "_multiply_by_norm", lambda f: lambda self, n: f(self, n + 1)),
    "squares of the first tokens": _of(TeamTiles, "tokens_here", lambda f: property(lambda self: (self.rank * 0, 8))),
    "a tile's last sums are lost": _of(TeamTiles, "_totals", lambda f: lambda self, buffer, row, token: f(self, buffer, row * 0, token)),
}


def _without(function, name: str):
    """The function while `lanes` does nothing under this name."""

    def run(*args):
        with mock.patch.object(lanes, name, return_value=None):
            return function(*args)

    return run


@pytest.mark.quick("copies are not awaited", "nobody waits for sums", "parts in reverse")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(tools, emulated, monkeypatch, bug):
    PLANTED[bug](monkeypatch)
    for name in CASES:
        try:
            check(tools, emulated, name)
        except (AssertionError, *FAULTS):  # a wrong result, or what a GPU would leave undefined
            return
    pytest.fail("the suite accepts this bug")


def test_fewer_teams_than_fit_into_whole_groups_of_multiprocessors():
    """16 clusters of 8 need 128 of 132 multiprocessors, but an H200 holds 15 at once: the last would run alone."""
    sizes = {"features": (512,), "half": 0, "rotated": 0, "gated": None, "norm_eps": None, "norm_offset": 0.0, "biased": False}
    s = TeamShape(64, 3584, **sizes, residual=False, dtype="bfloat16", out_dtype="bfloat16", ctas=132)
    assert s.teams == 15
    assert dataclasses.replace(s, ctas=8).teams == 1
