"""Tests of plugins' commands: listed if they are installed, and a broken one harms no other command."""

import re
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dilocox.cli import commands
from dilocox.cli import main as cli
from dilocox.cli.run.init import render_preset
from dilocox.coordinator.kv_store import STORES, parse_place
from dilocox.node.attest.verify import verify_evidence
from dilocox.node.daemon import prover_for
from dilocox.node.exchange.shards import CHECKS, find_restorer, find_shards
from dilocox.node.preflight.machine import Here, of_machine
from dilocox.protocol.consensus.chain import NamedBy
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.run_lint import Level
from dilocox.protocol.wire.attestation import Code, Evidence
from dilocox.transport.archive.storage import SCHEMES, FolderStorage, open_storage
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.chain_file import ChainFile
from dilocox.transport.store.data_directory import DataDirectory
from tests.conftest import Installed
from tests.fake_shards import FakeShards
from tests.helpers import dilocox, manifest, rejected

ROOT = Path(__file__).parents[2]
SHARING = manifest(availability={})


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    code = dilocox(monkeypatch, *words)
    return code, capsys.readouterr().err


def test_help_without_plugins_lists_the_core_alone(installed: Installed):
    shown = CliRunner().invoke(cli.app, ["--help"]).output
    assert "Plugins" not in shown
    assert set(get_command(cli.app).commands) == set(commands.VERBS)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["status", "data-build", "node-", "Upper"])
def test_plugin_whose_name_could_be_taken_for_a_core_command_is_not_found(installed: Installed, name: str):
    installed.add("other", f"[{commands.PLUGINS}]\n{name} = nowhere:app\n")
    assert not commands.plugins()


