"""Am I counted? The four answers that a participant looks for, from a node's status."""

from typing import Any

__all__ = ["answers", "answers_of_holder"]

View = dict[str, Any]


def answers(status: View, agreed: bool | None) -> list[View]:
    """Each with a question, an answer (None: not known yet), a sentence, and what to do where there is something. `agreed`: whether
    our newest state that the run agreed on is the run's."""
    counted, missed = status["counted"], status["excluded"]
    sync = {
        True: "our state is the run's",
        False: "our state is not the run's",
        None: "the run has agreed on none of our states yet",
    }
    history = (
        f"in {sum(counted)} of the last {len(counted)} rounds that counted anybody"
        if counted
        else "no round counted anybody yet"
    )
    why = "".join(f"; not counted: {item['reason']}" for item in missed[:1])
    dial = "" if status["reachable"] is not False else "forward the gRPC port; look at --host"
    return [
        _answer("Reachable?", status["reachable"], status["reach"], dial),
        _answer("In sync?", agreed, sync[agreed], "" if agreed is not False else "it resynchronises by itself"),
        _answer("In this round?", status["on_roster"], f"{status['state']}: {status['why']}", status["advice"]),
        _answer("Counted?", counted[-1] if counted else None, history + why, missed[0]["do"] if missed else ""),
    ]


def answers_of_holder(reachable: bool | None, reach: str, connected: bool, lacking: str) -> list[View]:
    """The three of who keeps and does not train. `lacking`: why its archive is not as it should be."""
    heard = "the coordinator is heard" if connected else "the coordinator is away"
    return [
        _answer("Reachable?", reachable, reach, "" if reachable is not False else "forward the gRPC port; look at --host"),
        _answer("Following?", connected, heard),
        _answer("Keeping?", not lacking, lacking or "all that is due"),
    ]


def _answer(question: str, answer: bool | None, says: str, do: str = "") -> View:
    return {"question": question, "answer": answer, "says": says, "do": do}
