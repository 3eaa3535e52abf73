"""Bounds on everything that arrives from outside: value, unit, reason. `python -m bench.scale --check` measures them."""

KIB = 1 << 10
MIB = 1 << 20

CHUNK_BYTES = 4 * MIB
"""Unit of hashing, resuming and checking a blob: a bad byte costs one chunk; the state hash uses it."""

FRAME_BYTES = MIB // 4
"""Bytes of blob data in one gRPC message: large enough to amortise framing, small enough to come before a slow line looks dead."""

CLUSTERS = 1024
"""Most clusters on a roster: a commit names each of them."""

COMMIT_BYTES = 4 * MIB
"""Largest commit: one of 1,000 clusters with every field full is about 1 MiB, evidence of each of them less than another one."""

MESSAGE_BYTES = COMMIT_BYTES + 64 * KIB
"""Largest gRPC message that a peer receives: a commit in its envelope."""

SUBMISSION_BYTES = MIB
"""Largest evidence in its envelope: of a box with eight GPUs."""

WORKER_MESSAGE_BYTES = 64 * MIB
"""Largest message between a daemon and its workers: a commit with the digests of what it counts."""

CLAIM_BYTES = 512
"""Three digests, an account, two numbers: about 140."""

CLUSTER_BYTES = 16 * KIB
"""A layout of 128 hosts, at about 100 bytes each."""

CONTRIBUTION_BYTES = KIB
"""Six digests and eight holders of 54 bytes, whatever the model: about 740."""

RECEIPT_BYTES = KIB
"""Two bits for each of 1,024 contributions, 16 findings of at most 20 bytes, 16 audits of 12, two digests."""

REPORT_BYTES = 256
"""Two digests and a loss: about 80."""

LEAVE_BYTES = 256
"""A digest and two numbers: about 50."""

HEARTBEAT_BYTES = 256
"""A digest and five numbers: about 70."""

BALLOT_BYTES = 64 * KIB
"""A digest for each of 1,024 contributions."""

EVIDENCE_BYTES = SUBMISSION_BYTES - 4 * KIB
"""See EVIDENCE_*: the sum of what is allowed inside is larger, no vendor's is."""

BLOB_BYTES = 1 << 40
"""Largest blob: the state of a stage of 128e9 parameters."""

LEAVES_BYTES = MIB
"""Largest leaves blob: 1,024 stages of 800 tensors."""

SHARDS = 1 << 14
"""Most shards of a corpus, for training or held out: a terabyte of text in shards of 64 MiB."""

CORPUS_BYTES = 4 * MIB
"""Largest corpus document: about 120 bytes for each shard."""

TEMPLATE_CHARACTERS = 1 << 18
"""Largest chat template; those of models with tools are about 10,000."""

TEMPLATE_CPU_SECONDS = 10
"""CPU time for one conversation: a long one takes a hundredth of a second."""

TEMPLATE_MEMORY_BYTES = 1024 * MIB
"""Memory for one conversation, beyond that of a process that renders none."""

RENDERED_BYTES = 256 * MIB
"""Largest text that a template makes of a conversation, as JSON; conversations are lines of at most 64 MiB."""

CHAT_TOKENS = 1 << 20
"""Longest row of conversations."""

TOKENIZER_BYTES = 256 * MIB
"""Largest tokenizer file; those of the largest vocabularies are about 20 MiB."""

MANIFEST_BYTES = 64 << 10
"""Largest manifest; a full one is under 4 KiB."""

CERTIFICATE_BYTES = 2048
"""Largest DER certificate in a peer record; ours are about 350 bytes."""

RECORD_BYTES = 8 << 10
"""Largest peer record in the DHT."""

DHT_ADDRESSES = 16
"""Multiaddrs in a peer record: a host has a handful of interfaces."""

COORDINATORS = 8
"""Most coordinators of one run. A store of five members survives the loss of two, and a peer must try them all."""

