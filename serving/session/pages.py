"""/metrics and /healthz over HTTP."""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING

from kvjax.client.errors import SessionError

if TYPE_CHECKING:
    from kvjax.serving.session.metrics import Metrics
    from kvjax.serving.session.server import Gate


def serve_pages(host: str, port: int, metrics: Metrics, gate: Gate) -> http.server.ThreadingHTTPServer:
    """Serve both pages in threads of their own, until `shutdown`. /metrics needs a bearer token where calls do; /healthz never does."""

    class Pages(http.server.BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self):
            if self.path == "/healthz":
                self._answer(200, b"ok\n")
            elif self.path != "/metrics":
                self._answer(404, b"there are /metrics and /healthz\n")
            else:
                try:
                    gate.enter(self.headers.get("authorization", ""))
                    self._answer(200, metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
                except SessionError as error:
                    self._answer(401 if error.code == "UNAUTHENTICATED" else 503, f"{error}\n".encode())

        def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing: scrapes are no news."""

    pages = http.server.ThreadingHTTPServer((host.strip("[]"), port), Pages)
    pages.daemon_threads = True
    threading.Thread(target=pages.serve_forever, name="kvjax pages", daemon=True).start()
    return pages
