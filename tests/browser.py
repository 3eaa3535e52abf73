"""A real browser for tests: Chromium without a window, driven by its DevTools protocol."""

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dilocox.transport.process.processes import end_process
from tests.helpers import PATIENCE_SECONDS

__all__ = ["Browser", "browser"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-port=0",
    "--window-size=1280,1700",
    "--hide-scrollbars",
)


class Browser:
    """One tab; `errors` has the errors of its page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await self._socket.receive_json()).get("id") != number:
                said = answer.get("params", {})
                if answer.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(str(said["exceptionDetails"]))
                if answer.get("method") == "Log.entryAdded" and said["entry"]["level"] == "error":
                    self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def evaluate(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, script: str) -> Any:
        """Wait until the script is true in the page."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(0.05)
        return value

    async def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def browser(folder: Path, url: str) -> AsyncIterator[Browser]:
    """Open a tab; skip the test without Chromium."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    process = await asyncio.create_subprocess_exec(
        program, *OPTIONS, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "the browser ended"
        reading = asyncio.create_task(process.stderr.read())  # or it blocks
        port = line.decode().split("/devtools")[0].rpartition(":")[2]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as tabs:
                socket = next(tab["webSocketDebuggerUrl"] for tab in await tabs.json() if tab["type"] == "page")
            async with session.ws_connect(socket, max_msg_size=0) as connection:
                tab = Browser(connection)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.call("Page.navigate", url=url)
                yield tab
        reading.cancel()
    finally:
        await end_process(process)
