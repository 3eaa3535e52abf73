"""A double of an S3 server, for tests and benches: objects of one bucket in memory, over HTTP. It checks no signature, but that the
bytes have the hash that was signed."""

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

__all__ = ["S3Double", "s3_double"]

BUCKET = "bucket"
PAGE = 3
"""Keys in one answer to a listing: few, so that pages are turned."""


class S3Double(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: int = PAGE) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.page, self.lock = page, threading.Lock()
        self.down = False
        """True: every request is answered with 503."""
        self.overwrites = False
        """True: it overwrites, whatever the request says."""
        self.conflicts = 0
        """Number of conditional puts to reject, as if two came at once."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Double

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"ETag": '"1"', "Last-Modified": "Mon, 23 Nov 2026 00:00:00 GMT", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _key(self) -> str | None:
        """Return the key; None, after an answer, if the bucket does not exist, or the server is down."""
        if self.server.down:
            self._answer(503)
            return None
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        if bucket != BUCKET:
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            return None
        return key

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if (key := self._key()) is not None:
            self._answer(*self._put(key, body))

    def _put(self, key: str, body: bytes) -> tuple[int, bytes]:
        signed = self.headers.get("x-amz-content-sha256", "")
        if re.fullmatch("[0-9a-f]{64}", signed) and hashlib.sha256(body).hexdigest() != signed:
            return 400, b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>"
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and self.server.conflicts:
                self.server.conflicts -= 1
                return 409, b"<Error><Code>ConditionalRequestConflict</Code></Error>"
            if self.headers.get("If-None-Match") == "*" and key in self.server.objects and not self.server.overwrites:
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
            self.server.objects[key] = body
        return 200, b""

    def do_GET(self) -> None:
        key = self._key()
        body = self.server.objects.get(key or "")
        if key == "":
            self._list({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
        elif key is not None and body is not None:
            self._answer(200, body)
        elif key is not None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Delete many."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self._key() is not None:
            keys = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", body)]
            for key in keys:
                self.server.objects.pop(key, None)
            gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

    def _list(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token", query.get("start-after", ""))
        keys = sorted(key for key in self.server.objects if key.startswith(query.get("prefix", "")) and key > after)
        page, more = keys[: self.server.page], len(keys) > self.server.page
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size><ETag>1</ETag>"
            "<LastModified>2026-11-23T00:00:00.000Z</LastModified></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        self._answer(200, body.encode())


@contextmanager
def s3_double(page: int = PAGE) -> Iterator[S3Double]:
    """Run the double, with an environment that selects it for S3."""
    says = {
        "AWS_ACCESS_KEY_ID": "double",
        "AWS_SECRET_ACCESS_KEY": "double",
        "AWS_REGION": "us-east-1",
    }
    with S3Double(page) as server:
        says["AWS_ENDPOINT_URL"] = server.url
        before = {name: os.environ.get(name) for name in says}
        os.environ.update(says)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
