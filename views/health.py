"""Health checks of a daemon, computed from its status: reachable, connected, counted; and whether it is healthy.

`/readyz`, `dilocox status --check`, the container's health check and the page all show the result of `health`:

    healthy  means                                            /readyz          status --check   container
    yes      it works as it should, or is paused on request   200              0                healthy
    none     unknown: it is starting                          503 not-known    4                healthy
    no       it does not work, and cannot recover alone       503 not-well     6                unhealthy
"""

from typing import Any

__all__ = [
    "ON_ITS_WAY",
    "answers",
    "answers_of_coordinator",
    "answers_of_holder",
    "answers_of_standby",
    "answers_of_waiting",
    "health",
    "uncounted",
]

View = dict[str, Any]

ON_ITS_WAY = ("starting", "restarting", "synchronising", "joining", "warming up")
"""States in which a node is not in the round yet, and will be."""
QUORUM_ADVICE = "if this machine is live: nothing; restart the absent clusters, or start another node instead"


def health(status: View) -> View:
    """Return whether a daemon is healthy (None: unknown), why, and what to do. A node that was paused on request is
    healthy."""
    if status.get("finished") or status.get("state") in ("paused", "finished"):
        return {"well": True, "why": status["why"], "do": ""}
    for given in (False, None):
        for each in status["answers"]:
            if each["decides"] and each["answer"] is given:
                return {"well": given, "why": f"{each['question']} {each['says']}", "do": each["do"]}
    return {"well": True, "why": "all checks passed", "do": ""}


def answers(status: View, agreed: bool | None) -> list[View]:
    """Each with a question, an answer (None: not known yet), a sentence, and what to do where there is something. `agreed`: whether
    our newest state that the run agreed on is the run's."""
    counted, missed = status["counted"], status["excluded"]
    # Rounds from before it had a seat do not matter.
    was_counted = counted[-1] if any(counted) or (counted and missed) else None
    in_round = None if status["state"] in ON_ITS_WAY else status["on_roster"]
    sync = {
        True: "this node's state equals the run's",
        False: "this node's state differs from the run's",
        None: "the run has not agreed on a state of this node yet",
    }
    history = f"in {sum(counted)} of the last {len(counted)} rounds that counted a cluster" if counted else uncounted(status)
    last = "the last round counted no cluster" if status["nobody_counted"] else "not counted"
    why = "".join(f"; {last}: {item['reason']}" for item in missed[:1])
    dial = "" if status["reachable"] is not False else "forward the gRPC port; check --host"
    return [
        # Relays store payloads of unreachable nodes. Without a relay such a node is not counted either.
        _answer("Reachable?", status["reachable"], status["reach"], dial, decides=False),
        _answer("In sync?", agreed, sync[agreed], "" if agreed is not False else "it resynchronises by itself"),
        _answer("In this round?", in_round, f"{status['state']}: {status['why']}", status["advice"]),
        _answer("Counted?", was_counted, history + why, missed[0]["do"] if missed else ""),
        *([_stands_still(status)] if status["stands_still"] else []),
    ]


def uncounted(status: View) -> str:
    """Return the reason of a node whose `counted` is empty."""
    return "none of the last rounds counted a cluster" if status["round"] > 1 else "no round counted a cluster yet"


def answers_of_holder(reachable: bool | None, reach: str, connected: bool, lacking: str, asked: bool = True) -> list[View]:
    """Return the three health checks of a daemon that stores and does not train. `lacking`: what is wrong with its
    archive. `asked`: peers should be able to reach it; without it, reachability does not matter."""
    dial = "" if reachable is not False or not asked else "forward the gRPC port; check --host"
    heard = "the coordinator is live" if connected else "the coordinator is away"
    return [
        _answer("Reachable?", reachable, reach, dial, decides=asked),
        _answer("Following?", connected, heard),
        _answer("Keeping?", not lacking, lacking or "everything is archived"),
    ]


def answers_of_coordinator(phase: str, paused: bool, why: str) -> list[View]:
    """Return the answer of a coordinator. `paused`: the run is below quorum, and its clocks are stopped."""
    return [_enough(False if paused else None if phase in ("gathering", "starting") else True, why)]


def answers_of_standby(says: str) -> list[View]:
    """The one of a coordinator that does not lead, and is ready to."""
    return [_answer("Standby?", True, says)]


def answers_of_waiting(room: bool, says: str, do: str) -> list[View]:
    """The one of a daemon that has not joined yet, or not again. `room`: whether its disk has any."""
    return [_answer("Joined?", None if room else False, says, do)]


def _stands_still(status: View) -> View:
    """Return a check of the quorum. The coordinator's last report is old if the coordinator is away."""
    return _enough(False, status["round_why"]) if status["coordinator_connected"] else _enough(None, "the coordinator is away")


def _enough(heard: bool | None, why: str) -> View:
    """Return the answer whether the run has its quorum."""
    return _answer("Enough live?", heard, why, QUORUM_ADVICE if heard is False else "")


def _answer(question: str, answer: bool | None, says: str, do: str = "", decides: bool = True) -> View:
    """`decides`: whether the daemon is well only where this is so."""
    return {"question": question, "answer": answer, "says": says, "do": do, "decides": decides}
