"""Process that renders chat templates. A template is a program that may run for ever or fill memory, which Jinja's sandbox
does not prevent. One conversation has limited processor time and memory; a template that exceeds them ends only this
process."""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any

from dilocox.protocol import limits
from dilocox.protocol.errors import ConfigError
from dilocox.transport.process.child_environment import child_environment

__all__ = ["ExhaustedError", "Renderer", "renderer"]

CHILD = "dilocox.node.training.hf.templates"


class ExhaustedError(ConfigError):
    """A template that wants more time or memory than it may have."""


class Renderer:
    """Starts its process with the first conversation, and another one after a template that ended it."""

    def __init__(self, cpu_seconds: int = limits.TEMPLATE_CPU_SECONDS) -> None:
        """`cpu_seconds`: for one conversation."""
        self._cpu_seconds, self._lock = cpu_seconds, Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        prompt: bool = False,
        marked: bool = False,
        tools: Sequence[Any] = (),
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation's text, and with `marked` the positions of marked answers. `prompt`: the text ends with
        the request for an answer; `tools`: descriptions for the template. Raises ConfigError if the template fails, or
        exceeds its limits."""
        asked = {"template": template, "messages": messages, "special": special_tokens, "prompt": prompt, "marked": marked}
        asked["tools"] = list(tools) or None
        with self._lock:
            told = self._ask(json.dumps(asked).encode() + b"\n")
        if told is None:
            raise ExhaustedError(
                f"the chat template needs more than {self._cpu_seconds} seconds of processor time, or "
                f"{limits.TEMPLATE_MEMORY_BYTES >> 20} MiB, for one conversation"
            )
        if "refused" in told:
            raise ConfigError(f"the chat template rejects a conversation: {told['refused']}")
        return told["text"], [(start, end) for start, end in told["spans"]]

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Return its answer; None if it ended instead."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(limits.RENDERED_BYTES)
        except BrokenPipeError:
            answer = b""
        if answer.endswith(b"\n"):
            told: dict[str, Any] = json.loads(answer)
            return told
        self._process = None
        _end(process)
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        """It ends with us: what it reads ends then."""
        command = [sys.executable, "-P", "-m", CHILD, str(self._cpu_seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


@cache
def renderer() -> Renderer:
    """This process's: what it needs takes seconds to load."""
    return Renderer()
