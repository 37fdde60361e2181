"""A server of sessions in this process, and waiting for what its threads do."""

import contextlib
import subprocess
import time

from kvjax import SessionRuntime
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

WAIT = 60.0
"""Seconds after which a test fails."""


@contextlib.contextmanager
def serving(engine, limits=None, **options):
    """A server; nothing is left of its sessions afterwards. limits: of the runtime."""
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, observe=metrics.observe, **({"capacity": 8} | (limits or {})))
    server = Server(runtime, metrics, ServerOptions(port=0, **options))
    server.start()
    try:
        yield server
    finally:
        server.stop(drain_s=0.0)
        assert engine.allocators["full"].free == engine.allocators["full"].total
        assert not engine.sequences
        assert not {name for name in runtime.counts if name.startswith("inv")}


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def certificate(folder):
    """A chain and its key, for localhost, as PEM; also as files of a folder."""
    files = chain, key = folder / "chain", folder / "key"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {chain}"
    command += " -addext subjectAltName=DNS:localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    return tuple(path.read_bytes() for path in files)
