"""What can go wrong with a session: the same types in process, in the server, and in clients.

Each names the gRPC status by which it travels. Source: ADR 0008, sections 2.6 and 2.10.
"""

from __future__ import annotations

from typing import ClassVar

MAX_PER_FIELD = 80
"""Characters of a field's name in an error."""


class SessionError(Exception):
    """The base of all. code: the name of the gRPC status. field: the field of the call that is wrong, "" for none.
    reason: for an ended session, how it ended: "close", "ttl", "lru", "failed", or "unknown" if no such session is
    remembered; else ""."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", reason: str = ""):
        super().__init__(message)
        # A name that a client made up may be megabytes long, and is logged and sent back.
        self.field, self.reason = field if len(field) <= MAX_PER_FIELD else f"{field[: MAX_PER_FIELD - 3]}...", reason


class SessionNotFound(SessionError):
    """There is no such session (any more). It never comes back by itself: create a new one."""

    code = "NOT_FOUND"


class FailedPrecondition(SessionError):
    """The session is not in the state that the call needs, or an invariant was violated, which closes it."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(SessionError):
    """Too little memory, too many sessions, or a limit of the server."""

    code = "RESOURCE_EXHAUSTED"


class InvalidArgument(SessionError):
    """A field of the call has a wrong value."""

    code = "INVALID_ARGUMENT"


class Cancelled(SessionError):
    """The call was cancelled, or its session was closed meanwhile."""

    code = "CANCELLED"


class DeadlineExceeded(SessionError):
    """The call took longer than it was allowed to."""

    code = "DEADLINE_EXCEEDED"


class Unavailable(SessionError):
    """The server is not there, or is shutting down."""

    code = "UNAVAILABLE"


class Unauthenticated(SessionError):
    """The bearer token is missing or wrong."""

    code = "UNAUTHENTICATED"


BY_CODE: dict[str, type[SessionError]] = {each.code: each for each in SessionError.__subclasses__()}
"""The type of each status; a status that is not here is a plain SessionError."""
