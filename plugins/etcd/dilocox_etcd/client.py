"""Client of etcd as a store of several coordinators, through the JSON gateway that every member serves beside gRPC (3.4
and later).

The client asks members one after the other and skips a member that does not answer in time. That member may have
applied the request. Secrets come from files: a user and its password, a client's certificate and key.
"""

import asyncio
import json
import logging
import re
import ssl
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import Base64Bytes, BaseModel, ValidationError

from dilocox.coordinator.kv_store import (
    Change,
    Found,
    Guard,
    Item,
    Put,
    StoreError,
    StoreFiles,
    StoreRefusedError,
    shown_url,
)
from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError

__all__ = ["Etcd", "EtcdPlace", "parse_store"]

log = logging.getLogger(__name__)

REQUEST_SECONDS = 1.0
"""Seconds to wait for an answer. An answer takes milliseconds, and about a second while etcd elects a leader. A third of a
lease: the owner of a lease asks three members in that time."""
BYTES_PER_SECOND = 1 << 20
"""Bytes a second: a slower link to a store would not carry the commits of a large run in time anyway."""
ANSWER_BYTES = 16 << 20
"""Largest answer that is read: the gateway carries 4 MiB, which base64 makes a third longer."""
ENDPOINTS = 16
"""Members that may be named: clusters of etcd have three to seven."""

INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, EXHAUSTED, FAILED, UNIMPLEMENTED, UNAUTHENTICATED = 3, 5, 7, 8, 9, 12, 16
"""gRPC's codes, which the gateway passes on: these are final, all others may differ at another member, or later."""
_FINAL = {
    INVALID_ARGUMENT: "the request is not valid",
    PERMISSION_DENIED: "the user may not do that",
    FAILED: "etcd is not configured for the request",
    UNIMPLEMENTED: "this etcd has no such call: use etcd 3.4 or later",
    UNAUTHENTICATED: "etcd does not accept this client: check --store-auth",
}


NO_FILES = StoreFiles()
HOST = re.compile(r"[A-Za-z0-9._:%-]+")
"""A name or an address."""


@dataclass(frozen=True)
class EtcdPlace:
    """Address of a store, and its credentials."""

    endpoints: tuple[str, ...]
    """http(s)://HOST:PORT of its members."""
    prefix: str
    """Prefix of all our keys, `/` at neither end."""
    files: StoreFiles = NO_FILES

    @property
    def label(self) -> str:
        return f"{','.join(self.endpoints)}/{self.prefix}"

    def open(self) -> "Etcd":
        return Etcd(self)


def parse_store(text: str, files: StoreFiles | None = None) -> EtcdPlace:
    """Parse `etcd://HOST:PORT[,HOST:PORT…]/PREFIX`; `etcds://…` over TLS. Raises ConfigError."""
    files = files or NO_FILES
    scheme, _, rest = text.partition("://")
    members, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    form = "etcd://HOST:PORT[,HOST:PORT…]/PREFIX, or etcds:// over TLS"
    if scheme not in ("etcd", "etcds") or not prefix or not prefix.isprintable() or "@" in members:
        raise ConfigError(f"--store {shown_url(text)}: use {form}; pass a user and its password with --store-auth FILE")
    endpoints = []
    for member in members.split(","):
        try:
            parts = urlsplit(f"//{member}")
            if not parts.hostname or parts.port is None or not HOST.fullmatch(parts.hostname):
                raise ValueError("no host or no port")
        except ValueError as error:
            raise ConfigError(f"--store {shown_url(text)}: {member!r} is not HOST:PORT ({error}). Use {form}") from error
        endpoints.append(f"{'https' if scheme == 'etcds' else 'http'}://{member}")
    if len(endpoints) > ENDPOINTS:
        raise ConfigError(f"--store names {len(endpoints)} members; the limit is {ENDPOINTS}")
    if (files.certificate is None) != (files.key is None):
        raise ConfigError("a client's certificate needs its key: pass both --store-cert and --store-key")
    if scheme == "etcd" and (files.ca or files.certificate):
        raise ConfigError("use --store-ca, --store-cert and --store-key only with etcds://")
    return EtcdPlace(tuple(endpoints), prefix, files)


