"""How a server is reached, and what it allows."""

from __future__ import annotations

import dataclasses
import ipaddress
import tempfile
from pathlib import Path
from typing import Any

from kvjax.checks import whole_number
from kvjax.serving.sessions.limits import MAX_STOP_TOKENS
from kvjax.serving.sessions.throttle import MESSAGES_PER_SECOND

MAX_TOKEN = 4096
"""Characters of a bearer token; a request's headers have room for it."""


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How a server is reached, and what it allows.

    Args:
        host: address to listen on. One that is not loopback needs `tokens`.
        port: 0 chooses a free one.
        tokens: bearer tokens, one of which every call must carry; none: calls need no token.
        certificate: PEM files of a certificate chain and its key, for TLS; None: no TLS.
        max_message_bytes: the largest message that it reads.
        max_tokens: the most token ids in one call.
        max_new_tokens: the most tokens that one call may generate.
        max_stop_tokens: the most stop tokens of one call.
        max_calls: calls at once; each takes a thread.
        calls_per_second: of each token, on average, in bursts of up to ten seconds' worth; None: no limit. Each message
            of a Converse counts.
        messages_per_second: of tokens, in all streams together; beyond that, a message has several tokens
        (`kvjax.serving.sessions.throttle`).
        stall_s: seconds after which a client is cut off that takes none of what is sent to it, does not finish its
            request over HTTP, or sends no first message of its call over gRPC. A Converse that has been silent for so
            long gives its place to another call where all places are taken.
        http_port: for /v1, /metrics and /healthz; None: none; 0 chooses a free one.
        model_name: the model's name in /v1.
        clip_max_tokens: whether max_tokens of a request to /v1 is lowered to what there is room for; False: the request
            is refused.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tokens: tuple[str, ...] = ()
    certificate: tuple[bytes, bytes] | None = None
    max_message_bytes: int = 16 * 2**20
    max_tokens: int = 2**20
    max_new_tokens: int = 32_768
    max_stop_tokens: int = MAX_STOP_TOKENS
    max_calls: int = 256
    calls_per_second: float | None = None
    messages_per_second: float = MESSAGES_PER_SECOND
    stall_s: float = 60.0
    http_port: int | None = None
    model_name: str = "kvjax"
    clip_max_tokens: bool = False

    def __post_init__(self):
        for name in ("port", "max_message_bytes", "max_tokens", "max_new_tokens", "max_stop_tokens", "max_calls"):
            whole_number(name, getattr(self, name), 0 if name == "port" else 1)
        if self.port and self.port == self.http_port:
            raise ValueError(f"--port and --http-port are both {self.port}: gRPC and HTTP need a port each")
        for number, token in enumerate(self.tokens, 1):
            if not 16 <= len(token) <= MAX_TOKEN or not token.isascii():
                said = f"a bearer token must have 16 to {MAX_TOKEN:,} characters, all of them ASCII"
                raise ValueError(f"{said}: token {number} has {len(token):,}")
        if not is_loopback(self.host) and not self.tokens:
            raise ValueError(f"{self.host} is not a loopback address, so calls must carry a bearer token: give --token-file")
        if self.certificate is not None:
            tls_context(*self.certificate)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(chain: bytes, key: bytes) -> Any:
    """The TLS context of PEM files, which Python reads only from disk. ValueError if they are none, or do not belong
    together."""
    import ssl

    def no_password() -> str:  # without this, Python would ask on the terminal
        raise ValueError("the key needs a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # only this user can read it
        paths = Path(folder, "chain"), Path(folder, "key")
        for path, content in zip(paths, (chain, key), strict=True):
            path.write_bytes(content)
        try:
            context.load_cert_chain(*paths, no_password)
        except (ssl.SSLError, ValueError) as error:
            said = getattr(error, "reason", None) or error
            raise ValueError(
                f"--tls-certificate and --tls-key must be PEM files of a certificate chain and its key, without a password: {said}"
            ) from None
    return context
