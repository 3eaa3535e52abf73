"""`python -m dilocox.node.training.hf.templates SECONDS`: renders chat templates as transformers does, one conversation per
line. The system kills a template that exceeds its processor time or memory."""

import json
import math
import random
import resource
import sys
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils

from dilocox.protocol import limits
from dilocox.protocol.run.corpus import TEMPLATE_DATE

__all__ = ["render"]

HELD = Path("/proc/self/statm")
"""Pages of address space, first."""


class Clock(datetime):
    """The clock of templates (`strftime_now`): it always shows one date."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Clock":
        return cls.fromisoformat(TEMPLATE_DATE)


def render(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `Renderer.render`, or the error."""
    random.seed(0)  # Jinja's `random` and `lipsum` draw from it
    try:
        texts, found = chat_template_utils.render_jinja_template(
            conversations=[asked["messages"]],
            chat_template=asked["template"],
            tools=asked["tools"],
            return_assistant_tokens_mask=asked["marked"],
            add_generation_prompt=asked["prompt"],
            **asked["special"],
        )
    except Exception as error:  # a template may do whatever a sandbox lets it
        return {"refused": str(error) or type(error).__name__}
    spans = [(start, end) for start, end in found[0] if end > start] if asked["marked"] else []
    return {"text": texts[0], "spans": spans}


def main() -> None:
    chat_template_utils.datetime = Clock
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(FileNotFoundError):  # the system reports it there
        most = int(HELD.read_text().split()[0]) * resource.getpagesize() + limits.TEMPLATE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin.buffer:
        used = resource.getrusage(resource.RUSAGE_SELF)
        ends = math.ceil(used.ru_utime + used.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (ends, resource.RLIM_INFINITY))
        answer = json.dumps(render(json.loads(line))).encode() + b"\n"
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
