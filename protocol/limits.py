"""Every bound on what arrives from outside: value, unit, reason. `python -m bench.scale --check` holds what they promise."""

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
"""Largest message between a daemon and its own workers: a commit with the digests of what it takes."""

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
"""Of a corpus, for training or held out: a terabyte of text in shards of 64 MiB."""

CORPUS_BYTES = 4 * MIB
"""Largest corpus document: about 120 bytes for each shard."""

TEMPLATE_CHARACTERS = 1 << 18
"""Largest chat template; those of models with tools are about 10,000."""

TEMPLATE_CPU_SECONDS = 10
"""For one conversation: a long one takes a hundredth of a second."""

TEMPLATE_MEMORY_BYTES = 1024 * MIB
"""For one conversation, over what a process holds that renders none."""

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
"""Of one run, that stand by for each other: a store of five members outlives two of them, and so few must be tried."""

DHT_RECORD_SECONDS = 600
"""Longest life of a record in the DHT: twice what ours ask for, whatever its writer asks for."""

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
"""Most clusters that score one contribution: committees are drawn again by whoever checks a commit."""

AUDITORS = 32
"""Most clusters that audit one contribution: each fetches two states from its author."""

AUDITS = 64
"""Most contributions of one round that are audited: the commits of two rounds name them and their auditors."""

AUDITS_TOLD = 16
"""Most audits that one receipt tells of: of more, it found nothing."""

SAMPLES_TOLD = 16
"""Most samples that one receipt tells of: of more, it asked nobody."""

AUDIT_DISTANCE = 1e6
"""Largest distance that an auditor tells, over the way of the stretch: one of 1 is as far off as no step at all."""

SEGMENTS = 64
"""Most stretches of a phase: each begins with a state on disk."""

MARKS_BYTES = 4 * MIB
"""Largest marks blob: 67 marks of 1,024 stages."""

STANDING = 1 << 16
"""Most rounds that there can be to earn."""

AWAY = 256
"""Clusters that left and whose standing a commit remembers: those with the most."""

ACCOUNTS = 4096
"""With merit in one run, four for each place on a roster: a commit names them all, in 32 bytes each. One more costs a counted
round, and later ones earn nothing."""

HOLDERS = 8
"""Most peers that keep a contribution's payloads for a cluster that cannot be dialled."""

CLAIMS = 256
"""Claims kept for one commit, beyond those of the roster (before the genesis commit as many as a roster has); of more, those with
the smallest hash of head and digest stay."""

LAYOUTS = 32
"""Layouts of clusters of several boxes kept for one commit, beyond those of the roster."""

FIRST_LAYOUTS = COMMIT_BYTES // (2 * CLUSTER_BYTES)
"""And for the genesis commit: so many clusters of several boxes can begin a run together, others join later."""

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
"""What a call says of its caller, in its envelope: about 140. Verdicts are remembered by these bytes."""

CREDENTIALS = 2 * CLUSTERS
"""Verdicts that one server remembers, the oldest going first: strangers' names are free, and another look costs a signature."""

ANSWER_BYTES = 2 * KIB
"""Two digests, four numbers and a sentence."""

TERMS = (1 << 32) - 1
"""Of coordinators: an owner numbers them by its clock, so that a later appointment is larger wherever it was made."""

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
"""And so many more a second."""

API_FRESH_CONNECTIONS = 400
"""The same for the HTTP API, where a script may open a connection for each request."""

API_FRESH_CONNECTIONS_PER_SECOND = 100
"""And so many more a second."""

CALLS_BURST = 100
"""Calls at once on one connection of an unknown peer. A host's workers make the largest honest burst, about 50."""

CALLS_PER_SECOND = 50
"""And so many more a second: people and scripts ask less often, and a joiner fetches the blobs of 1,024 stages in 20 s."""

CALLS_WAITING = 100
"""Calls of one connection, or one known peer, that wait for their turn: as many as it may make at once."""

CALLS_BURST_KNOWN = 2000
"""Calls of one known peer at once: a payload of 1,024 stages is fetched in as many calls."""

CALLS_PER_SECOND_KNOWN = 200
"""And so many more a second."""

CALLS_REFUSED = 100
"""So many more calls refused than not, and a connection is shut down."""