DHT_RECORD_SECONDS = 600
"""Longest life of a record in the DHT: twice what this program requests, whatever its writer requests."""

JOB_BYTES = 2 * MANIFEST_BYTES
"""A manifest as it is signed, an appointment, and a link of half a KiB: 4 KiB where no long list is in it."""

OFFER_BYTES = 64 * KIB
"""A TDX quote with its collateral is 30 KiB, a report of SEV-SNP 6, one of a GPU about 5."""

LINES = 3
"""Measurements of its line in an offer: a liar among them is in the minority."""

LINE_BYTES = 256
"""A peer id of about 52, and three numbers."""

DHT_STRANGERS = 1024
"""Records of peers that the run does not know, kept by one peer for others to find: each is about 1 KiB."""

TEXT_CHARACTERS = 256
"""Longest name, address or sentence that a peer may put in a statement."""

STAGES = 1024
"""Most stages of a run; the largest preset has 80."""

HOSTS = 128
"""Most boxes of a cluster: the paper's run had 20."""

SCORERS = 128
"""Most clusters that score one contribution: every verifier of a commit draws the committees again."""

AUDITORS = 32
"""Most clusters that audit one contribution: each fetches two states from its author."""

AUDITS = 64
"""Most contributions of one round that are audited: the commits of two rounds name them and their auditors."""

AUDITS_TOLD = 16
"""Most audits in one vote; further ones count as no finding."""

SAMPLES_TOLD = 16
"""Most availability probes in one vote; further ones count as not made."""

AUDIT_DISTANCE = 1e6
"""Largest distance in an audit, relative to the length of the segment: a distance of 1 is as far as no step at all."""

SEGMENTS = 64
"""Most stretches of a phase: each begins with a state on disk."""

MARKS_BYTES = 4 * MIB
"""Largest blob of audit checkpoints: 67 checkpoints of 1,024 stages."""

STANDING = 1 << 16
"""Most rounds that there can be to earn."""

AWAY = 256
"""Clusters that left and whose standing a commit remembers: those with the most."""

ACCOUNTS = 4096
"""Most accounts with merit in one run, four for each seat: a commit lists them all, in 32 bytes each. One more costs a
counted round, and later ones earn nothing."""

HOLDERS = 8
"""Most relays that store a contribution's payloads for a cluster that is not reachable."""

CLAIMS = 256
"""Most claims for one commit, beyond those of the roster (before the genesis commit, as many as a roster has). Of more
claims, those with the smallest hash of head and digest stay."""

LAYOUTS = 32
"""Layouts of clusters of several boxes kept for one commit, beyond those of the roster."""

FIRST_LAYOUTS = COMMIT_BYTES // (2 * CLUSTER_BYTES)
"""The same for the genesis commit: this many clusters of several hosts can begin a run together; others join later."""

FINDINGS = 16
"""Most findings of a receipt: the worst; other scores lie in a blob."""

INNER_STEPS = 1_000_000
"""Most inner steps of a round; published settings use up to 500."""

ROUNDS = 1 << 31
"""Round numbers stay below this."""

LOSS = 1e6
"""Largest loss, nats per token: the logarithm of no vocabulary comes near it."""

REFUSALS_PER_ROUND = 64
"""Refusals recorded per round: enough to see an attack, too few to fill the log with it."""

RANK = 2048
"""Highest rank of a payload: the sum of so many products is exact in float64; it is also the paper's."""

TOPK = 4096
"""Most values that top-k keeps of a chunk: all of them."""

STATEMENTS_PER_SECOND = 50
"""Statements one peer may submit per second: a round needs a handful, a heartbeat every two seconds one more."""

STATEMENTS_BURST = 200
"""Statements a peer may submit at once, after a reconnect."""

CALL_BYTES = 64
"""A digest: about 34."""

CREDENTIAL_BYTES = 256
"""Largest caller credential of a call, in its envelope: it is about 140. Verdicts are cached by these bytes."""

