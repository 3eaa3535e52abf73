"""`dilocox verify`: recheck the whole commit chain offline; replay a round bit for bit."""

from pathlib import Path
from typing import Annotated

import typer

from dilocox.cli.common import HomeOption, JsonOption, console, fail, find_chain_files, print_json
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.messages import Statement
from dilocox.transport.blobs import BlobStore, digest_of
from dilocox.transport.chain_file import ChainFile

__all__ = ["verify"]


def verify(
    home: HomeOption = None,
    replay: Annotated[int | None, typer.Option(metavar="N", help="Also replay round N from the blobs on disk.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every commit from the signed statements inside it."""
    chains = find_chain_files(home)
    reports = []
    for path in chains:
        with ChainFile.for_reading(path) as chain:
            try:
                commits = list(chain.verify())
                replayed = replay_round(chain, path.parent, commits, replay) if replay is not None else None
            except RemoteError as error:
                fail(f"{path}: the chain does not hold: {error}")
            newest = commits[-1].digest.hex() if commits else ""
            reports.append({"chain": str(path), "commits": len(commits), "head": newest, "replayed": replayed})
    if as_json:
        print_json(reports)
        return
    for report in reports:
        console.print(
            f"{report['commits']} commits hold, head {str(report['head'])[:16]}…   {report['chain']}", highlight=False
        )
        if report["replayed"] is not None:
            console.print(f"round {replay} replayed: every stage has the recorded state hash", highlight=False)


def replay_round(chain: ChainFile, folder: Path, commits: list[Statement], round: int) -> dict[str, str]:
    """Apply commit `round` to the state on disk; the result must have the digests that commit round+1 records."""
    if not 1 <= round < len(commits) - 1:
        fail(f"round {round} cannot be replayed: the chain has the rounds 1 … {len(commits) - 2}", 2)
    before = {state.stage: state.digest for state in commits[round].body.states}
    after = {state.stage: state.digest for state in commits[round + 1].body.states}
    store = BlobStore(folder / "blobs")
    from dilocox.node.outer.state import StageState  # torch loads only here

    digests: dict[str, str] = {}
    for stage in sorted(after):
        if stage not in before or before[stage] not in store:
            here = [c.body.round for c in commits[1:-1] if c.body.states and all(s.digest in store for s in c.body.states)]
            fail(f"the state before round {round} is not on this disk", 2, f"it has those of rounds {here}")
        counted = commits[round].body.counted
        for digest in (before[stage], *(item.payloads[stage].digest for item in counted)):
            if not store.verify(digest):
                fail(
                    f"blob {digest.hex()[:16]}… is missing or damaged on this disk",
                    help="start its node, which fetches it again",
                )
        state = StageState(chain.manifest, stage)
        state.load_state(store.view(before[stage]))
        payloads = [store.view(item.payloads[stage].digest) for item in counted]
        state.apply(payloads, [item.tokens for item in counted], round, commits[round - 1].body.keep)
        digest = digest_of([state.state_bytes()])
        if digest != after[stage]:
            fail(f"round {round}, stage {stage}: replay gives {digest.hex()[:16]}…, the chain says {after[stage].hex()[:16]}…")
        digests[str(stage)] = digest.hex()
    return digests
