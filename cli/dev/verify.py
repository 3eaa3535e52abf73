"""`dilocox verify`: recheck the whole commit chain; replay a round bit for bit."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dilocox.cli.common import (
    ArchiveKeyOption,
    HomeOption,
    JsonOption,
    ReadArchiveOption,
    ReadOption,
    archive_place,
    console,
    fail,
    print_json,
    read_link,
)
from dilocox.cli.exit_codes import Exit
from dilocox.cli.progress import Working, working
from dilocox.cli.sources import reading
from dilocox.node.exchange.apply_builder import takes_of
from dilocox.node.exchange.forks import check_forks
from dilocox.node.exchange.shards import Roots, Shards, find_shards, roots_of
from dilocox.node.run_reader import RunReader
from dilocox.protocol.consensus.chain import taken
from dilocox.protocol.consensus.head import Cluster, advance
from dilocox.protocol.errors import RemoteError
from dilocox.protocol.payload.payload_index import check_bounds, check_leaves, check_payload, read_leaves
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.blobs import BlobStore, digest_of
from dilocox.transport.store.chain_file import ChainFile

__all__ = ["verify"]


def verify(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[LINK|RUN-ID]", help="The expected run: its join link, @FILE with it, or its id."),
    ] = None,
    home: HomeOption = None,
    join: ReadOption = None,
    archive: ReadArchiveOption = None,
    archive_key: ArchiveKeyOption = None,
    replay: Annotated[int | None, typer.Option(metavar="N", help="Also replay round N from the blobs on disk.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every commit from the signed statements inside it. The run id is the hash of the manifest, which names the
    signer of commits: with the id, the file needs no trust. With --join, peers send the chain, and the data for a replay."""
    wanted = None if run is None else _run_id(run)
    if join is not None and wanted not in (None, read_link(join).run_id):
        fail("--join is the link of another run than the one passed as argument", Exit.USAGE, "pass only one of them")

    async def fetch(reader: RunReader) -> int:
        if replay is not None:
            find_shards(reader.manifest)  # before anything is downloaded
        if join is None:
            await reader.check_archived()
        return 0 if replay is None else await reader.replayable(replay)

    with reading(join, home, archive_place(archive, archive_key), fetch) as (chains, _):
        with working("checking the chain") as bar:
            reports = _verify(chains, wanted, replay, bar)
        _show(reports, wanted, replay, as_json)


def _verify(chains: list[Path], wanted: bytes | None, replay: int | None, bar: Working) -> list[dict[str, Any]]:
    reports = []
    for path in chains:
        if wanted is not None and path.parent.name != wanted.hex()[:16]:
            continue  # of another run, whatever state that is in
        with ChainFile.for_reading(path) as chain:
            if wanted not in (None, chain.manifest.run_id):
                fail(f"{path} contains the run {chain.manifest.run_id.hex()}")
            shards = find_shards(chain.manifest) if replay is not None else None
            try:
                commits = list(bar.each("checking the commits", chain.verify(), chain.length))
                replayed = None if replay is None else replay_round(chain, path.parent, commits, replay, bar, shards)
            except RemoteError as error:
                fail(f"{path}: the chain is not valid: {error}")
            check_forks(chain)
            newest = commits[-1].digest.hex() if commits else ""
            reports.append(
                {
                    "chain": str(path),
                    "run": chain.manifest.run_id.hex(),
                    "coordinator": chain.signer,
                    "commits": len(commits),
                    "head": newest,
                    "replayed": replayed,
                }
            )
    return reports


def _show(reports: list[dict[str, Any]], wanted: bytes | None, replay: int | None, as_json: bool) -> None:
    if wanted is not None and not reports:
        fail(
            f"no chain of the run {wanted.hex()} on this disk",
            Exit.USAGE,
            "pass --home with the folder of a daemon of that run",
        )
    if as_json:
        print_json(reports)
        return
    for report in reports:
        console.print(
            f"{report['commits']} commits are valid, head {str(report['head'])[:16]}…   {report['chain']}", highlight=False
        )
        console.print(f"run {report['run']}, signed by {report['coordinator']}", highlight=False)
        if report["replayed"] is not None:
            console.print(f"round {replay} replayed: every stage has the recorded state hash", highlight=False)


def _run_id(text: str) -> bytes:
    """Raises ConfigError."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    return read_link(text).run_id


def replay_round(
    chain: ChainFile, folder: Path, commits: list[Statement], round: int, bar: Working, shards: Shards | None
) -> dict[str, str]:
    """Apply commit `round` to the state on disk; the result must have the digests that commit round+1 records. `shards`: of the
    run."""
    if not 1 <= round < len(commits) - 1:
        last = len(commits) - 2
        have = f"rounds 1 … {last} can be" if last > 0 else "no round can be yet"
        fail(f"cannot replay round {round}: {have}, once the next round's commit names the state", Exit.USAGE)
    store = BlobStore(folder / "blobs")
    before, after = (store.stage_digests(commits[number].body.state) for number in (round, round + 1))
    if not before or not after or not all(digest in store for digest in before):
        here = [
            c.body.round for c in commits[1:-1] if (held := store.stage_digests(c.body.state)) and all(d in store for d in held)
        ]
        those = (
            f"the folder has the states of rounds {', '.join(map(str, here))}"
            if here
            else "pass --join LINK to read it from the run"
        )
        fail(f"the state before round {round} is not on this disk", Exit.USAGE, those)
    bar.begin(f"reading what round {round} counted")
    items = taken(commits[round].body)
    roster = advance(chain.manifest, commits[round - 1]).roster
    roots = roots_of(shards, store)
    leaves = [_leaves(chain.manifest, roster, store, item.contribution, roots) for item in items]
    from dilocox.node.outer.state import StageState  # torch loads only here
    from dilocox.node.training.worker.commit_applier import read_commit

    rank_or_k = commits[round - 1].body.rank_or_k
    commit = read_commit(round, takes_of(chain.manifest, items, leaves), rank_or_k)
    digests: dict[str, str] = {}
    for stage, wanted in enumerate(bar.each(f"replaying round {round}", after, len(after))):
        for digest in (before[stage], *(each[stage].digest for each in leaves)):
            if not store.verify(digest):
                fail(f"round {round}, stage {stage}: the blob {digest.hex()[:16]}… on this disk is damaged")
        for item, each in zip(items, leaves, strict=True):
            leaf = each[stage]
            check_payload(chain.manifest, item.cluster, round, leaf, store.view(leaf.digest), rank_or_k)
            roots.check_root(leaf, roster)
        state = StageState(chain.manifest, stage)
        state.load_state(store.view(before[stage]))
        commit.apply_to(state, store.view)
        digest = digest_of([state.state_bytes()])
        if digest != wanted:
            fail(f"round {round}, stage {stage}: the replay gives {digest.hex()[:16]}…, the chain records {wanted.hex()[:16]}…")
        digests[str(stage)] = digest.hex()
    return digests


def _leaves(
    manifest: Manifest, roster: Mapping[str, Cluster], store: BlobStore, contribution: pb.Contribution, roots: Roots
) -> list[pb.Leaf]:
    """Return what a counted contribution announces, if it may. Raises RemoteError."""
    leaves = read_leaves(manifest, store.read(contribution.leaves))
    check_leaves(contribution, leaves)
    roots.check_work(contribution, leaves, roster)
    for leaf in leaves:
        check_bounds(manifest, leaf)
    return leaves
