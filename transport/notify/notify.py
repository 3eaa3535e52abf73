"""Notices to the operator: a webhook or a command receives notable events as JSON.

It reads the event log as any reader does, so no other task waits for it; a failed notice is one line in the log. Of
each kind it sends one per interval, with the number of events since. A URL may contain a secret: log lines show only
its host.
"""

import asyncio
import json
import logging
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import aiohttp

from dilocox.protocol.errors import ConfigError
from dilocox.protocol.events import NOTABLE
from dilocox.transport.process.processes import end_process, start_process
from dilocox.transport.store.event_log import EventLog, Happened
from dilocox.transport.store.files import read_checked, read_named, write_atomically

__all__ = ["Command", "Notice", "Notifier", "Webhook", "parse_notice"]

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Timeout of one notice."""
AGAIN_SECONDS = 300.0
"""Interval of one kind: rounds of seconds would fill a mailbox."""
TOLD = "notified"
"""File in the folder of a run with the last event read, so that the next incarnation reports why a daemon died."""


class Notice(Protocol):
    @property
    def name(self) -> str:
        """Return a name for logs, without a secret."""

    async def deliver(self, body: bytes) -> str:
        """Within TELL_SECONDS; why it did not work, or nothing. Raises nothing."""


async def _post_json(url: str, body: bytes) -> str:
    """Within TELL_SECONDS; why it did not work, or nothing. Raises nothing."""
    timeout = aiohttp.ClientTimeout(total=TELL_SECONDS)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            return "" if answer.status < 300 else f"it answered {answer.status}"
    except TimeoutError:
        return f"no answer within {TELL_SECONDS:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return type(error).__name__  # its text may contain the URL


class Webhook(NamedTuple):
    url: str

    @property
    def name(self) -> str:
        return f"the webhook at {urlsplit(self.url).hostname}"

    async def deliver(self, body: bytes) -> str:
        return await _post_json(self.url, body)


class Command(NamedTuple):
    words: tuple[str, ...]
    """No shell reads them."""

    @property
    def name(self) -> str:
        return f"the command {Path(self.words[0]).name}"

    async def deliver(self, body: bytes) -> str:
        nothing = asyncio.subprocess.DEVNULL
        try:
            running = await start_process(*self.words, stdin=asyncio.subprocess.PIPE, stdout=nothing, stderr=nothing)
        except OSError as error:
            return error.strerror or type(error).__name__
        try:
            async with asyncio.timeout(TELL_SECONDS):
                await running.communicate(body)
        except TimeoutError:
            return f"it did not end within {TELL_SECONDS:.0f} s"
        finally:
            if running.returncode is None:
                await end_process(running)
        return "" if running.returncode == 0 else f"it ended with {running.returncode}"


def _read_secret(option: str, text: str) -> str:
    """Return the option's value, or the content of the file that it names after an @. Raises ConfigError without the
    value."""
    if text.startswith("@"):
        try:
            text = read_named(Path(text[1:]), piped=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {option} from its file: {error}") from error
    return text.strip()


def _is_url(text: str) -> bool:
    """Whether it names a host to which something can be posted."""
    with suppress(ValueError):
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return False


def parse_notice(text: str) -> Notice:
    """Return a URL, a command, or the one in @FILE. Raises ConfigError without the value."""
    text = _read_secret("--notify", text)
    if text.startswith(("http://", "https://")):
        if _is_url(text):
            return Webhook(text)
        raise ConfigError("--notify begins like a URL but names no host: use https://HOST/PATH")
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--notify is not a command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError("--notify is neither a URL (https://…) nor a command of this machine")
    return Command(words)


class Notifier:
    def __init__(
        self, notice: Notice, events: EventLog, about: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Send notices. `about`: fields that identify this daemon."""
        self._notice, self._events, self._about, self._clock = notice, events, about, clock
        self._again: dict[str, float] = {}
        """Earliest time of the next notice, by kind."""
        self._kept_back: dict[str, tuple[int, Happened]] = {}
        """Number of events not sent, and the newest, by kind."""
        self._path, self._newest = events.path.with_name(TOLD), events.newest

    async def run(self) -> None:
        """Send notices, for ever."""
        begin = await asyncio.to_thread(read_checked, self._path, int)
        async for page in self._events.follow(self._newest if begin is None else begin):
            for happened in page:
                if happened.kind in NOTABLE:
                    await self._receive(happened)
            for count, newest in [kept for kind, kept in self._kept_back.items() if self._clock() >= self._again[kind]]:
                await self._notify(newest, count - 1)  # the newest event is the true state
            if page:
                await asyncio.to_thread(write_atomically, self._path, str(page[-1].id).encode())

    async def _receive(self, happened: Happened) -> None:
        now, kind = self._clock(), happened.kind
        before, _ = self._kept_back.get(kind, (0, happened))
        if now < self._again.get(kind, now):
            self._kept_back[kind] = before + 1, happened
        else:
            await self._notify(happened, before)

    async def _notify(self, happened: Happened, before: int) -> None:
        """`before`: as many of its kind were kept back."""
        kind = happened.kind
        self._again[kind] = self._clock() + AGAIN_SECONDS
        self._kept_back.pop(kind, None)
        text = str(happened.body["line"])
        if before:
            text = f"{text} (and {before} times before)"
        body = {"text": f"{self._about['name']}: {text}", **self._about, **happened.view()}
        if why := await self._notice.deliver(json.dumps(body).encode()):
            log.warning("could not notify %s of %s: %s", self._notice.name, kind, why)