CALLS_AT_ONCE = 100
"""Streams of one connection: the least that HTTP/2 recommends. Honest daemons need about 50; gRPC refuses more without Python."""

CALL_HEADER_BYTES = 16 * KIB
"""Headers of one call, and about the memory that one under way takes."""

UNACCOUNTED_BYTES = 256 * KIB
"""Bytes that an unknown peer's connection may send before a call accounts for them: a handshake, and the headers of many calls."""

UNACCOUNTED_BYTES_OF_CALLS = MESSAGE_BYTES + UNACCOUNTED_BYTES
"""And while a call is under way: its message, of any size."""

UNACCOUNTED_BYTES_KNOWN = 64 * MIB
"""And a known peer's: it pushes one blob at a time to a relay, and this is the window of a stream at 10 Gbit/s over 50 ms."""

UNACCOUNTED_BYTES_OF_SILENT = MIB
"""And all connections of unknown peers in one network that have no call under way: 60 handshakes are 240 KiB."""

UNACCOUNTED_BYTES_OF_NETWORK = 2 * MESSAGE_BYTES
"""And all connections of unknown peers in one network, which may be joiners behind one router that upload evidence at once. Calls
under way with their replies may hold as much. Beyond it connections are shut down."""

UNACCOUNTED_BYTES_AHEAD = MIB
"""Most that calls and acknowledgements may account for ahead of what arrives."""

UNACCOUNTED_BYTES_OF_UNKNOWN = 16 * MIB
"""And all connections of unknown peers; beyond it the heaviest of the heaviest networks are shut down."""

UNACCOUNTED_BYTES_PER_SECOND = KIB
"""What a connection sends without a call: pings, and acknowledgements of what it receives."""

CHANNELS = 2 * CLUSTERS
"""Connections that a daemon keeps to others, each under 64 KiB: a member may say every half minute that it is somewhere else."""

HANDSHAKE_SECONDS = 10
"""A connection that has not finished its TLS handshake by then is ended."""

IDLE_SECONDS = 300
"""And one on which nothing was asked for so long: who is honest dials again."""

STREAMS_PER_MEMBER = 4
"""Blob streams a peer serves at once to each member of the roster that has earned all there is; as many again of its wait."""

STREAMS_TO_MEMBERS = 64
"""And to all members together: so many share a home's uplink and still get on."""

STREAMS_TO_STRANGERS = 8
"""And to all others together, beside the members: joiners who fetch the state, and whoever else dials, cannot starve a round."""

STREAMS_PER_ADDRESS = 4
"""Of those to one address."""

STRANGERS_WAITING = 64
"""Streams of strangers that wait for their turn; more are refused at once."""

TRANSFER_BYTES_PER_SECOND = 8 << 10
"""Slower than this a transfer is given up, by either side: a modem. What has arrived stays, and is resumed."""

SPECTATORS = 64
"""Streams of events to callers that are neither on the roster nor claiming, ..."""

SPECTATORS_PER_ADDRESS = 8
"""... and of those to one address."""

SHARES = 32
"""Of a blob: as many as liberasurecode makes. In larger rosters several peers hold the same."""

SHARE_PROOF = 32
"""Digests of the proof of a share: 5 within its blob, 11 within a contribution of 1,024 stages, 14 within a commit of 1,024
clusters that all said everything twice."""

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
"""Strangers, by address, whose evidence a coordinator looks at or that wait for it; more ask again. Of each it is one piece, which
takes up to a twentieth of a second."""

CHALLENGES = 4096
"""Challenges remembered as used, while they could be used again; the oldest go first."""

KNOWN_PEERS = 10_000
"""Peers whose signs of life a coordinator remembers; anybody can make identities."""

EVENTS = 50_000
"""Events that a daemon keeps, the oldest going first: of a node those of about 10,000 rounds, at 200 bytes each."""

EVENT_CHARACTERS = 2048
"""Longest text in an event: what a worker fails with can be longer."""

EVENT_STREAMS = 64
"""Readers of events at one HTTP API at once: a browser opens one for each page."""

ARRIVALS_TOLD = 16
"""Contributions, or votes, of which the event that ends the waiting says when they came: the last ones."""

MISSED_TOLD = 32
"""Clusters that an event names; the commit names them all."""

STRANGERS_TOLD = 16
"""Claims of strangers told in one round: anybody can make identities."""
