"""A chain's JSON-RPC, over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from itertools import count
from typing import Any, Protocol

from dilocox.protocol.errors import ConfigError, LocalError

__all__ = ["HttpRpc", "Rpc"]

SECONDS = 30.0
"""Seconds for one answer."""
LARGEST_ANSWER_BYTES = 1 << 20
"""A receipt with its events is about 2 KiB."""


class Rpc(Protocol):
    def __call__(self, method: str, parameters: Sequence[Any]) -> Any:
        """Return the result. Raises LocalError with the error of the chain, or of the connection."""


class HttpRpc:
    """RPC of a node of the chain. The node learns all calls, and may report a false chain; it receives no key."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--rpc {url!r}: use the http:// or https:// URL of a node of the chain")
        self._url, self._numbers = url, count(1)

    def __call__(self, method: str, parameters: Sequence[Any]) -> Any:
        asked = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": list(parameters)}
        request = urllib.request.Request(self._url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                raw = answer.read(LARGEST_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise LocalError(f"the chain's node answers {method} with HTTP {error.code}: check --rpc") from error
        except (OSError, HTTPException) as error:
            raise LocalError(f"the chain's node does not answer {method}: {error}; check --rpc") from error
        return _result(method, raw)


def _result(method: str, raw: bytes) -> Any:
    try:
        told = json.loads(raw) if len(raw) <= LARGEST_ANSWER_BYTES else None
    except ValueError:
        told = None
    if not isinstance(told, dict) or ("result" not in told and not isinstance(told.get("error"), dict)):
        raise LocalError(f"the answer to {method} is not JSON-RPC: check --rpc")
    if "error" in told:
        raise LocalError(f"the chain's node refuses {method}: {str(told['error'].get('message', 'no reason'))[:500]!r}")
    return told["result"]
