"""Simulated agents, each with one session at a time, through the Python client. What they do follows the figures of a
published trace.

Source: TraceLab (arXiv 2606.30560; tracelab.cs.washington.edu; github.com/uw-syfi/TraceLab): 4,265 sessions of coding
agents with 357,161 steps, collected from October 2025 to June 2026. `TRACE` names each figure. It gives percentiles, so
each quantity is drawn from the log-normal distribution with this median and 90th percentile.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvjax.client import Client, Session
from kvjax.client.errors import SessionError

LONGEST_START_S = 900.0
"""In which all agents must have prefilled the histories that they begin with."""
Z90 = 1.2815515655446004
"""The 90th percentile of the normal distribution."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A log-normal distribution, by its median and 90th percentile."""

    p50: float
    p90: float

    def draw(self, random: np.random.Generator) -> float:
        """One value."""
        return self.p50 * math.exp(random.normal() * math.log(self.p90 / self.p50) / Z90)


@dataclasses.dataclass(frozen=True)
class Trace:
    """Figures of the trace.

    tool_s: latency of a tool call, in seconds. human_s: wait for the next message of the user. tool_steps: share of
    steps that a tool's result starts; the others follow a message of the user. append: new tokens of a step (Claude,
    prefixes of 64K to 128K tokens; the trace counts the model's replayed output among them). output: tokens that a step
    generates. Its mean in the trace is 523 (186.9M tokens in 357,161 steps). We found no percentiles, so its spread is
    ASSUMED to be that of `append`, around this mean.
    """

    tool_s: Spread = Spread(0.3, 13.6)
    human_s: Spread = Spread(84.0, 1236.0)
    tool_steps: float = 73.6 / (73.6 + 8.9)
    append: Spread = Spread(793.0, 3700.0)
    output: Spread = Spread(254.0, 1185.0)


TRACE = Trace()


@dataclasses.dataclass(frozen=True)
class Work:
    """What one agent does. times: factor of all waits. longest_wait_s: of waits after that. tokens: factor of all
    numbers of tokens. history: the longest history; an agent that would exceed it closes its session and begins
    another. vocab_size: tokens are random. repeat_s: after so many seconds an agent draws the same turns and waits once
    more, so that each bucket of a run has the same work, and its latencies do not differ because other turns were
    drawn. Its session goes on."""

    times: float
    longest_wait_s: float
    tokens: float
    history: int
    vocab_size: int
    repeat_s: float
    trace: Trace = TRACE


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Of one turn: tokens to append, tokens to generate, and seconds to wait before it."""

    appended: int
    output: int
    wait_s: float


def drawn(work: Work, agent: int, turn: int) -> Drawn:
    """What an agent's turn is: the same for the same numbers, whatever came before."""
    random, trace = np.random.default_rng([7, agent, turn]), work.trace
    appended, output = (token_count(work, spread, random) for spread in (trace.append, trace.output))
    spread = trace.tool_s if random.random() < trace.tool_steps else trace.human_s
    return Drawn(appended, output, min(work.longest_wait_s, work.times * spread.draw(random)))


