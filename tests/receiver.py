"""A webhook receiver over real HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Receiver", "receiving"]


@dataclass
class Receiver:
    url: str
    notices: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Bodies that were none of theirs, and why."""

    def take(self, path: str, kind: str, body: bytes) -> None:
        """Store a notice. Raises ValueError."""
        if kind != "application/json":
            raise ValueError(f"{path}: {kind}")
        said = json.loads(body)
        if path == "/hook":
            self.notices.append(said)
        else:
            raise ValueError(path)


@contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                receiver.take(self.path, self.headers["Content-Type"], body)
                self.send_response(200)
            except Exception as error:  # whatever it is, it is none of theirs
                receiver.wrong.append(f"{error!r}: {body[:500]!r}")
                self.send_response(400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
