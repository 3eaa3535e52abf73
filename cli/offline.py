"""Views of a run without its daemon: the same documents, from the chain and the events in its folder."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dilocox.cli.common import errors, fail, find_chain_files
from dilocox.cli.exit_codes import Exit
from dilocox.protocol.pb import services_pb2 as services
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import load_identity
from dilocox.transport.store.event_log import EVENTS, Happened, read_page
from dilocox.views import json_views as views
from dilocox.views.error_codes import do_about
from dilocox.views.explain import NotThere
from dilocox.views.explain import explain as explained

__all__ = ["explain", "peers", "rounds", "stages", "status"]

COUNTED = 3
"""Rounds of which `status` shows whether they counted this node."""


@contextmanager
def _kept(home: Path | None) -> Iterator[ChainFile]:
    """Exits where there is none."""
    path = find_chain_files(home)[-1]
    errors.print(f"no daemon answers; reading {path}", style="dim", highlight=False, soft_wrap=True)
    with ChainFile.for_reading(path) as chain:
        yield chain


def _me(chain: ChainFile) -> str:
    """Return the peer of the folder; empty for a coordinator or an unknown one."""
    key = chain.path.parents[2] / "identity.key"
    me = load_identity(key).peer if key.exists() else ""
    return me if me != chain.head.coordinator else ""


def status(home: Path | None) -> dict[str, Any]:
    with _kept(home) as chain:
        head, me = chain.head, _me(chain)
        seated = head.cluster_by_peer.get(me)
        cluster = seated.cluster if seated is not None else me
        told = [json.loads(chain.detail(number) or "{}") for number in range(max(1, chain.length - COUNTED), chain.length)]
        counting = [detail for detail in told if detail.get("counted")]
        return {
            "role": "stopped",
            "why": "no daemon runs here",
            "peer": me,
            "folder": str(chain.path.parents[2]),
            "run": views.run(chain.manifest),
            "round": head.round,
            "finished": head.finished,
            "trained": head.trained,
            "closed_at": head.closed_at_ms / 1000,
            "counted": [any(item["cluster"] == cluster for item in detail["clusters"]) for detail in counting] if me else [],
            "health": {"well": False, "why": "no daemon runs here", "do": do_about("not-running") or ""},
        }


def peers(home: Path | None) -> list[dict[str, Any]]:
    """Return the peers of the roster; none is live."""
    with _kept(home) as chain:
        return views.peers(chain.manifest, chain.head, services.PresenceList(), {}, chain.head.coordinator)


def stages(home: Path | None) -> list[dict[str, Any]]:
    with _kept(home) as chain:
        return views.stages(chain.manifest, chain.head)


def rounds(home: Path | None, round: int | None = None, last: int | None = None) -> Any:
    """All of them, the `last` so many, or one in full."""
    with _kept(home) as chain:
        first = max(0, chain.length - last) if last is not None else 0
        text = chain.rows(first) if round is None else chain.detail(round)
    if text is None:
        fail(f"no commit for round {round}", Exit.USAGE, do_about("no-such-round"), "no-such-round")
    return json.loads(text)


def explain(home: Path | None, number: int, peer: str) -> dict[str, Any]:
    with _kept(home) as chain:
        kept = chain.path.with_name(EVENTS)

        def events(round: int) -> list[Happened]:
            return read_page(kept, 0, round) if kept.exists() else []

        try:
            return explained(chain, events, number, peer, _me(chain))
        except NotThere as error:
            fail(str(error), Exit.USAGE, do_about(error.code), error.code)
