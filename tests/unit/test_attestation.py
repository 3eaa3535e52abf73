"""Attestation: binding, policy, challenges, the simulated kind, and kinds of plugins."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dilocox.cli.dev import attest
from dilocox.cli.run.init import render_preset
from dilocox.coordinator.challenges import LIFETIME_SECONDS, Challenges
from dilocox.node.attest import attesters, kinds, simulated
from dilocox.node.attest.prover import Prover
from dilocox.node.attest.verify import appraise, verify_evidence
from dilocox.node.exchange.coordinator_client import Answer
from dilocox.protocol import limits
from dilocox.protocol.consensus.rules import Outcome
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Attestation, Manifest
from dilocox.protocol.wire.attestation import (
    AttestationError,
    Claims,
    Code,
    Evidence,
    GpuClaims,
    Policy,
    check_binding,
    gpu_nonce,
    report_data,
)
from dilocox.protocol.wire.messages import Statement
from dilocox.transport.store.files import NAMED_BYTES
from tests.helpers import flipped, identity, manifest, rejected

NOW = 1_800_000_000
RUN, KEY, NONCE = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32


def test_no_flipped_bit_of_simulated_evidence_is_accepted():
    good = simulated.make(bytes(64), b"\x09" * 48)
    for seed in range(250):
        with pytest.raises(AttestationError):
            verify_evidence(replace(good, blob=flipped(good.blob, seed)), NOW)


def test_any_bytes_of_any_kind_are_refused_with_a_code():
    for size in (0, 1, 47, 600, 1184, 5000):
        for kind in ("tdx", "sev-snp", "simulated", "nvidia", "made-up"):
            blob = os.urandom(size)
            with pytest.raises(AttestationError):
                verify_evidence(Evidence(kind, blob, (os.urandom(80),), os.urandom(50)), NOW)


# Binding and policy


def test_report_data_is_bound_to_each_part_and_lengths_cannot_be_shifted():
    base = report_data("tdx", KEY, RUN, NONCE)
    others = [("sev-snp", KEY, RUN, NONCE), ("tdx", RUN, KEY, NONCE), ("tdx", KEY + RUN[:1], RUN[1:], NONCE)]
    assert len({base, *(report_data(*other) for other in others)}) == 4
    assert len(base) == 64
    assert len(gpu_nonce(base)) == 32


def test_each_wrong_binding_has_its_own_code():
    good = pb.BoundEvidence(key=KEY, run=RUN, nonce=NONCE)
    check_binding(good, KEY, RUN, NONCE)
    rejected(lambda: check_binding(good, b"\x09" * 32, RUN, NONCE), Code.PEER)
    rejected(lambda: check_binding(good, KEY, b"\x09" * 32, NONCE), Code.RUN)
    rejected(lambda: check_binding(good, KEY, RUN, b"\x09" * 32), Code.NONCE)


MEASURED = "ab" * 48
CLAIMS = Claims("sev-snp", (MEASURED,), b"\x05" * 64, NOW + 1000, tcb={"snp": 20})
SETTINGS = Attestation(kinds=("sev-snp",), measurements={"sev-snp": (MEASURED,)}, lifetime_seconds=600)
GPU_CLAIMS = GpuClaims("Hopper", "1", "2", gpu_nonce(CLAIMS.report_data), {1: "aa"}, NOW + 500)
LISTED = {"1/2": {"1": ("aa", "bb")}}


@pytest.mark.parametrize(
    ("claims", "settings", "code"),
    [
        ({}, {}, Code.OK),
        ({"kind": "tdx"}, {}, Code.KIND),
        ({"report_data": b"\x06" * 64}, {}, Code.REPORT_DATA),
        ({"report_data": b"\x05" * 63}, {}, Code.REPORT_DATA),
        ({"measurement": ("cd" * 48,)}, {}, Code.MEASUREMENT),
        ({}, {"measurements": {"sev-snp": ()}}, Code.MEASUREMENT),
        ({}, {"measurements": {}}, Code.MEASUREMENT),
        ({"measurement": (MEASURED, MEASURED)}, {}, Code.MEASUREMENT),
        ({"measurement": (MEASURED, "cd" * 48)}, {"measurements": {"sev-snp": (f"{MEASURED}:*",)}}, Code.OK),
        ({"debug": True}, {}, Code.DEBUG),
        ({"migratable": True}, {}, Code.MIGRATABLE),
        ({"vmpl": 1}, {}, Code.VMPL),
        ({"version": 2}, {}, Code.VERSION),
        ({"tcb_status": "OutOfDate"}, {}, Code.TCB_STATUS),
        ({}, {"minimum_tcb": {"sev-snp": {"snp": 21}}}, Code.TCB),
        ({}, {"minimum_tcb": {"sev-snp": {"unheard-of": 0}}}, Code.TCB),
        ({"valid_until": NOW}, {}, Code.EXPIRED),
        ({}, {"require_gpu": True}, Code.GPU),
        ({"gpus": (GPU_CLAIMS,)}, {}, Code.GPU),
        ({"gpus": (GPU_CLAIMS,)}, {"gpu_measurements": LISTED, "require_gpu": True}, Code.OK),
        ({"gpus": (replace(GPU_CLAIMS, nonce=bytes(32)),)}, {"gpu_measurements": LISTED}, Code.NONCE),
        ({"gpus": (replace(GPU_CLAIMS, measurements={1: "cc"}),)}, {"gpu_measurements": LISTED}, Code.GPU),
        ({"gpus": (replace(GPU_CLAIMS, valid_until=NOW),)}, {"gpu_measurements": LISTED}, Code.EXPIRED),
    ],
)
def test_policy(claims, settings, code):
    policy = Policy(SETTINGS.model_copy(update=settings))
    verdict = policy.appraise(replace(CLAIMS, **claims), b"\x05" * 64, NOW)
    assert verdict.code == code, verdict.reason
    assert verdict.ok == (code == Code.OK)
    assert bool(verdict.reason) != verdict.ok


def test_a_verdict_lasts_until_the_earliest_end():
    data = b"\x05" * 64
    assert Policy(SETTINGS).appraise(CLAIMS, data, NOW).valid_until == NOW + 600
    assert Policy(SETTINGS).appraise(replace(CLAIMS, valid_until=NOW + 9), data, NOW).valid_until == NOW + 9
    with_gpu = Policy(SETTINGS.model_copy(update={"gpu_measurements": LISTED}))
    assert with_gpu.appraise(replace(CLAIMS, gpus=(GPU_CLAIMS,)), data, NOW).valid_until == NOW + 500


def test_an_unexpected_failure_denies():
    broken = Policy(SETTINGS).appraise(replace(CLAIMS, measurement=None), b"\x05" * 64, NOW)  # type: ignore[arg-type]
    assert (broken.ok, broken.code) == (False, Code.INTERNAL)


def test_simulated_is_refused_unless_the_run_names_it():
    data = report_data("simulated", KEY, RUN, NONCE)
    evidence = simulated.make(data, b"\x09" * 48)
    allowed = Attestation(kinds=("simulated",), measurements={"simulated": ("09" * 48,)})
    verdict, claims = appraise(Policy(allowed), evidence, data, NOW)
    assert verdict.ok
    assert claims is not None
    assert claims.simulated
    assert appraise(Policy(SETTINGS), evidence, data, NOW)[0].code == Code.KIND
    assert appraise(Policy(allowed), evidence, bytes(64), NOW)[0].code == Code.REPORT_DATA


def test_gpu_evidence_never_admits_alone():
    rejected(lambda: verify_evidence(Evidence("nvidia", b"a report"), NOW), Code.KIND)
    text = render_preset("tiny", "x", "ab" * 32)
    with pytest.raises(ConfigError, match="GPU evidence never admits"):
        Manifest.from_toml(text + '\n[attestation]\nkinds = ["nvidia"]\n')
    with pytest.raises(ConfigError, match="not among kinds"):
        Manifest.from_toml(text + f'\n[attestation]\n[attestation.measurements]\ntdx = ["{MEASURED}"]\n')


def test_evidence_has_caps():
    rejected(lambda: Evidence("tdx", bytes(limits.EVIDENCE_BLOB_BYTES + 1)), Code.OVERSIZE)
    rejected(lambda: Evidence("tdx", b"", (bytes(limits.EVIDENCE_CERTIFICATE_BYTES + 1),)), Code.OVERSIZE)
    rejected(lambda: Evidence("tdx", b"", (b"",) * (limits.EVIDENCE_CERTIFICATES + 1)), Code.OVERSIZE)
    rejected(lambda: Evidence("tdx", b"", (), bytes(limits.COLLATERAL_BYTES + 1)), Code.OVERSIZE)
    nested = pb.Evidence(kind="tdx", gpus=[pb.Evidence(kind="nvidia", gpus=[pb.Evidence(kind="nvidia", gpus=[pb.Evidence()])])])
    rejected(lambda: Evidence.from_message(nested), Code.MALFORMED)
    whole = Evidence("tdx", b"quote", (b"one", b"two"), b"{}", (Evidence("nvidia", b"report", (b"chain",)),))
    assert Evidence.from_message(pb.Evidence.FromString(whole.message().SerializeToString())) == whole


# Challenges


def test_a_challenge_is_good_once_for_one_peer_and_a_short_time():
    now = [1000.0]
    challenges = Challenges(lambda: now[0])
    nonce = challenges.give("alice")
    rejected(lambda: challenges.redeem("bob", nonce), Code.NONCE)
    challenges.redeem("alice", nonce)
    rejected(lambda: challenges.redeem("alice", nonce), Code.NONCE)
    late = challenges.give("alice")
    now[0] += LIFETIME_SECONDS
    challenges.redeem("alice", challenges.give("alice"))
    now[0] += LIFETIME_SECONDS
    rejected(lambda: challenges.redeem("alice", late), Code.NONCE)


def test_asking_costs_nobody_a_challenge():
    challenges = Challenges(lambda: 0.0)
    kept = challenges.give("bob")
    mine = [challenges.give("alice") for _ in range(limits.CHALLENGES + 1)]
    challenges.redeem("bob", kept)
    challenges.redeem("alice", mine[0])


@pytest.mark.parametrize("nonce", [b"", b"x" * 16, b"x" * 32])
def test_a_nonce_that_is_not_ours_is_refused(nonce: bytes):
    rejected(lambda: Challenges(lambda: 0.0).redeem("alice", nonce), Code.NONCE)


# Attesters


def test_a_machine_without_hardware_says_so():
    rejected(lambda: attesters.choose_attester(("tdx", "sev-snp"), "1", None, None), Code.UNAVAILABLE)


def test_the_simulated_measurement_comes_from_a_file_or_the_version(tmp_path: Path):
    file = tmp_path / "measurement"
    file.write_text("09" * 48 + "\n")
    kind, attester = attesters.choose_attester(("simulated",), "1.0", file, None)
    assert (kind, simulated.verify(attester(bytes(64)), NOW).measurement) == ("simulated", ("09" * 48,))
    file.unlink()
    rejected(lambda: attester(bytes(64)), Code.UNAVAILABLE)
    _, by_version = attesters.choose_attester(("simulated",), "1.0", None, None)
    _, by_other = attesters.choose_attester(("simulated",), "2.0", None, None)
    assert by_version(bytes(64)).blob != by_other(bytes(64)).blob


@pytest.mark.parametrize(("end", "code"), [(0, Code.MALFORMED), ((1 << 64) - 1, "")], ids=["none", "the largest"])
async def test_prover_end_of_verdict_is_absent_or_far_away_goes_on(end: int, code: str):
    """Check that no number is read from an answer's sentence, which is for people."""

    class Coordinator:
        async def challenge(self, peer: str) -> bytes:
            return bytes(32)

        async def submit(self, statement: Statement) -> Answer:
            return Answer(Outcome.ACCEPT, pb.REASON_UNSPECIFIED, "4000000000", statement.envelope, b"", end)

    _, attester = attesters.choose_attester(("simulated",), "1.0", None, None)
    prover = Prover(identity(1), manifest(), "simulated", attester)
    staying = asyncio.create_task(prover.stay_attested(Coordinator()))  # type: ignore[arg-type]
    await asyncio.wait({staying, changed := asyncio.create_task(prover.changed.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert changed.done()
    assert not staying.done()
    assert (prover.result.attested, prover.result.code) == (not code, code)
    staying.cancel()


# The command


def attest_verify(*arguments: str) -> tuple[int, dict]:
    command = [sys.executable, "-P", "-m", "dilocox.cli.main", "attest", "verify", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_attest_verify_reads_any_encoding_and_says_why_not(tmp_path: Path):
    fake = simulated.make(bytes(64), b"\x09" * 48).blob
    for suffix, raw in (("bin", fake), ("hex", fake.hex().encode() + b"\n"), ("b64", base64.encodebytes(fake))):
        (tmp_path / suffix).write_bytes(raw)
        code, facts = attest_verify("--kind", "simulated", "--blob", str(tmp_path / suffix))
        assert (code, facts["measurement"], facts["ok"]) == (0, ["09" * 48], True)


def test_attest_verify_reads_no_file_that_is_too_long(tmp_path: Path):
    (tmp_path / "blob").write_bytes(bytes(NAMED_BYTES + 1))
    for named in ({"blob": tmp_path / "blob"}, {"blob": Path("/dev/null"), "certs": [tmp_path / "blob"]}):
        with pytest.raises(ConfigError, match="1 MiB"):
            attest.verify(kind="simulated", **named)


def test_attest_verify_appraises_by_a_run_file(tmp_path: Path):
    (tmp_path / "quote").write_bytes(simulated.make(bytes(64), b"\x09" * 48).blob)
    text = render_preset("tiny", "x", "ab" * 32)
    for measurement, expected in (("09", (0, "ok")), ("08", (1, "measurement"))):
        section = f'\n[attestation]\nkinds = ["simulated"]\n[attestation.measurements]\nsimulated = ["{measurement * 48}"]\n'
        (tmp_path / "run.toml").write_text(text + section)
        code, facts = attest_verify(
            "--kind", "simulated", "--blob", str(tmp_path / "quote"), "--policy", str(tmp_path / "run.toml")
        )
        assert (code, facts["code"]) == expected


# Plug-ins, and keys from elsewhere


def test_a_plugin_adds_a_kind_but_does_not_replace_the_simulated_one(monkeypatch: pytest.MonkeyPatch):
    named = {kind: EntryPoint(kind, "tests.unit.test_attestation:Toy", kinds.GROUP) for kind in ("toy", "simulated")}
    named["broken"] = EntryPoint("broken", "no_such_module:Kind", kinds.GROUP)
    monkeypatch.setattr(kinds, "plug_ins", lambda: named)
    assert kinds.kind_names() == ("broken", "toy", "simulated")
    assert verify_evidence(Evidence("toy", b"good"), NOW).measurement == ("aa" * 48,)
    rejected(lambda: verify_evidence(Evidence("toy", b"bad"), NOW), Code.INTERNAL)
    rejected(lambda: verify_evidence(Evidence("toy", b"another"), NOW), Code.INTERNAL)
    rejected(lambda: verify_evidence(Evidence("toy", b"gpu"), NOW), Code.INTERNAL)
    rejected(lambda: verify_evidence(Evidence("broken", b"good"), NOW), Code.INTERNAL)
    rejected(lambda: verify_evidence(Evidence("simulated", b"good"), NOW), Code.MALFORMED)
    kind, attester = attesters.choose_attester(("broken-too", "toy"), "1", None, Path("collateral"))
    assert (kind, attester(b"data")) == ("toy", Evidence("toy", b"data", (), b"collateral"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        attesters.choose_attester(("broken",), "1", None, None)


@pytest.mark.parametrize("class_name", ["NoKind", "FailsToLook", "FailsToAttest", "FailsToBegin"])
def test_a_plugin_that_fails_is_an_error_of_ours(class_name: str, monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("toy", f"tests.unit.test_attestation:{class_name}", kinds.GROUP)
    monkeypatch.setattr(kinds, "plug_ins", lambda: {"toy": entry})
    settings = Attestation(kinds=("toy",), measurements={"toy": ("aa" * 48,)})
    if class_name in ("NoKind", "FailsToBegin"):
        with pytest.raises(ConfigError, match="uninstall it"):
            kinds.require_kinds(settings)
        rejected(lambda: verify_evidence(Evidence("toy", b"good"), NOW), Code.INTERNAL)
    else:
        kinds.require_kinds(settings)
        rejected(lambda: attesters.choose_attester(("toy",), "1", None, None)[1](b"data"), Code.INTERNAL)


class Toy:
    """A kind of a careless plugin."""

    def is_here(self) -> bool:
        return True

    def attest(self, report_data: bytes, collateral: Path | None) -> Evidence:
        return Evidence("toy", report_data, (), str(collateral).encode())

    def measurement(self, evidence: Evidence) -> tuple[str, ...]:
        return ("aa" * 48,)

    def verify(self, evidence: Evidence, now: int, terms: kinds.Terms) -> Claims | GpuClaims:
        if evidence.blob == b"bad":
            raise RuntimeError("plugins may be careless: that denies")
        if evidence.blob == b"gpu":
            return GPU_CLAIMS
        return Claims("another" if evidence.blob == b"another" else "toy", ("aa" * 48,), bytes(64), now + 60)


class NoKind:
    pass


class FailsToBegin(Toy):
    def __init__(self) -> None:
        raise RuntimeError("no device file")


class FailsToLook(Toy):
    def is_here(self) -> bool:
        raise OSError("no device file")


class FailsToAttest(Toy):
    def attest(self, report_data: bytes, collateral: Path | None) -> Evidence:
        raise TypeError("no bytes")


def test_a_cpu_s_evidence_with_a_gpu_s_is_verified_by_both_kinds(monkeypatch: pytest.MonkeyPatch):
    named = {kind: EntryPoint(kind, "tests.unit.test_attestation:Toy", kinds.GROUP) for kind in ("toy", "nvidia")}
    monkeypatch.setattr(kinds, "plug_ins", lambda: named)
    with_gpu = Evidence("toy", b"good", (), b"", (Evidence("nvidia", b"gpu"),))
    assert verify_evidence(with_gpu, NOW).gpus == (GPU_CLAIMS,)
    rejected(lambda: verify_evidence(replace(with_gpu, gpu=(Evidence("nvidia", b"good"),)), NOW), Code.INTERNAL)
    del named["nvidia"]
    rejected(lambda: verify_evidence(with_gpu, NOW), Code.UNKNOWN_KIND)


def test_hardware_kinds_refuse_a_key_that_this_process_did_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from dilocox.node import daemon
    from dilocox.protocol.errors import LocalError
    from dilocox.transport.store.data_directory import DataDirectory
    from tests.helpers import manifest

    run = manifest(attestation={"kinds": ["tdx"], "measurements": {"tdx": ["ab" * 48]}})
    settings = SimpleNamespace(simulated_measurement=None, collateral=None)
    monkeypatch.setattr(daemon, "choose_attester", lambda *arguments: ("tdx", lambda data: Evidence("tdx", b"")))
    first = DataDirectory(tmp_path)
    assert first.identity_is_new
    assert daemon.prover_for(settings, first, run) is not None  # type: ignore[arg-type]
    first.close()
    second = DataDirectory(tmp_path)
    with pytest.raises(LocalError, match="made inside the measured process"):
        daemon.prover_for(settings, second, run)  # type: ignore[arg-type]
    second.close()
    assert daemon.prover_for(settings, first, manifest()) is None  # type: ignore[arg-type]