CREDENTIALS = 2 * CLUSTERS
"""Most cached verdicts of a server; the oldest go first. Names of unknown peers are free, and another verification costs a
signature."""

ANSWER_BYTES = 2 * KIB
"""Two digests, four numbers and a sentence."""

TERMS = (1 << 32) - 1
"""Largest term: an owner numbers terms by its clock, so that a later appointment is larger on any machine."""

APPOINTMENT_BYTES = 160
"""Two digests, a peer id and two numbers."""

HELD_BYTES = 64
"""A digest and a number."""

DIALS_AT_ONCE = 4
"""Dial-backs that a daemon does at once, one for each address: each may take `DIAL_SECONDS`, and is refused beyond."""

CONNECTIONS = 4096
"""Most connections to one daemon: every cluster's, the spectators', and three times as many again."""

CONNECTIONS_OF_UNKNOWN = CONNECTIONS - CLUSTERS
"""Most connections of unknown peers to one daemon: the rest is for those that take part."""

CONNECTIONS_PER_ADDRESS = 64
"""Most connections of unknown peers in one network (an IPv4 address or an IPv6 /64), and most of one known peer: a machine that
starts a testnet of 60 nodes."""

API_CONNECTIONS_PER_ADDRESS = 128
"""Most connections to the HTTP API from one address: 64 readers of events, and as many pages and scripts."""

FRESH_CONNECTIONS = 64
"""Connections of one network that begin at once with a full budget of calls; later ones begin with none."""

FRESH_CONNECTIONS_PER_SECOND = 5
"""Refill of FRESH_CONNECTIONS, per second."""

API_FRESH_CONNECTIONS = 400
"""The same for the HTTP API, where a script may open a connection for each request."""

API_FRESH_CONNECTIONS_PER_SECOND = 100
"""Refill of API_FRESH_CONNECTIONS, per second."""

CALLS_BURST = 100
"""Calls at once on one connection of an unknown peer. A host's workers make the largest honest burst, about 50."""

CALLS_PER_SECOND = 50
"""Refill of CALLS, per second: people and scripts call less often, and a joiner fetches the blobs of 1,024 stages in 20 s."""

CALLS_WAITING = 100
"""Calls of one connection, or one known peer, that wait for their turn: as many as it may make at once."""

CALLS_BURST_KNOWN = 2000
"""Calls of one known peer at once: a payload of 1,024 stages is fetched in as many calls."""

CALLS_PER_SECOND_KNOWN = 200
"""Refill of CALLS_KNOWN, per second."""

CALLS_REFUSED = 100
"""So many more calls refused than not, and a connection is shut down."""

CALLS_AT_ONCE = 100
"""Streams of one connection: the least that HTTP/2 recommends. Honest daemons need about 50; gRPC refuses more without Python."""

CALL_HEADER_BYTES = 16 * KIB
"""Headers of one call, and about the memory of one call in progress."""

UNACCOUNTED_BYTES = 256 * KIB
"""Bytes that an unknown peer's connection may send before a call accounts for them: a handshake, and the headers of many calls."""

UNACCOUNTED_BYTES_OF_CALLS = MESSAGE_BYTES + UNACCOUNTED_BYTES
"""The same while a call is in progress: its message, of any size."""

UNACCOUNTED_BYTES_KNOWN = 64 * MIB
"""The same for a known peer: it uploads one blob at a time to a relay, and this is the window of a stream at 10 Gbit/s
over 50 ms."""

UNACCOUNTED_BYTES_OF_SILENT = MIB
"""The same for all connections of unknown peers in one network without a call in progress: 60 handshakes are 240 KiB."""

UNACCOUNTED_BYTES_OF_NETWORK = 2 * MESSAGE_BYTES
"""The same for all connections of unknown peers in one network: joiners behind one router may upload evidence at once.
Calls in progress with their replies may hold as much. Beyond it connections are closed."""

