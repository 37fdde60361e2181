"""A server with a tiny model, for tests that kill it: `python killed_server.py FOLDER`. Prints its port when it
listens."""

import sys
import threading

from tiny_models import make_model

from kvjax import Engine, SessionRuntime
from kvjax.serving.server.grpc_server import Server
from kvjax.serving.server.metrics import Metrics
from kvjax.serving.server.options import ServerOptions

if __name__ == "__main__":
    engine = Engine(make_model(), "dense", pages=48, page_size=16, prefill_chunk=32, batch_buckets=(4,))
    metrics = Metrics()
    runtime = SessionRuntime(engine, slots=4, capacity=8, window=128, max_history=2**24, state=sys.argv[1], observe=metrics.observe)
    server = Server(runtime, metrics, ServerOptions(port=0))
    server.start()
    print(server.port, flush=True)
    threading.Event().wait()
