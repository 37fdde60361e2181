"""What the synchronous and the asynchronous client share: requests, answers, and which calls may be repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kvjax.client import arguments
from kvjax.client.arguments import instance, seconds, whole
from kvjax.client.errors import FailedPrecondition, InvalidArgument, SessionNotFound, Unavailable
from kvjax.client.wire import protocol, sampling_message
from pallas_kernels.core.messages import shown

REPEATABLE = frozenset(("AppendTokens", "CloseSession", "GetSessionInfo"))
"""Calls that may be sent again when the connection fails, because doing them twice does no more than doing them once.
`at` makes it so for AppendTokens. A second CreateSession or ForkSession would make a second session."""
FIRST_WAIT_S = 0.1
"""Before the first repetition; it doubles each time."""
LONGEST_S = 10.0**9
"""Longer than any process lives: no deadline."""


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """What `Session.info` tells, in process and through a server.

    history_tokens: all tokens so far. cached_tokens: those that prefill has written to the cache. dropped_tokens: those
    that the window has dropped from it. kv_live_bytes: bytes of the session's pages on the device; pages shared with a
    fork count in both. demoted: whether they are in host memory or on disk instead. generating: whether a generation is
    under way. policy: the decode policy. violations: of each invariant, in all sessions of the runtime, or the server.
    """

    session_id: str
    history_tokens: int
    cached_tokens: int
    dropped_tokens: int
    kv_live_bytes: int
    demoted: bool
    generating: bool
    policy: str
    violations: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Connection:
    """How a client reaches its server.

    Args:
        address: host and port.
        token: bearer token, where the server wants one.
        root_certificate: PEM of the certificate that signed the server's, for TLS; None: no TLS.
        timeout_s: deadline of each call but generations, in seconds; infinity: none.
        retries: how often a call is sent again when the connection fails, if that is safe.
    """

    address: str = "127.0.0.1:50051"
    token: str | None = None
    root_certificate: bytes | None = None
    timeout_s: float = 60.0
    retries: int = 5

    def __post_init__(self):
        if not isinstance(self.address, str) or not self.address:
            raise InvalidArgument(f'address must be text, as "127.0.0.1:50051", got {shown(self.address)}', field="address")
        if instance("token", self.token, (str,), "text") is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("token must be printable ASCII without line ends: strip what was read from a file", field="token")
        instance("root_certificate", self.root_certificate, (bytes,), "bytes of a PEM file")
        seconds("timeout_s", self.timeout_s)
        whole("retries", self.retries)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def options(self) -> list[tuple[str, int]]:
        """Options of the channel: no limit on what is received, and a lost connection is tried again soon."""
        return [
            ("grpc.max_receive_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]


def deadline(seconds: float | None) -> float | None:
    """What gRPC takes as a deadline. It takes infinity, and a time that its clock does not hold, for one that has
    passed."""
    return None if seconds is None or seconds > LONGEST_S else seconds


def create_request(token_ids: Sequence[int], policy: str | None) -> Any:
    """CreateSession's message. InvalidArgument for what it cannot hold."""
    if policy is not None and not (policy and arguments.is_text(policy)):
        raise InvalidArgument(f"a policy is a name that the server knows, or None for its first, got {shown(policy)}", field="policy")
    given = arguments.token_ids("token_ids", token_ids)
    return protocol().CreateSessionRequest(policy=policy or "", token_ids=given)


def append_request(session_id: str, token_ids: Sequence[int], at: int) -> Any:
    """AppendTokens' message. InvalidArgument for what it cannot hold, and where there is no token."""
    given = arguments.token_ids("token_ids", token_ids)
    if not given:
        raise InvalidArgument("no tokens: give at least one to append", field="token_ids")
    return protocol().AppendTokensRequest(session_id=session_id, at=at, token_ids=given)


def generate_request(session_id: str, at: int, fields: dict[str, Any]) -> Any:
    """Generate's message. InvalidArgument for a field that it does not have."""
    return protocol().GenerateRequest(session_id=session_id, at=at, sampling=sampling_message(fields))


def info_of(session_id: str, answer: Any) -> SessionInfo:
    """GetSessionInfo's answer."""
    names = [field.name for field in dataclasses.fields(SessionInfo) if field.name not in ("session_id", "violations")]
    return SessionInfo(session_id, **{name: getattr(answer, name) for name in names}, violations=dict(answer.violations))


def error_text(error: Exception, address: str, option: str) -> str:
    """What the user of a program reads of an error. gRPC's own message about a lost connection names its internals, so
    it is left out. option: by which the address is given."""
    if not isinstance(error, Unavailable):
        return str(error)
    if error.reason == "ending":
        return f"the server at {address} is ending, and takes no new call"
    return f"there is no server at {address}, or it has ended: start `kvjax serve`, or give {option}"


def check_open(closed: bool) -> None:
    """FailedPrecondition if a client was closed; gRPC's own error would be no SessionError."""
    if closed:
        raise FailedPrecondition("this client was closed: make another")


def may_repeat(name: str, error: Exception, attempt: int, retries: int) -> bool:
    """Whether to send a failed call again."""
    return name in REPEATABLE and isinstance(error, Unavailable) and attempt < retries


def was_closed_before(name: str, error: Exception, attempt: int) -> bool:
    """Whether an earlier attempt of CloseSession, whose answer was lost, has closed the session."""
    return name == "CloseSession" and attempt > 0 and isinstance(error, SessionNotFound) and error.reason == "close"


class Heard:
    """What has been heard of one generation, in the words of an in-process one (`kvjax.Session.generate`)."""

    def __init__(self):
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.prefill_tokens = self.dropped_tokens = self.history_tokens = 0

    def take(self, response: Any) -> list[int]:
        """The new tokens of a response, if it has any."""
        event = response.WhichOneof("event")
        if event == "tokens":
            found = list(response.tokens.token_ids)
            self.tokens += found
            return found
        if event == "truncated":
            self.dropped_tokens = response.truncated.dropped_tokens
        elif event == "finished":
            reasons = {protocol().FINISH_REASON_STOP: "stop", protocol().FINISH_REASON_LENGTH: "length"}
            self.finish_reason = reasons.get(response.finished.reason, "cancelled")
            self.history_tokens, self.prefill_tokens = response.finished.history_tokens, response.finished.prefill_tokens
        return []