@pytest.mark.parametrize(
    ("entry_points", "summary"),
    [
        ("broken = no_such_module:app", "Some [red]text[/nothing]."),
        ("broken = os:path", "A plugin."),
        ("no entry point", "A plugin."),
    ],
)
def test_broken_plugin_harms_no_core_command(
    installed: Installed,
    entry_points: str,
    summary: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    installed.add("broken", f"[{commands.PLUGINS}]\n{entry_points}\n", summary)
    assert CliRunner().invoke(cli.app, ["--help"]).exit_code == 0
    monkeypatch.setenv("DILOCOX_NODE__THREADS", "2")
    monkeypatch.setenv("DILOCOX_BROKEN__OPTION", "2")
    if "=" in entry_points:
        code, error = said(monkeypatch, capsys, "status", "--home", str(tmp_path))
        assert (code, "not-running" in error) == (3, True), error


def test_plugin_that_cannot_be_loaded_is_a_sentence(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    installed.add("other", f"[{commands.PLUGINS}]\nbroken = no_such_module:app\n")
    code, error = said(monkeypatch, capsys, "broken")
    assert (code, "the plugin other cannot be loaded" in error) == (2, True), error


def test_core_imports_no_plugin():
    for room in ("protocol", "transport", "coordinator", "node", "views", "cli"):
        for path in (ROOT / room).rglob("*.py"):
            assert not re.search(r"^\s*(from|import) dilocox_", path.read_text(), re.MULTILINE), path


def test_plugin_adds_a_scheme_of_archives(installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "ipfs_store.py").write_text("class Store:\n    def __init__(self, url):\n        self.url = url\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.add("ipfs", f"[{SCHEMES}]\nipfs = ipfs_store:Store\nfile = ipfs_store:Store\nbroken = no_such_module:Store\n")
    assert open_storage("ipfs://abc").url == "ipfs://abc"
    assert isinstance(open_storage(f"file://{tmp_path}"), FolderStorage), "a scheme of the core stays the core's"
    with pytest.raises(ConfigError, match="the plugin ipfs cannot be loaded"):
        open_storage("broken://abc")
    with pytest.raises(ConfigError, match="is not an archive"):
        open_storage("other://abc")


def test_store_without_its_plugin_names_what_is_installed(installed: Installed):
    with pytest.raises(ConfigError, match="install dilocox-etcd"):
        parse_place("etcd://127.0.0.1:2379/run")
    installed.add("other", f"[{STORES}]\nother = builtins:dict\n")
    with pytest.raises(ConfigError, match="installed: other://"):
        parse_place("etcd://127.0.0.1:2379/run")


@pytest.mark.parametrize("function", ["None", "1 / 0", "sys.exit('bye')", "{}['key']"])
def test_store_plugin_that_fails_is_a_sentence_and_no_lone_coordinator(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
):
    (tmp_path / "bad_store.py").write_text(f"import sys\ndef place(url, files):\n    return {function}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_store", raising=False)
    installed.add("bad", f"[{STORES}]\nbad = bad_store:place\n[{SCHEMES}]\nbad = bad_store:place\n")
    with pytest.raises(ConfigError, match="plugin"):
        parse_place("bad://user:secret@host/run")
    if function != "None":
        with pytest.raises(ConfigError, match="the plugin bad cannot be used"):
            open_storage("bad://host")


def test_url_in_an_error_shows_no_password(installed: Installed):
    with pytest.raises(ConfigError) as refused:
        parse_place("etcd://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(refused.value)


def test_run_without_availability_asks_no_plugin(installed: Installed):
    installed.add("broken", f"[{CHECKS}]\navailability = no_such_module:of_run\n")
    assert find_shards(manifest()) is None


def test_shards_without_their_plugin_name_what_is_installed(installed: Installed, tmp_path: Path):
    with pytest.raises(ConfigError, match="install dilocox-availability"):
        find_shards(SHARING)
    here = Here(tmp_path, "127.0.0.1", 0, None, {}, None)
    [found] = [each for each in of_machine(SHARING, here) if each.about == "availability"]
    assert (found.level, "install dilocox-availability" in found.says) == (Level.WRONG, True)


def test_plugin_makes_the_shards_of_a_run(installed: Installed, tmp_path: Path):
    installed.add("shards", f"[{CHECKS}]\navailability = tests.fake_shards:FakeShards\n")
    assert isinstance(find_shards(SHARING), FakeShards)
    here = Here(tmp_path, "127.0.0.1", 0, None, {}, None)
    assert [each.says for each in of_machine(SHARING, here) if each.about == "availability"] == ["fake"]


@pytest.mark.parametrize("function", ["None", "1 / 0", "sys.exit('bye')", "{}['key']", "object()"])
def test_plugin_that_makes_no_shards_is_a_sentence(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str
):
    (tmp_path / "bad_shards.py").write_text(f"import sys\ndef of_run(manifest):\n    return {function}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bad_shards", raising=False)
    installed.add("bad", f"[{CHECKS}]\navailability = bad_shards:of_run\n")
    with pytest.raises(ConfigError, match="plugin"):
        find_shards(SHARING)


async def test_reader_without_the_plugin_learns_of_it_where_no_peer_serves_a_blob(installed: Installed, tmp_path: Path):
    with closing(ChainFile(tmp_path / "chain.db", SHARING)) as chain:
        restorer = find_restorer(tmp_path, None, None, chain)  # type: ignore[arg-type]
    assert restorer is not None
    with pytest.raises(RemoteError) as refused:
        await restorer.fetch(bytes(32), NamedBy(1), None, BlobStore(tmp_path / "blobs"), 1)
    assert refused.value.reason == pb.REASON_UNAVAILABLE
    assert "install dilocox-availability" in refused.value.detail


async def test_reader_of_a_run_without_availability_restores_nothing(installed: Installed, tmp_path: Path):
    with closing(ChainFile(tmp_path / "chain.db", manifest())) as chain:
        assert find_restorer(tmp_path, None, None, chain) is None  # type: ignore[arg-type]


ATTESTED = """
[attestation]
kinds = ["{kind}"]
[attestation.measurements]
{kind} = ["{measurement}"]
"""


def test_kind_of_evidence_without_its_plugin_names_the_distribution(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    rejected(lambda: verify_evidence(Evidence("tdx", b"quote"), 0), Code.UNKNOWN_KIND)
    (tmp_path / "quote").write_bytes(b"quote")
    run = tmp_path / "run.toml"
    run.write_text(render_preset("tiny", "x", "ab" * 32) + ATTESTED.format(kind="tdx", measurement="ab" * 48))
    for words, expected in (
        (("attest", "verify", "--kind", "tdx", "--blob", str(tmp_path / "quote")), 2),
        (("attest", "self"), 1),
        (("coordinator", str(run), "--home", str(tmp_path / "home")), 2),
    ):
        code, error = said(monkeypatch, capsys, *words)
        assert (code, "install dilocox-tee" in error) == (expected, True), error


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"kinds": ["tdx"]}, "install dilocox-tee"),
        ({"kinds": ["simulated"], "require_gpu": True}, "'nvidia': install dilocox-tee"),
        ({"kinds": ["made-up"]}, "installed: simulated"),
    ],
)
def test_node_whose_run_asks_for_a_kind_that_is_not_installed_ends(
    installed: Installed, section: dict, says: str, tmp_path: Path
):
    run = manifest(attestation=section)
    with closing(DataDirectory(tmp_path)) as home, pytest.raises(ConfigError, match=says):
        prover_for(SimpleNamespace(simulated_measurement=None, collateral=None), home, run)  # type: ignore[arg-type]
    here = Here(tmp_path, "127.0.0.1", 0, None, {}, None)
    (finding,) = (each for each in of_machine(run, here) if each.about == "attestation.kinds")
    assert (finding.level, says in finding.says) == (Level.WRONG, True)
