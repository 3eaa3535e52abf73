"""Attestation: public vectors, synthetic vendors with everything wrong that samples cannot show, binding, policy, challenges."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.cli import attest
from dilocox.cli.init import render_preset
from dilocox.coordinator.challenges import LIFETIME_SECONDS, Challenges
from dilocox.node.attest import attesters, nvidia, simulated, snp, tdx
from dilocox.node.attest.prover import Prover
from dilocox.node.attest.verify import appraise, verify_evidence
from dilocox.node.coordinator_link import Answer
from dilocox.protocol import limits
from dilocox.protocol.attestation import (
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
from dilocox.protocol.errors import ConfigError
from dilocox.protocol.manifest import Attestation, Manifest
from dilocox.protocol.messages import Statement
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.rules import Outcome
from dilocox.transport.files import NAMED_BYTES
from tests.helpers import identity, manifest
from tests.vendors import LATELY, NOW, Amd, Gpu, Intel, der, pem

VECTORS = Path(os.environ.get("DILOCOX_TEE_VECTORS", Path(__file__).parents[3] / "shared" / "vectors" / "tee"))
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason=f"no public TEE samples in {VECTORS}")
RUN, KEY, NONCE = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32


def rejected(call, code: Code) -> str:
    with pytest.raises(AttestationError) as caught:
        call()
    assert caught.value.code == code, caught.value.detail
    return caught.value.cause


# Public vectors

SNP_FILES = {
    "milan_v2_virtee": ("milan_v2_virtee.report.hex", "milan_v2_virtee.vcek.der", "ask_ark_milan.pem"),
    "genoa_ms": ("genoa_ms.report.bin", "genoa_ms.vcek.pem", "ask_ark_genoa.pem"),
    "turin_ms": ("turin_ms.report.bin", "turin_ms.vcek.pem", "ask_ark_turin_vcek.pem"),
    "genoa_ms with Milan roots": ("genoa_ms.report.bin", "genoa_ms.vcek.pem", "ask_ark_milan.pem"),
}
GPU_FILES = {
    "hopper_550.90.07": ("hopper_550.90.07.report.hex", "hopper_550.90.07.chain.pem"),
    "blackwell_575.32": ("blackwell_575.32.report.txt", "blackwell_575.32.chain.txt"),
}


def sample(path: Path) -> bytes:
    raw = path.read_bytes()
    return bytes.fromhex(raw.decode()) if path.suffix in (".hex", ".txt") else raw


def tdx_sample(name: str) -> Evidence:
    folder = VECTORS / "tdx"
    return Evidence("tdx", (folder / f"{name}.quote").read_bytes(), (), (folder / f"{name}.collateral.json").read_bytes())


def snp_sample(name: str) -> Evidence:
    report, *certs = (VECTORS / "snp" / file for file in SNP_FILES[name])
    return Evidence("sev-snp", sample(report), tuple(path.read_bytes() for path in certs))


def gpu_sample(name: str) -> Evidence:
    report, chain = (VECTORS / "nvidia" / file for file in GPU_FILES[name])
    return Evidence("nvidia", sample(report), (chain.read_bytes(),))


def outcome(case: str, now: int) -> str:
    """The line that expected.json has for a case."""
    kind, _, name = case.partition("/")
    try:
        if kind == "tdx":
            return tdx.verify(tdx_sample(name.removesuffix(" (expired)")), now).tcb_status
        if kind == "snp":
            claims = snp.verify(snp_sample(name), now)
            facts = f"debug={claims.debug} vmpl={claims.vmpl} tcb={claims.tcb}"
            return f"OK {claims.product} v{claims.version} {facts}"
        nonce = bytes(32) if name.endswith("wrong nonce") else None
        gpu = nvidia.verify(gpu_sample(name.removesuffix(" wrong nonce")), now, nonce)
        return f"OK driver={gpu.driver} nonce={gpu.nonce.hex()}"
    except AttestationError as error:
        return f"REJECT: {error.cause if kind == 'tdx' else error.code}"


@needs_vectors
def test_every_public_vector_gives_the_expected_outcome():
    expected = json.loads((VECTORS / "expected.json").read_text())
    assert {case: outcome(case, item["now"]) for case, item in expected.items()} == {
        case: item["expect"] for case, item in expected.items()
    }


# SEV-SNP

AMD_WRONGS = [
    (Amd(root="another"), None, Code.ROOT),
    (Amd(version=4), None, Code.VERSION),
    (Amd(version=2), None, None),
    (Amd(version=5), None, None),
    (Amd(signing_key=1, chip=b"\x99" * 64), None, None),
    (Amd(policy=0), None, Code.RESERVED),
    (Amd(policy=1 << 17 | 1 << 40), None, Code.RESERVED),
    (Amd(key_info=1 << 9), None, Code.RESERVED),
    (Amd(cpuid=(0x19, 0x01)), None, Code.PRODUCT),
    (Amd(cpuid=(0x1A, 0x02)), None, Code.PRODUCT),
    (Amd(certificate_product="Milan-B0"), None, Code.PRODUCT),
    (Amd(certificate_tcb={"snp": 19}), None, Code.TCB),
    (Amd(chip=b"\x99" * 64), None, Code.CHIP),
    (Amd(chip=bytes(64)), None, None),
    (Amd(chip=bytes(63) + b"\x01"), None, Code.CHIP),
    (Amd(end=LATELY), None, Code.EXPIRED),
    (Amd(), 10**9, Code.NOT_YET_VALID),
    (Amd(), 2 * 10**9, Code.EXPIRED),
]


@pytest.mark.parametrize(("platform", "now", "code"), AMD_WRONGS)
def test_what_an_amd_platform_may_be(platform: Amd, now: int | None, code: Code | None):
    roots = Amd().roots

    def verify() -> Claims:
        return snp.verify(platform.evidence(), now or NOW, roots=roots)

    if code is None:
        assert verify().measurement == ("11" * 48,)
    else:
        rejected(verify, code)


def test_a_host_that_masks_its_chip_s_id_is_taken_and_one_that_masks_its_key_signs_nothing():
    amd = Amd(chip=bytes(64))
    assert any("masks the chip's id" in note for note in snp.verify(amd.evidence(), NOW, roots=amd.roots).notes)
    assert not any("masks" in note for note in snp.verify(Amd().evidence(), NOW, roots=amd.roots).notes)
    masked = Amd(key_info=2, chip=bytes(64)).evidence()
    unsigned = replace(masked, blob=masked.blob[:0x2A0] + bytes(len(masked.blob) - 0x2A0))
    with pytest.raises(AttestationError, match="MASK_CHIP_KEY") as refused:
        snp.verify(unsigned, NOW, roots=amd.roots)
    assert refused.value.code is Code.SIGNATURE


def test_amd_reports_of_the_wrong_length_or_chain_are_refused():
    amd = Amd()
    good = amd.evidence()
    verify = lambda evidence: lambda: snp.verify(evidence, NOW, roots=amd.roots)  # noqa: E731
    rejected(verify(replace(good, blob=good.blob[:-1])), Code.MALFORMED)
    rejected(verify(replace(good, blob=good.blob + b"\0")), Code.MALFORMED)
    rejected(verify(replace(good, certs=good.certs[:2])), Code.CHAIN)
    rejected(verify(replace(good, certs=(b"junk", *good.certs[1:]))), Code.MALFORMED)
    other = Amd(leaf_key="another chip")
    rejected(verify(replace(good, certs=other.evidence().certs)), Code.SIGNATURE)
    rejected(verify(replace(good, certs=(good.certs[0], *Amd(product="Turin").evidence().certs[1:]))), Code.NAMES)
    shuffled = (pem(*reversed(amd.chain())),)
    assert snp.verify(replace(good, certs=shuffled), NOW, roots=amd.roots).product == "Genoa"
    rejected(lambda: snp.verify(good, NOW), Code.ROOT)


def test_a_certificates_names_write_nothing_into_logs_commits_and_terminals():
    """Anybody can send some: what is wrong with them is told, and goes into the next commit."""
    amd = Amd(product="\x1b[2J\n12:00:00 all is well \u202e")
    with pytest.raises(AttestationError) as refused:
        snp.verify(amd.evidence(), NOW)
    said = refused.value
    assert said.code is Code.ROOT
    assert said.cause.startswith("ARK-?[2J?12:00:00 all is well ? is not")
    for text in (said.cause, said.detail, str(said)):
        assert text.isprintable()
    assert AttestationError(Code.CHAIN, "x" * 9999).cause == "x" * limits.TEXT_CHARACTERS


def test_amd_debug_migration_and_vmpl_are_claims():
    claims = snp.verify(Amd(policy=7 << 17, vmpl=2).evidence(), NOW, roots=Amd().roots)
    assert (claims.debug, claims.migratable, claims.vmpl) == (True, True, 2)


# TDX

INTEL_WRONGS = [
    (Intel(status="OutOfDate"), Code.TCB_STATUS),
    (Intel(status="Revoked"), Code.REVOKED),
    (Intel(revoked=True), Code.REVOKED),
    (Intel(attributes=1 << 28 | 1), Code.DEBUG),
    (Intel(attributes=1 << 28 | 1 << 29), Code.MIGRATABLE),
    (Intel(next_update="2026-12-15T00:00:00Z"), Code.EXPIRED),
]


@pytest.mark.parametrize(("platform", "code"), INTEL_WRONGS)
def test_what_an_intel_platform_may_not_be(platform: Intel, code: Code):
    reason = rejected(lambda: tdx.verify(platform.evidence(), NOW, root=Intel().root_der), code)
    assert reason


def test_intel_quotes_that_are_cut_swapped_or_from_another_root_are_refused():
    intel = Intel()
    good = intel.evidence()
    for blob in (b"", good.blob[:47], good.blob[:700], good.blob[:-900]):
        with pytest.raises(AttestationError):
            tdx.verify(replace(good, blob=blob), NOW, root=intel.root_der)
    for collateral in (b"", b"{}", b"\xff", good.collateral[:-5], Intel(root="another").collateral()):
        with pytest.raises(AttestationError):
            tdx.verify(replace(good, collateral=collateral), NOW, root=intel.root_der)
    with pytest.raises(AttestationError):
        tdx.verify(good, NOW)  # Intel's own root


def test_intel_fields_come_from_the_verified_quote():
    intel = Intel(report_data=b"\x07" * 64, evaluation=20)
    claims = tdx.verify(intel.evidence(), NOW, root=intel.root_der)
    assert (claims.debug, claims.migratable, claims.report_data) == (False, False, b"\x07" * 64)
    assert (claims.tcb, claims.measurement[0], len(claims.measurement)) == ({"evaluation": 20}, "55" * 48, 5)
    relaxed = tdx.verify(Intel(status="OutOfDate").evidence(), NOW, ("UpToDate", "OutOfDate"), Intel().root_der)
    assert relaxed.tcb_status == "OutOfDate"


def test_trailing_bytes_of_a_quote_change_no_claim():
    """Quotes are malleable: this is why nothing remembers a quote's hash."""
    intel = Intel()
    good = intel.evidence()
    longer = replace(good, blob=good.blob + b"more")
    assert tdx.verify(longer, NOW, root=intel.root_der) == tdx.verify(good, NOW, root=intel.root_der)