def token_count(work: Work, spread: Spread, random: np.random.Generator) -> int:
    """A number of tokens: at least 1, at most a quarter of the longest history."""
    return max(1, min(work.history // 4, round(work.tokens * spread.draw(random))))


@dataclasses.dataclass(frozen=True)
class Turn:
    """One append and one generation. at: when it began, in seconds of `time.monotonic`. first_s: to the first token,
    seconds_: to the last, both from the beginning of the append. gaps: between tokens, as the client gets them. The
    tokens of one message come together."""

    at: float
    first_s: float
    whole_s: float
    gaps: tuple[float, ...]
    appended: int
    prefilled: int

    @property
    def generated(self) -> int:
        """Tokens that were generated."""
        return len(self.gaps) + 1


class Agent(threading.Thread):
    """One agent, until `stop` is set. turns, errors: what happened. sessions: how many it began. tokens: of its
    session's history, at least as many as the server holds (what a call may add counts before the call); 0 for none. It
    prefills the history that it begins with, and then waits at `start`, so that it is in the middle of its session when
    the clock starts."""

    def __init__(self, number: int, address: str, work: Work, start: threading.Barrier, stop: threading.Event):
        super().__init__(name=f"agent {number}", daemon=True)
        self.turns: list[Turn] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self.sessions, self._changes = 0, collections.deque([(0.0, 0)])
        self._address, self._work, self._start_all, self._stopped = address, work, start, stop
        self._number, self._random = number, np.random.default_rng([7, number])

    @property
    def tokens(self) -> int:
        """Of the session's history, with what a call under way may add."""
        return self._changes[-1][1]

    @tokens.setter
    def tokens(self, count: int) -> None:
        self._changes.append((time.monotonic(), count))

    def most_tokens(self, since: float) -> int:
        """The most tokens since a time of `time.monotonic`: a session may begin and end between two looks. Forgets what
        was before."""
        while len(self._changes) > 1 and self._changes[1][0] <= since:
            self._changes.popleft()
        return max(count for _, count in tuple(self._changes))

    def run(self) -> None:
        """Work until told to stop."""
        random, work, began = self._random, self._work, None
        with Client(self._address) as client:
            first = int(random.uniform(0.1, 0.9) * work.history)
            while not self._stopped.is_set():
                try:
                    self.sessions += 1
                    self.tokens = first
                    with client.create_session(self._tokens(first)) as session:
                        self.tokens = session.length
                        if began is None:
                            list(session.generate(max_new_tokens=2, ignore_eos=True))
                            self.tokens = session.length
                            self._start_all.wait(LONGEST_START_S)
                            began, turn = time.monotonic(), 0
                        while session.length < 0.95 * work.history and not self._stopped.is_set():
                            if time.monotonic() - began >= work.repeat_s:
                                began, turn = began + work.repeat_s, 0
                            this = drawn(work, self._number, turn)
                            turn += 1
                            self._stopped.wait(this.wait_s)
                            if not self._stopped.is_set():
                                self._turn(session, this)
                    self.tokens = 0  # after the session was closed
                except SessionError as error:
                    self.errors[type(error).__name__] += 1
                    self._stopped.wait(1.0)
                first = token_count(work, work.trace.append, random)

    def _turn(self, session: Session, this: Drawn) -> None:
        room = self._work.history - session.length
        appended = min(this.appended, max(1, room // 2))
        output = min(this.output, max(1, room - appended))
        began = latest = time.monotonic()
        self.tokens = session.length + appended + output
        session.append(self._tokens(appended))
        stream, gaps = session.generate(max_new_tokens=output, ignore_eos=True), []
        for _ in stream:
            now = time.monotonic()
            gaps.append(now - latest)
            latest = now
        self.tokens = session.length
        self.turns.append(Turn(began, gaps[0], latest - began, tuple(gaps[1:]), appended, stream.prefill_tokens))

    def _tokens(self, count: int) -> list[int]:
        return self._random.integers(0, self._work.vocab_size, count).tolist()


def run_agents(count: int, address: str, work: Work, seconds: float, poll: Callable[[list[Agent]], Any]) -> list[Agent]:
    """Let `count` agents work for so long. poll: called with them at the beginning, about once a second, and at the
    end. RuntimeError if an agent does not end, or failed."""
    start, stop, until = threading.Barrier(count + 1), threading.Event(), time.monotonic() + LONGEST_START_S
    agents = [Agent(number, address, work, start, stop) for number in range(count)]
    for agent in agents:
        agent.start()
    while start.n_waiting < count:
        if time.monotonic() > until:
            raise RuntimeError(f"{count - start.n_waiting} agents could not begin their sessions in {LONGEST_START_S:g} s")
        time.sleep(0.01)
    poll(agents)
    start.wait()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        poll(agents)
        time.sleep(min(1.0, left))
    stop.set()
    for agent in agents:
        agent.join(120.0)
        if agent.is_alive():
            raise RuntimeError(f"{agent.name} waits for the server for more than two minutes")
    poll(agents)
    return agents
