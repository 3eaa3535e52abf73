"""Tests that `dilocox verify` trusts no file: the run id is the hash of the manifest, and the manifest names the signer of
commits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.sections import toml_value
from dilocox.protocol.consensus.head import initial_head
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.ids import JoinLink, peer_id
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import seal
from dilocox.transport.store.chain_file import ChainFile
from tests.conftest import Installed
from tests.helpers import COORDINATOR, Table, digest, dilocox, identity, manifest

RUN = manifest()
EVIL = identity(66)
Verify = Callable[..., tuple[int, str]]


def write(home: Path, run: Manifest, table: Table) -> None:
    """Write the chain of a table to a daemon's folder, valid or not."""
    folder = home / "runs" / run.run_id.hex()[:16]
    folder.mkdir(parents=True)
    kept = ChainFile(folder / "chain.db", run)
    for commit in table.commits:
        kept.write(initial_head(table.pen.peer), commit)
    kept.close()


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verify:
    def run(*arguments: str) -> tuple[int, str]:
        code = dilocox(monkeypatch, "verify", *arguments, "--home", str(tmp_path))
        said = capsys.readouterr()
        return code, (said.out + said.err).replace("\n", " ")

    return run


def test_a_chain_holds_for_its_run_by_id_link_and_file(tmp_path: Path, verify: Verify):
    write(tmp_path, RUN, Table(RUN).genesis().train(3))
    link = JoinLink(RUN.run_id, COORDINATOR.peer, "192.0.2.1:1", digest("certificate"))
    (tmp_path / "link").write_text(f"{link}\n")
    for named in ([], [RUN.run_id.hex()], [str(link)], [f"@{tmp_path / 'link'}"]):
        code, said = verify(*named)
        assert (code, "4 commits are valid" in said) == (0, True), said
        assert RUN.run_id.hex() in said
        assert COORDINATOR.peer in said


def test_an_invented_coordinator_signs_nothing_under_a_real_run_id(tmp_path: Path, verify: Verify):
    """Reproduce a fault: the result was "5 commits hold", exit 0, because the file named the signer of its commits."""
    write(tmp_path, RUN, Table(RUN, pen=EVIL).genesis().train(3))
    code, said = verify(RUN.run_id.hex())
    assert code == 1
    assert "did not sign" in said


def test_a_chain_with_a_proof_of_two_beside_it_does_not_hold(tmp_path: Path, verify: Verify):
    table = Table(RUN).genesis().train(1)
    write(tmp_path, RUN, table)
    body = pb.Commit.FromString(table.commits[1].envelope.body)
    body.closed_at_ms += 1
    other = seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, body).envelope
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "fork-1.pb").write_bytes(pb.Fork(first=table.commits[1].envelope, second=other).SerializeToString())
    code, said = verify(RUN.run_id.hex())
    assert code == 1
    assert "two different commits for round 1" in said


def test_an_invented_run_is_not_the_one_that_was_asked_for(tmp_path: Path, verify: Verify):
    invented = manifest(run={"coordinator": EVIL.peer})
    write(tmp_path, invented, Table(invented, pen=EVIL).genesis().train(3))
    code, said = verify(RUN.run_id.hex())
    assert code == 2
    assert "no chain of the run" in said
    (tmp_path / "runs" / invented.run_id.hex()[:16]).rename(tmp_path / "runs" / RUN.run_id.hex()[:16])
    code, said = verify(RUN.run_id.hex())
    assert code == 1
    assert "contains the run" in said
    code, said = verify()
    assert code == 0
    assert invented.run_id.hex() in said, "who does not say what run it must be is told"


def test_what_is_wrong_with_another_run_s_file_is_of_no_matter(tmp_path: Path, verify: Verify):
    write(tmp_path, RUN, Table(RUN).genesis().train(3))
    other = tmp_path / "runs" / ("0" * 16)
    other.mkdir()
    (other / "chain.db").write_bytes(b"garbage" * 100)
    assert verify(RUN.run_id.hex())[0] == 0
    assert verify()[0] == 1


@pytest.mark.parametrize("named", ["@nowhere", "dilocox://junk", "ab"])
def test_what_names_no_run_is_a_sentence(named: str, tmp_path: Path, verify: Verify):
    write(tmp_path, RUN, Table(RUN).genesis())
    code, said = verify(named)
    assert code == 2
    assert "link" in said


def test_chain_of_a_run_with_availability_holds_without_its_plugin_and_is_not_replayed(
    tmp_path: Path, verify: Verify, installed: Installed
):
    run = manifest(availability={})
    write(tmp_path, run, Table(run).genesis().train(3))
    assert verify()[0] == 0
    code, said = verify("--replay", "1")
    assert (code, "install dilocox-availability" in said) == (2, True), said


def test_a_run_s_coordinator_is_its_owner_unless_it_names_another():
    owner = identity(5)
    text = "\n".join(f"[{name}]\n" + _toml(section) for name, section in RUN.model_dump(exclude_none=True).items())
    alone = text.replace(f'owner = "{RUN.run.owner}"', f'owner = "{owner.key.hex()}"').replace(
        f'coordinator = "{COORDINATOR.peer}"', ""
    )
    assert Manifest.from_toml(alone).coordinator == owner.peer == peer_id(owner.key)
    assert Manifest.from_toml(text).coordinator == COORDINATOR.peer
    with pytest.raises(ConfigError, match=r"run\.coordinator"):
        Manifest.from_toml(text.replace(COORDINATOR.peer, "bob"))


def _toml(section: dict[str, object]) -> str:
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in section.items()) + "\n"