def _read_auth(path: Path) -> tuple[str, str]:
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"other users can read {path}. Run: chmod 600 {path}")
        user, password = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--store-auth {path}: not a file of two lines, user and password: {error}") from error
    return user, password


def _tls(place: EtcdPlace) -> ssl.SSLContext | None:
    if not place.endpoints[0].startswith("https"):
        return None
    try:
        context = ssl.create_default_context(cafile=place.files.ca)
        if place.files.certificate is not None:
            context.load_cert_chain(place.files.certificate, place.files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the files of --store-ca, --store-cert or --store-key: {error}") from error
    return context


class Etcd:
    """Within a running loop. See store.Store."""

    def __init__(self, place: EtcdPlace) -> None:
        """Read the credentials. Raises ConfigError for files that cannot be used."""
        self._endpoints, self._turn = place.endpoints, 0
        self._auth = _read_auth(place.files.auth) if place.files.auth is not None else None
        self._token = ""
        connector = aiohttp.TCPConnector(ssl=_tls(place) or True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)

    async def read(self, first: str, until: str, most: int) -> list[Item]:
        while True:
            try:
                answer = await self.call("kv/range", {"key": _b64(first), "range_end": _b64(until), "limit": str(most)})
                return [pair.item for pair in _read(_Range, answer).kvs]
            except _TooMuchError:
                if most <= 1:
                    raise
                most = most // 4 or 1  # the gateway carries 4 MiB in one answer

    async def apply(self, guards: Sequence[Guard], changes: Sequence[Change], otherwise: Sequence[str] = ()) -> Found:
        request = {
            "compare": [_comparison(guard) for guard in guards],
            "success": [_operation(change) for change in changes],
            "failure": [{"request_range": {"key": _b64(key)}} for key in otherwise],
        }
        answer = _read(_Txn, await self.call("kv/txn", request))
        if answer.succeeded:
            return Found(True)
        items = [pair.item for response in answer.responses for pair in response.response_range.kvs]
        return Found(False, {item.key: item for item in items})

    async def grant(self, seconds: int) -> int:
        return _read(_Lease, await self.call("lease/grant", {"TTL": str(seconds)})).ID

    async def keep(self, lease: int) -> bool:
        return _read(_Kept, await self.call("lease/keepalive", {"ID": str(lease)})).result.TTL > 0

    async def revoke(self, lease: int) -> None:
        try:
            await self.call("lease/revoke", {"ID": str(lease)})
        except _GoneError:
            pass

    async def close(self) -> None:
        await self._session.close()

    async def call(self, call: str, request: dict[str, Any]) -> Any:
        """Send a call of the gateway, by its documented name. Raises StoreError, StoreRefusedError."""
        if self._auth is not None and not self._token:
            self._token = await self._log_in(self._auth)
        try:
            return await self._post(call, request)
        except _TokenError:
            assert self._auth is not None, "or no token was received"
            self._token = await self._log_in(self._auth)
            return await self._post(call, request)

    async def _log_in(self, auth: tuple[str, str]) -> str:
        self._token = ""
        return _read(_Login, await self._post("auth/authenticate", {"name": auth[0], "password": auth[1]})).token

    async def _post(self, call: str, request: dict[str, Any]) -> Any:
        """Send one request to one member, and to the next one after a failure. Raises StoreError, StoreRefusedError."""
        endpoint, body = self._endpoints[self._turn % len(self._endpoints)], json.dumps(request).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        try:
            async with asyncio.timeout(REQUEST_SECONDS + len(body) / BYTES_PER_SECOND):
                async with self._session.post(f"{endpoint}/v3/{call}", data=BytesIO(body), headers=headers) as response:
                    raw = await read_at_most(response.content, ANSWER_BYTES)
            return open_answer(raw, endpoint, bool(self._token))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            self._turn += 1
            raise StoreError(f"etcd at {endpoint} does not answer: {str(error) or type(error).__name__}") from error
        except (StoreError, StoreRefusedError):
            self._turn += 1
            raise


class _GoneError(StoreRefusedError):
    """The lease is not there."""


class _TooMuchError(StoreError):
    """Answer larger than the gateway carries."""


class _TokenError(StoreError):
    """Token that expired, or whose member started again."""


class _Pair(BaseModel):
    key: Base64Bytes
    value: Base64Bytes = b""

    @property
    def item(self) -> Item:
        """Return the pair with its key as text. Raises StoreError if the key is no text."""
        try:
            return Item(self.key.decode(), self.value)
        except UnicodeDecodeError as error:
            raise StoreError(f"etcd answered with a key that is not text: {self.key[:32]!r}") from error


class _Range(BaseModel):
    kvs: list[_Pair] = []


class _Response(BaseModel):
    response_range: _Range = _Range()


class _Txn(BaseModel):
    succeeded: bool = False
    responses: list[_Response] = []


class _Lease(BaseModel):
    ID: int


class _Remaining(BaseModel):
    TTL: int = 0


class _Kept(BaseModel):
    result: _Remaining = _Remaining()


class _Login(BaseModel):
    token: str


Answer = TypeVar("Answer", bound=BaseModel)


def _read(model: type[Answer], answer: dict[str, Any]) -> Answer:
    """Return an answer of the form that etcd documents. Raises StoreError for another form."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the answer"
        raise StoreError(f"the answer of etcd does not follow its documentation: {where} is wrong or missing") from error


def open_answer(raw: bytes, endpoint: str, logged_in: bool) -> dict[str, Any]:
    """Return an answer's fields. Raises ValueError if the bytes are no JSON object, StoreError or StoreRefusedError if
    etcd reports a failure."""
    try:
        answer = json.loads(raw)
    except RecursionError as error:
        raise ValueError("its answer is nested too deeply") from error
    if not isinstance(answer, dict):
        raise ValueError("its answer is not a JSON object")
    if "error" in answer:
        raise _failure(endpoint, answer, logged_in)
    return answer


async def read_at_most(stream: aiohttp.StreamReader, most: int) -> bytes:
    """Return a whole body. Raises ValueError if it is larger."""
    body = bytearray()
    async for chunk in stream.iter_any():
        body += chunk
        if len(body) > most:
            raise ValueError(f"its answer is larger than {most >> 20} MiB")
    return bytes(body)


def _failure(endpoint: str, answer: dict[str, Any], logged_in: bool) -> StoreError | StoreRefusedError:
    error = answer["error"]
    body = error if isinstance(error, dict) else answer  # a stream's error is a separate object
    says = str(body.get("message") or error)[: limits.TEXT_CHARACTERS]
    code = next((each for each in (body.get("code"), body.get("grpc_code")) if isinstance(each, int) and each), 0)
    if code == UNAUTHENTICATED and logged_in:
        return _TokenError(says)
    if code == NOT_FOUND:
        return _GoneError(f"etcd at {endpoint}: {says}")
    if code == EXHAUSTED and "larger than max" in says:
        return _TooMuchError(says)
    if code == EXHAUSTED and "space" in says:
        return StoreRefusedError(
            f"etcd is full ({says}): compact and defragment it, disarm its alarm, and set --auto-compaction-retention"
        )
    if code == INVALID_ARGUMENT and "too large" in says:
        return StoreRefusedError(
            f"etcd rejects a request of this size ({says}): set its --max-request-bytes to 1.5 MiB or more"
        )
    if code in _FINAL:
        return StoreRefusedError(f"etcd at {endpoint} refuses: {_FINAL[code]} ({says})")
    return StoreError(f"etcd at {endpoint}: {says}")


def _b64(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _comparison(guard: Guard) -> dict[str, Any]:
    key = {"key": _b64(guard.key), "result": "EQUAL"}
    if guard.value is None:
        return {**key, "target": "CREATE", "create_revision": "0"}
    return {**key, "target": "VALUE", "value": _b64(guard.value)}


def _operation(change: Change) -> dict[str, Any]:
    if isinstance(change, Put):
        lease = {"lease": str(change.lease)} if change.lease else {}
        return {"request_put": {"key": _b64(change.key), "value": _b64(change.value), **lease}}
    return {"request_delete_range": {"key": _b64(change.first), "range_end": _b64(change.until)}}
