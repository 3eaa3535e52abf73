"""Tests of hardware evidence: public samples, and synthetic vendors for every fault that samples cannot have."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dilocox.cli.dev import attest
from dilocox.node.attest import simulated
from dilocox.node.attest.attesters import choose_attester
from dilocox.node.attest.kinds import MachineKind, find_kind, kind_names, missing
from dilocox.node.attest.verify import verify_evidence
from dilocox.protocol import limits
from dilocox.protocol.wire.attestation import AttestationError, Claims, Code, Evidence
from dilocox_tee import machine, nvidia, snp, tdx
from plugins.tee.tests.vendors import LATELY, NOW, Amd, Gpu, Intel, der, pem
from tests.helpers import flipped, rejected

VECTORS = Path(os.environ.get("DILOCOX_TEE_VECTORS", Path(__file__).parents[4] / "shared" / "vectors" / "tee"))
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason=f"no public TEE samples in {VECTORS}")
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
    """Return the line that expected.json has for a case."""
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
    """Check hostile names: any peer can send some, and their error text goes into logs and the next commit."""
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
        tdx.verify(good, NOW)  # the root certificate of Intel


def test_intel_fields_come_from_the_verified_quote():
    intel = Intel(report_data=b"\x07" * 64, evaluation=20)
    claims = tdx.verify(intel.evidence(), NOW, root=intel.root_der)
    assert (claims.debug, claims.migratable, claims.report_data) == (False, False, b"\x07" * 64)
    assert (claims.tcb, claims.measurement[0], len(claims.measurement)) == ({"evaluation": 20}, "55" * 48, 5)
    relaxed = tdx.verify(Intel(status="OutOfDate").evidence(), NOW, ("UpToDate", "OutOfDate"), Intel().root_der)
    assert relaxed.tcb_status == "OutOfDate"


def test_trailing_bytes_of_a_quote_change_no_claim():
    """Check malleable quotes: for this reason no code remembers a quote's hash."""
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


def test_no_flipped_bit_is_accepted_and_none_raises_anything_else():
    amd, gpu, intel = Amd(), Gpu(), Intel()
    quote = intel.evidence()
    signed = 48 + 584 + 4 + 64 + 64  # header, body, length, signature, attestation key
    kinds = [
        (amd.evidence(), len(amd.report()), lambda e: snp.verify(e, NOW, roots=amd.roots)),
        (gpu.evidence(), len(gpu.report()), lambda e: nvidia.verify(e, NOW, None, gpu.root)),
        (quote, signed, lambda e: tdx.verify(e, NOW, root=intel.root_der)),
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


def test_amds_certificate_table_is_read():
    first, second = b"A" * 10, b"B" * 5
    table = b"\1" * 16 + (72).to_bytes(4, "little") + (10).to_bytes(4, "little")
    table += b"\2" * 16 + (82).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(24)
    assert machine.certificate_table(table + first + second) == (first, second)


# As a plugin


def test_the_kinds_are_installed_and_each_verifies_its_own():
    assert set(kind_names()) >= {"tdx", "sev-snp", "nvidia"}
    assert missing(["tdx", "sev-snp", "nvidia"]) == ""
    guests = {name for name in kind_names() if isinstance(find_kind(name), MachineKind)}
    assert guests >= {"tdx", "sev-snp"}
    assert "nvidia" not in guests
    rejected(lambda: verify_evidence(Amd().evidence(), NOW), Code.ROOT)
    assert rejected(lambda: verify_evidence(Intel().evidence(), NOW), Code.MALFORMED) == "Failed to parse root CA CRL"


def test_a_gpu_s_evidence_in_a_guest_s_is_verified():
    guest = replace(simulated.make(bytes(64), b"\x09" * 48), gpu=(Gpu().evidence(),))
    rejected(lambda: verify_evidence(guest, NOW), Code.NONCE)


def test_a_machine_without_hardware_says_so(tmp_path: Path):
    assert machine.tsm_provider(tmp_path / "absent") is None
    rejected(lambda: machine.tsm_evidence(bytes(64), "tdx", tmp_path / "absent"), Code.UNAVAILABLE)
    rejected(lambda: choose_attester(("tdx", "sev-snp"), "1", None, None), Code.UNAVAILABLE)


def test_measurements_are_read_off_evidence_that_is_not_verified():
    assert attest.measurement_of(Amd().evidence()) == ("11" * 48,)
    assert attest.measurement_of(Intel().evidence())[0] == "55" * 48


def test_attest_verify_takes_certificates_of_several_files(tmp_path: Path):
    (tmp_path / "report").write_bytes(Amd().report())
    (tmp_path / "chain.pem").write_bytes(pem(*Amd().chain()[:2]))
    (tmp_path / "root.der").write_bytes(der(Amd().chain()[2]))
    certs = ["--certs", str(tmp_path / "chain.pem"), "--certs", str(tmp_path / "root.der")]
    words = ["verify", "--kind", "sev-snp", "--blob", str(tmp_path / "report"), *certs, "--now", str(NOW), "--json"]
    done = CliRunner().invoke(attest.app, words)
    assert (done.exit_code, json.loads(done.stdout)["code"]) == (1, "root")
