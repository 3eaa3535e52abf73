# pragma version 0.4.3
# pragma evm-version cancun
"""
@title Settlement of one dilocox run
@notice Pays accounts what their work came to, by the run's chain of commits (README.md says who is trusted for what).

Merit is cumulative: a claim pays what an account's merit is worth, less what it was paid before. Invariants:
  paid_total <= worth(total of the accepted root), and paid_total <= funded - refunded
  worth(total of the accepted root) <= funded - refunded, until the sponsor takes what is left after CLOSES
  self.balance >= (funded - refunded - paid_total) + staked
"""

event Settled:
    round: indexed(uint64)
    total: uint256
    root: bytes32
    digest: bytes32
    last: bool

event Vetoed:
    round: indexed(uint64)
    root: bytes32

event Paid:
    account: indexed(address)
    amount: uint256

event Slashed:
    account: indexed(address)
    amount: uint256
    evidence: bytes32

struct Root:
    root: bytes32
    total: uint256
    round: uint64
    digest: bytes32
    posted: uint256
    last: bool

UNIT: constant(uint256) = 10 ** 6
LONGEST_PROOF: constant(uint256) = 16

SPONSOR: public(immutable(address))
COORDINATOR: public(immutable(address))
ARBITER: public(immutable(address))
# Wei for a million merit.
PRICE: public(immutable(uint256))
# Seconds in which a root may be vetoed.
WINDOW: public(immutable(uint256))
# Seconds from unstake to withdraw: slashing reaches a stake until then.
DELAY: public(immutable(uint256))
MIN_STAKE: public(immutable(uint256))
# After this moment the sponsor may take what is left.
CLOSES: public(immutable(uint256))

run: public(bytes32)
accepted: public(Root)
pending: public(Root)
funded: public(uint256)
refunded: public(uint256)
paid: public(HashMap[address, uint256])
paid_total: public(uint256)
stakes: public(HashMap[address, uint256])
staked: public(uint256)
unlocks: public(HashMap[address, uint256])
used: public(HashMap[bytes32, bool])


@deploy
@payable
def __init__(
    coordinator: address, arbiter: address, price: uint256, window: uint256, delay: uint256, min_stake: uint256, closes: uint256
):
    assert coordinator != empty(address) and arbiter != empty(address), "nobody"
    # A root that holds at once cannot be vetoed; who leaves is within reach for as long as what it is paid by can be.
    assert window > 0 and delay >= window and closes > block.timestamp + 2 * window, "too short"
    SPONSOR = msg.sender
    COORDINATOR = coordinator
    ARBITER = arbiter
    PRICE = price
    WINDOW = window
    DELAY = delay
    MIN_STAKE = min_stake
    CLOSES = closes
    self.funded = msg.value


@external
def bind(run: bytes32):
    """
    @notice Say once which run this settles: its id holds this contract's address, so it is known only now.
    """
    assert msg.sender == SPONSOR, "not the sponsor"
    assert self.run == empty(bytes32) and run != empty(bytes32), "bound already"
    self.run = run


@external
@payable
def fund():
    self.funded += msg.value


@internal
@pure
def _worth(merit: uint256, price: uint256) -> uint256:
    # Rounded down once, of all merit so far: nothing is lost or made by claiming often.
    return merit * price // UNIT


@internal
@view
def _current() -> Root:
    if self.pending.posted != 0 and block.timestamp >= self.pending.posted + WINDOW:
        return self.pending
    return self.accepted


@internal
def _promote():
    if self.pending.posted != 0 and block.timestamp >= self.pending.posted + WINDOW:
        self.accepted = self.pending
        self.pending = empty(Root)


@external
@view
def current() -> Root:
    """
    @notice The root that claims are proved against now.
    """
    return self._current()