# NVIDIA


def test_what_a_gpu_may_be():
    gpu = Gpu()
    claims = nvidia.verify(gpu.evidence(), NOW, bytes(32), gpu.root)
    assert (claims.driver, claims.vbios, claims.measurements[2]) == ("999.1", "97.00.88.00.0F", "02" * 48)
    assert any("revocation" in note for note in claims.notes)
    verify = lambda other: lambda: nvidia.verify(other, NOW, bytes(32), gpu.root)  # noqa: E731
    rejected(verify(Gpu(nonce=b"\1" * 32).evidence()), Code.NONCE)
    rejected(verify(Gpu(fwid=b"\0" * 48).evidence()), Code.FIRMWARE)
    good = gpu.evidence()
    rejected(verify(replace(good, blob=good.blob + b"\0")), Code.MALFORMED)
    rejected(verify(replace(good, blob=good.blob[:-1])), Code.MALFORMED)
    rejected(verify(replace(good, certs=good.certs[:2])), Code.NAMES)
    rejected(verify(replace(good, certs=())), Code.CHAIN)
    rejected(lambda: nvidia.verify(good, NOW, bytes(32)), Code.ROOT)
    assert nvidia.verify(replace(good, certs=tuple(reversed(good.certs))), NOW, None, gpu.root) == claims


