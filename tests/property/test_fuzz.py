"""Garbage into every parser: it parses or raises the remote-fault error, nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol.consensus import chain
from dilocox.protocol.errors import ConfigError, RemoteError
from dilocox.protocol.ids import JoinLink
from dilocox.protocol.pb import messages_pb2 as pb
from dilocox.protocol.run.manifest import Manifest
from dilocox.protocol.wire.messages import open_envelope, seal
from tests.helpers import COORDINATOR, Table, identity, manifest

KINDS = tuple(kind for kind in pb.Kind.values() if kind not in (pb.KIND_UNSPECIFIED, pb.KIND_MANIFEST))
RUN = manifest()


@given(st.binary(max_size=300))
def test_envelopes(raw):
    try:
        open_envelope(raw, RUN.run_id, KINDS)
    except RemoteError:
        pass


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=300))
def test_bodies_with_a_valid_signature(kind, body):
    try:
        open_envelope(seal(identity(1), kind, RUN.run_id, body).envelope, RUN.run_id, KINDS)
    except RemoteError:
        pass


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutated_statements_never_break_the_round_machine(data):
    table = Table(RUN).genesis()
    table.contribute([0])
    make = data.draw(st.sampled_from([table.contribution, table.claim, table.report, table.leave]))
    statement = make(data.draw(st.integers(0, 4)))
    raw = bytearray(statement.envelope.body)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    envelope = seal(identity(data.draw(st.integers(0, 4))), statement.kind, RUN.run_id, bytes(raw)).envelope
    try:
        table.submit(open_envelope(envelope, RUN.run_id, KINDS))
    except RemoteError:
        pass
    table.contribute([1, 2]).vote()
    table.wait(1e6)
    table.wait(1e6)
    assert table.head.round >= 1
    table.verify()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_commits_never_verify(data):
    table = Table(RUN).genesis()
    head = table.head
    table.contribute().vote()
    honest = table.commits[-1].envelope.body
    raw = bytearray(honest)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        _, commit = chain.extend(RUN, head, seal(COORDINATOR, pb.KIND_COMMIT, RUN.run_id, bytes(raw)).envelope)
    except RemoteError:
        return
    # Fields that the coordinator may choose freely: its clocks, its memory of them, and the refusals it saw. All others
    # are derived.
    free = {"closed_at_ms", "open_ms", "collect_ms", "vote_ms", "collect_history", "vote_history", "refusals"}
    original = pb.Commit.FromString(honest)
    changed = [f.name for f in original.DESCRIPTOR.fields if getattr(original, f.name) != getattr(commit.body, f.name)]
    assert set(changed) <= free


@given(st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
def test_manifests(raw):
    try:
        Manifest.from_canonical(raw)
    except RemoteError:
        pass


@given(st.text(max_size=200))
def test_join_links_and_run_files(text):
    for parser in (JoinLink.parse, Manifest.from_toml):
        try:
            parser(text)
        except ConfigError:
            pass