UNACCOUNTED_BYTES_AHEAD = MIB
"""Most that calls and acknowledgements may account for ahead of what arrives."""

UNACCOUNTED_BYTES_OF_UNKNOWN = 16 * MIB
"""The same for all connections of unknown peers. Beyond it the heaviest connections of the heaviest networks are closed."""

UNACCOUNTED_BYTES_PER_SECOND = KIB
"""Bytes of a connection without a call: pings, and acknowledgements of received data."""

CHANNELS = 2 * CLUSTERS
"""Most connections of a daemon to peers, each under 64 KiB: a member may publish a new address every half minute."""

HANDSHAKE_SECONDS = 10
"""A connection that has not finished its TLS handshake by then is ended."""

IDLE_SECONDS = 300
"""A connection without a call for so long is closed: an honest peer connects again."""

STREAMS_PER_MEMBER = 4
"""Blob streams a peer serves at once to each member of the roster that has earned all there is; as many again of its wait."""

STREAMS_TO_MEMBERS = 64
"""Most streams to all members together: so many can share a home's uplink and still make progress."""

STREAMS_TO_STRANGERS = 8
"""Most streams to all unknown peers together, in addition: joiners that fetch the state cannot starve a round."""

STREAMS_PER_ADDRESS = 4
"""Most streams to one address among those."""

STRANGERS_WAITING = 64
"""Streams of unknown peers that wait for a free one; more are rejected at once."""

TRANSFER_BYTES_PER_SECOND = 8 << 10
"""Slowest transfer that either side continues: a modem's rate. Received bytes stay, and the transfer resumes later."""

SPECTATORS = 64
"""Streams of events to callers that are neither on the roster nor claiming, ..."""

SPECTATORS_PER_ADDRESS = 8
"""... and of those to one address."""

SHARES = 32
"""Most shards of a blob: the limit of liberasurecode. In larger rosters several peers store the same shard."""

SHARE_PROOF = 32
"""Most digests in the proof of a shard: 5 within its blob, 11 within a contribution of 1,024 stages, 14 within a commit of
1,024 clusters with two statements in every slot."""

EVIDENCE_BLOB_BYTES = 32 << 10
"""Largest quote or report: TDX quotes are about 5 KiB, GPU reports 4 KiB."""

EVIDENCE_CERTIFICATE_BYTES = 16 << 10
"""Largest certificate of evidence, or PEM file of several."""

EVIDENCE_CERTIFICATES = 8
"""Most certificates of one piece of evidence: the longest vendor chain has five."""

COLLATERAL_BYTES = 128 << 10
"""Largest collateral; Intel's is about 24 KiB."""

EVIDENCE_GPUS = 8
"""Most GPUs of one peer's evidence: a box has eight."""

ATTESTATIONS = 2 * CLUSTERS
"""Most verdicts that one commit records: half of them of peers that the run does not know yet."""

APPRAISALS = 8
"""Unknown peers, by address, whose evidence a coordinator verifies or queues; more must ask again. Each has one piece,
which takes up to a twentieth of a second."""

CHALLENGES = 4096
"""Challenges remembered as used, while they could be used again; the oldest go first."""

KNOWN_PEERS = 10_000
"""Most peers whose last heartbeat a coordinator remembers: identities are free."""

EVENTS = 50_000
"""Most events that a daemon stores; the oldest go first. A node's cover about 10,000 rounds, at 200 bytes each."""

EVENT_CHARACTERS = 2048
"""Longest text in an event: what a worker fails with can be longer."""

EVENT_STREAMS = 64
"""Readers of events at one HTTP API at once: a browser opens one for each page."""

ARRIVALS_TOLD = 16
"""Most arrivals of contributions, or votes, in the event that ends the wait: the last ones."""

MISSED_TOLD = 32
"""Clusters that an event names; the commit names them all."""

STRANGERS_TOLD = 16
"""Most reported claims of unknown peers in one round: identities are free."""
