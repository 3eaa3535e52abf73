"""Who is told by a daemon, of somebody else's making: a receiver of OpenTelemetry traces and a webhook, over real HTTP.

What a body holds is judged by OpenTelemetry's own messages (opentelemetry-proto): a field that they do not have is an error.
"""

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Receiver", "Told", "receiving"]

IDS = ("traceId", "spanId", "parentSpanId")
"""OTLP writes them in hexadecimal, where protobuf's JSON has base64 (opentelemetry.io/docs/specs/otlp)."""


def _facts(attributes: Any) -> dict[str, Any]:
    def value(each: KeyValue) -> Any:
        kind = each.value.WhichOneof("value")
        return getattr(each.value, kind) if kind else None

    return {each.key: value(each) for each in attributes}


@dataclass(frozen=True)
class Told:
    span: Span
    facts: dict[str, Any]
    resource: dict[str, Any]
    """Of whom it is."""


@dataclass
class Receiver:
    url: str
    spans: list[Told] = field(default_factory=list)
    notices: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Bodies that were none of theirs, and why."""

    def take(self, path: str, kind: str, body: bytes) -> None:
        """Raises ValueError."""
        if kind != "application/json":
            raise ValueError(f"{path}: {kind}")
        said = json.loads(body)
        if path == "/hook":
            self.notices.append(said)
        elif path == "/v1/traces":
            self.spans += _read(said)
        else:
            raise ValueError(path)

    def traces(self) -> dict[bytes, list[Told]]:
        found: dict[bytes, list[Told]] = {}
        for told in list(self.spans):
            found.setdefault(told.span.trace_id, []).append(told)
        return found


def _read(said: dict[str, Any]) -> list[Told]:
    for resource in said["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                span.update({name: b64encode(bytes.fromhex(span[name])).decode() for name in IDS if name in span})
    request = json_format.ParseDict(said, ExportTraceServiceRequest())
    return [
        Told(span, _facts(span.attributes), _facts(resource.resource.attributes))
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


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
