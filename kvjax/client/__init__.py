"""Clients of a kvjax server (`kvjax serve`): sessions over gRPC. Needs the extra `server`, but no device.

    from kvjax.client import Client

    with Client("127.0.0.1:50051") as client, client.create_session([1, 2, 3]) as session:
        for token in session.generate(max_new_tokens=20):
            ...

`python -m kvjax.client.chat` is a chat in a terminal, and `python -m kvjax.client.example` talks for twenty turns.
"""

from kvjax.client.aio import AsyncClient, AsyncSession
from kvjax.client.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SessionError,
    SessionNotFound,
    Unauthenticated,
    Unavailable,
)
from kvjax.client.sync import Client, Session
from kvjax.client.templates import from_openai_messages, tokens_for_chat
from kvjax.client.tokenizing import load_tokenizer

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "ResourceExhausted",
    "Session",
    "SessionError",
    "SessionNotFound",
    "Unauthenticated",
    "Unavailable",
    "from_openai_messages",
    "load_tokenizer",
    "tokens_for_chat",
]