# Fuzz


def flipped(raw: bytes, seed: int) -> bytes:
    mutated = bytearray(raw)
    bit = seed * 2654435761 % (8 * len(raw))
    mutated[bit // 8] ^= 1 << bit % 8
    return bytes(mutated)


def test_no_flipped_bit_is_accepted_and_none_raises_anything_else():
    amd, gpu, intel = Amd(), Gpu(), Intel()
    fake = simulated.make(bytes(64), b"\x09" * 48)
    quote = intel.evidence()
    signed = 48 + 584 + 4 + 64 + 64  # header, body, length, signature, attestation key
    kinds = [
        (amd.evidence(), len(amd.report()), lambda e: snp.verify(e, NOW, roots=amd.roots)),
        (gpu.evidence(), len(gpu.report()), lambda e: nvidia.verify(e, NOW, None, gpu.root)),
        (quote, signed, lambda e: tdx.verify(e, NOW, root=intel.root_der)),
        (fake, len(fake.blob), lambda e: simulated.verify(e, NOW)),
    ]
    for evidence, size, verify in kinds:
        for seed in range(250):
            blob = flipped(evidence.blob[:size], seed) + evidence.blob[size:]
            with pytest.raises(AttestationError):
                verify(replace(evidence, blob=blob))
    for seed in range(200):
        cert = flipped(amd.evidence().certs[seed % 3], seed)
        certs = tuple(cert if i == seed % 3 else c for i, c in enumerate(amd.evidence().certs))
        with pytest.raises(AttestationError):
            snp.verify(replace(amd.evidence(), certs=certs), NOW, roots=amd.roots)


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
    rejected(lambda: verify_evidence(Gpu().evidence(), NOW), Code.KIND)
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


def test_a_machine_without_hardware_says_so(tmp_path: Path):
    assert attesters.tsm_provider(tmp_path / "absent") is None
    rejected(lambda: attesters.tsm_evidence(bytes(64), "tdx", tmp_path / "absent"), Code.UNAVAILABLE)
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
    """The sentence of an answer is for people: no number is read from it."""

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


def test_amds_certificate_table_is_read():
    first, second = b"A" * 10, b"B" * 5
    table = b"\1" * 16 + (72).to_bytes(4, "little") + (10).to_bytes(4, "little")
    table += b"\2" * 16 + (82).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(24)
    assert attesters.certificate_table(table + first + second) == (first, second)


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
    (tmp_path / "report").write_bytes(Amd().report())
    (tmp_path / "chain.pem").write_bytes(pem(*Amd().chain()[:2]))
    (tmp_path / "root.der").write_bytes(der(Amd().chain()[2]))
    certs = ["--certs", str(tmp_path / "chain.pem"), "--certs", str(tmp_path / "root.der")]
    code, facts = attest_verify("--kind", "sev-snp", "--blob", str(tmp_path / "report"), *certs, "--now", str(NOW))
    assert (code, facts["code"]) == (1, "root")


def test_attest_verify_reads_no_file_that_is_too_long(tmp_path: Path):
    (tmp_path / "blob").write_bytes(bytes(NAMED_BYTES + 1))
    for named in ({"blob": tmp_path / "blob"}, {"blob": Path("/dev/null"), "certs": [tmp_path / "blob"]}):
        with pytest.raises(ConfigError, match="is longer than the 1 MiB"):
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


def test_a_plug_in_adds_a_kind_but_replaces_none_of_ours(monkeypatch: pytest.MonkeyPatch):
    from importlib.metadata import EntryPoint

    from dilocox.node.attest import verify

    kinds = ("toy", "simulated")
    named = {kind: EntryPoint(kind, "tests.unit.test_attestation:toy_verifier", verify.GROUP) for kind in kinds}
    named["broken"] = EntryPoint("broken", "no_such_module:verifier", verify.GROUP)
    monkeypatch.setattr(verify, "installed", {verify.GROUP: named}.__getitem__)
    verify.plug_ins.cache_clear()
    try:
        assert verify_evidence(Evidence("toy", b"good"), NOW).measurement == ("aa" * 48,)
        rejected(lambda: verify_evidence(Evidence("toy", b"bad"), NOW), Code.INTERNAL)
        rejected(lambda: verify_evidence(Evidence("broken", b"good"), NOW), Code.INTERNAL)
        rejected(lambda: verify_evidence(Evidence("simulated", b"good"), NOW), Code.MALFORMED)
    finally:
        verify.plug_ins.cache_clear()


def toy_verifier(evidence: Evidence, now: int) -> Claims:
    if evidence.blob != b"good":
        raise RuntimeError("plug-ins may be careless: that denies")
    return Claims(evidence.kind, ("aa" * 48,), bytes(64), now + 60)


def test_hardware_kinds_refuse_a_key_that_this_process_did_not_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from dilocox.node import daemon
    from dilocox.protocol.errors import LocalError
    from dilocox.transport.data_directory import DataDirectory
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