@external
def settle(root: bytes32, total: uint256, round: uint64, digest: bytes32, last: bool):
    """
    @notice Post the root of a commit. It pays once the window is over. `last`: nothing follows it.
    """
    assert msg.sender == COORDINATOR, "not the coordinator"
    assert self.run != empty(bytes32), "not bound"
    # Whoever it pays has a window to claim before the sponsor may take what is left.
    assert block.timestamp + 2 * WINDOW <= CLOSES, "closed"
    self._promote()
    assert self.pending.posted == 0, "one is being challenged"
    assert not self.accepted.last, "the last was settled"
    assert round > self.accepted.round and total >= self.accepted.total, "older"
    assert self._worth(total, PRICE) <= self.funded - self.refunded, "not funded"
    self.pending = Root(root=root, total=total, round=round, digest=digest, posted=block.timestamp, last=last)
    log Settled(round=round, total=total, root=root, digest=digest, last=last)


@external
def veto():
    assert msg.sender == ARBITER, "not the arbiter"
    assert self.pending.posted != 0 and block.timestamp < self.pending.posted + WINDOW, "nothing to veto"
    log Vetoed(round=self.pending.round, root=self.pending.root)
    self.pending = empty(Root)


@external
@nonreentrant
def claim(account: address, merit: uint256, proof: DynArray[bytes32, LONGEST_PROOF]):
    """
    @notice Pay an account what is due. Anybody may ask; it goes to the account.
    """
    self._promote()
    assert self.accepted.posted != 0, "nothing is settled"
    assert self.stakes[account] >= MIN_STAKE, "no stake"
    # Else a stake that could leave in the same block would do, and whoever is about to be slashed would be faster.
    assert self.unlocks[account] == 0, "the stake is leaving"
    digest: bytes32 = sha256(concat(0x00, convert(account, bytes20), convert(merit, bytes32)))
    for sibling: bytes32 in proof:
        if convert(digest, uint256) < convert(sibling, uint256):
            digest = sha256(concat(0x01, digest, sibling))
        else:
            digest = sha256(concat(0x01, sibling, digest))
    assert digest == self.accepted.root, "no proof"
    due: uint256 = self._worth(merit, PRICE)
    assert due > self.paid[account], "nothing is due"
    amount: uint256 = due - self.paid[account]
    assert self.paid_total + amount <= self._worth(self.accepted.total, PRICE), "more than was settled"
    assert self.paid_total + amount <= self.funded - self.refunded, "the pool is empty"
    self.paid[account] = due
    self.paid_total += amount
    log Paid(account=account, amount=amount)
    raw_call(account, b"", value=amount)


@external
@payable
def stake():
    assert msg.value > 0, "nothing"
    self.stakes[msg.sender] += msg.value
    self.staked += msg.value
    self.unlocks[msg.sender] = 0


@external
def unstake():
    assert self.stakes[msg.sender] > 0 and self.unlocks[msg.sender] == 0, "nothing to unstake"
    self.unlocks[msg.sender] = block.timestamp + DELAY


@external
@nonreentrant
def withdraw():
    assert self.unlocks[msg.sender] != 0 and block.timestamp >= self.unlocks[msg.sender], "not yet"
    amount: uint256 = self.stakes[msg.sender]
    self.stakes[msg.sender] = 0
    self.unlocks[msg.sender] = 0
    self.staked -= amount
    raw_call(msg.sender, b"", value=amount)


@external
@nonreentrant
def slash(account: address, evidence: bytes32):
    """
    @notice Take an account's stake. It is burnt: nobody gains by a slash. `evidence`: digest of two statements for one slot.
    """
    assert msg.sender == ARBITER, "not the arbiter"
    assert not self.used[evidence], "punished already"
    amount: uint256 = self.stakes[account]
    assert amount > 0, "no stake"
    self.used[evidence] = True
    self.stakes[account] = 0
    self.unlocks[account] = 0
    self.staked -= amount
    log Slashed(account=account, amount=amount, evidence=evidence)
    raw_call(empty(address), b"", value=amount)


@external
@nonreentrant
def refund():
    """
    @notice Give the sponsor what nobody can claim any more: beyond the last root's worth, and after CLOSES all of it.
    """
    assert msg.sender == SPONSOR, "not the sponsor"
    self._promote()
    left: uint256 = self.funded - self.refunded
    if block.timestamp >= CLOSES:
        left -= self.paid_total
    else:
        assert self.accepted.last, "the run goes on"
        left -= self._worth(self.accepted.total, PRICE)
    assert left > 0, "nothing is left"
    self.refunded += left
    raw_call(SPONSOR, b"", value=left)
