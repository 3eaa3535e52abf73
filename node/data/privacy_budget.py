"""Privacy budget of a cluster's private data: DP-SGD (arXiv 1607.00133) and its account.

A step draws a new batch from all sequences. The gradient of each sequence is clipped to a norm of at most `clip`, and
their sum gets Gaussian noise of standard deviation `noise` · `clip` in every coordinate. Everything that leaves the
machine follows from such sums, so the bound covers all of it together, for any observer with any knowledge. If one
sequence had been another one, no observation would be more than exp(epsilon) times as likely, except with probability
delta.

Two data sets are neighbours if one sequence is replaced: sums then differ by at most 2 · `clip`. The arithmetic is that
of dp-accounting: Rényi accounts of sampling without replacement (arXiv 1808.00087).

The account covers a corpus over all runs of this node, also those without a bound, after which no epsilon is valid. A
phase is entered when its work goes into the error feedback, because later payloads may contain it in any case, and
before any of it is announced.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dilocox.protocol.errors import ConfigError, LocalError
from dilocox.protocol.run.corpus import check_enough, order_of
from dilocox.protocol.run.manifest import Manifest
from dilocox.transport.store.blobs import BlobStore
from dilocox.transport.store.corpus_store import corpus_in
from dilocox.transport.store.files import write_atomically

__all__ = ["ACCOUNT", "UNBOUNDED", "Account", "Budget", "Steps", "epsilon_of", "open_account", "steps_left"]

ACCOUNT = "privacy.json"
"""File in a node's folder."""

LEAST_NOISE, MOST_NOISE = 0.2, 200.0
"""Bounds of the noise in units of `clip`. Below, no account has a meaning; above, nothing is learned."""
PRECISION = 0.01
"""Precision of the noise: it is too large by at most this fraction."""
LATE = 1.25
"""Factor on the planned steps: phases are longer than planned while commits are late."""
ORDERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
"""Orders of Rényi divergences; the best one gives epsilon. More of them take longer and gain little."""
ENTERED = 64
"""Phases that are remembered: a node that starts again finds the last ones again, and enters them once."""


@dataclass(frozen=True)
class Budget:
    """Budget that an operator allows."""

    epsilon: float
    """Infinite: anything."""
    delta: float | None
    """Probability delta. None: one in ten times the sequences of the corpus."""
    clip: float
    """Largest norm of one sequence's gradient."""

    @property
    def bounds(self) -> bool:
        return self.epsilon < math.inf


UNBOUNDED = Budget(math.inf, None, 0.0)


class Steps(BaseModel):
    """Steps of the same kind: batches of `batch` from `sequences`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequences: int
    batch: int
    noise: float
    count: int


class _Kept(BaseModel):
    """Account of one corpus, as on disk."""

    model_config = ConfigDict(extra="forbid")

    steps: list[Steps] = []
    noise: dict[str, float] = {}
    """Noise by run, in hexadecimal: as first planned."""
    entered: list[str] = []
    """Digests of leaves, in hexadecimal, newest last."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    corpora: dict[str, _Kept] = {}
    """Accounts by digest."""


def epsilon_of(steps: Iterable[Steps], delta: float) -> float:
    """Return the epsilon of all of them together; infinite if one had no noise."""
    steps = list(steps)
    if not all(taken.noise for taken in steps):
        return math.inf
    from dp_accounting import dp_event, rdp  # scipy takes its second only when it is needed
    from dp_accounting.privacy_accountant import NeighboringRelation

    accountant = rdp.RdpAccountant(ORDERS, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    for taken in steps:
        added = dp_event.GaussianDpEvent(taken.noise / 2)  # over the most by which two sums differ
        event = dp_event.SampledWithoutReplacementDpEvent(taken.sequences, taken.batch, added)
        accountant.compose(event, taken.count)
    return float(accountant.get_epsilon(delta))


class Account:
    """Privacy account. Blocking, except for its properties."""

    def __init__(self, path: Path, run: bytes, corpus: bytes, sequences: int, batch: int, budget: Budget) -> None:
        """`path`: where it is kept; `run` and `corpus`: their digests; `sequences`: of the corpus, to train on; `batch`: of a step.
        Raises LocalError where what is kept cannot be read: nobody may begin again with a full budget."""
        self.budget, self.delta = budget, budget.delta or 1 / (10 * sequences)
        self._corpus = corpus
        self._path, self._run, self._sequences, self._batch = path, run.hex(), sequences, batch
        try:
            self._file = _File.model_validate_json(path.read_bytes()) if path.exists() else _File()
        except (OSError, ValidationError) as error:
            raise LocalError(f"cannot read {path}, the account of the private data's privacy: {error}") from error
        self._kept = self._file.corpora.setdefault(corpus.hex(), _Kept())
        self.noise = self._kept.noise.get(self._run, 0.0) if budget.bounds else 0.0
        """Noise in units of `clip`; 0 before `lay_out`."""
        self.spent = self._epsilon(self._kept.steps)
        """Epsilon so far …"""
        self.room = True
        """True if another phase fits into the budget."""

    def noise_for(self, steps: int, trained: bool = False) -> float:
        """The least noise, over `clip`, with which the `steps` that are left of the run stay within the bound; of a run that has
        one, what was chosen at first; 0 where there is no bound. `trained`: this folder has trained in the run before. Changes
        nothing. Raises ConfigError where no noise is enough, LocalError where what was trained is in no account."""
        if not self.budget.bounds:
            return 0.0
        if self.spent == math.inf and not self.noise:
            raise ConfigError(
                f"this corpus was trained on without a bound before, as {self._path.name} records: no epsilon is "
                "valid for it. Remove --private-epsilon, or use a corpus of other texts"
            )
        if trained and not self.noise:
            raise LocalError(
                f"this folder has trained in the run before, but its {self._path.name} is missing: restore that "
                "file, or use an empty --home"
            )
        return self.noise or self._least(math.ceil(LATE * max(1, steps)))

    def lay_out(self, steps: int, phase: int, trained: bool = False) -> None:
        """Choose that noise, where there is a bound. `phase`: steps of one. Raises what `noise_for` raises."""
        noise = self.noise_for(steps, trained)
        if not self.budget.bounds:
            return
        if not self.noise:
            self.noise = self._kept.noise[self._run] = noise
            self._write()
        self.room = self.fits(self.noise, phase)

    def _least(self, steps: int) -> float:
        if not self.fits(MOST_NOISE, steps):
            raise ConfigError(
                f"--private-epsilon {self.budget.epsilon:g}: {steps:,} steps need too much noise to learn "
                f"anything. Use a larger epsilon or a larger corpus; {self.sentence}"
            )
        low, high = LEAST_NOISE, MOST_NOISE
        if self.fits(low, steps):
            return low
        while high > low * (1 + PRECISION):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.fits(middle, steps) else (middle, high)
        return high

    def fits(self, noise: float, steps: int) -> bool:
        """Whether so many more stay within the budget."""
        return self._epsilon([*self._kept.steps, self._taken(noise, steps)]) <= self.budget.epsilon

    def _taken(self, noise: float, steps: int) -> Steps:
        return Steps(sequences=self._sequences, batch=self._batch, noise=noise, count=steps)

    def _epsilon(self, steps: list[Steps]) -> float:
        return epsilon_of(steps, self.delta) if steps else 0.0

    def enter(self, work: bytes, steps: int, noise: float, corpus: bytes) -> bool:
        """Write down what a phase took from the corpus, with which noise; `work`: a digest of what it made, entered
        once. Whether all that was entered stays within the budget: if not, nobody may hear of it. Raises LocalError where
        a bound is to hold and it is of another corpus: what that gives away, this account does not say."""
        if corpus != self._corpus and not self.budget.bounds:
            return True
        if corpus != self._corpus:
            raise LocalError(
                "this folder's error feedback comes from other data, which --private-epsilon would not count: "
                "use an empty --home, or the corpus that it trained on before"
            )
        if work.hex() not in self._kept.entered:
            self._kept.steps = _merged([*self._kept.steps, self._taken(noise, steps)])
            self._kept.entered = [*self._kept.entered, work.hex()][-ENTERED:]
            self._write()
            self.spent = self._epsilon(self._kept.steps)
        within = self.spent <= self.budget.epsilon
        self.room = within and self.fits(self.noise, steps)
        return within

    @property
    def promised(self) -> bool:
        """Return whether the corpus has a bound that was never exceeded."""
        return bool(self._kept.noise) and self.spent < math.inf

    def _write(self) -> None:
        write_atomically(self._path, self._file.model_dump_json(indent=1).encode())

    @property
    def sentence(self) -> str:
        """Return a sentence about the account."""
        return f"epsilon {self.spent:.2f} of {self.budget.epsilon:g} is used (delta {self.delta:.2g})"


def _merged(steps: list[Steps]) -> list[Steps]:
    """Alike ones added up."""
    counts: dict[tuple[int, int, float], int] = {}
    for each in steps:
        key = each.sequences, each.batch, each.noise
        counts[key] = counts.get(key, 0) + each.count
    return [Steps(sequences=s, batch=b, noise=n, count=count) for (s, b, n), count in counts.items()]


def open_account(
    home: Path, manifest: Manifest, private: Path, digest: bytes, budget: Budget | None, gives_up: bool = False
) -> Account:
    """Open the account of the corpus with this digest in `private`. Raises ConfigError if it is missing, or has no whole
    batch, or if there is no budget although a bound was promised before and not given up; as Account."""
    corpus = corpus_in(BlobStore(private, ours=False), digest)
    if corpus is None:
        raise ConfigError(f"the private data in {private} are damaged: build them again")
    check_enough(manifest, corpus)
    sequences, batch = order_of(manifest, corpus).total, manifest.training.batch_size
    account = Account(home / ACCOUNT, manifest.run_id, digest, sequences, batch, budget or UNBOUNDED)
    if budget is None and account.promised and not gives_up:
        raise ConfigError(
            f"this corpus has a privacy bound: {ACCOUNT} records epsilon {account.spent:.2f} (delta "
            f"{account.delta:.2g}), and training without a bound would end it. Pass --private-epsilon, or "
            "--private-epsilon inf to give it up"
        )
    return account


def steps_left(manifest: Manifest, trained: int) -> int:
    """Return the remaining steps of the run, if every round takes its H. `trained`: counted rounds so far."""
    return manifest.nominal_steps(manifest.rounds.count + 1) - manifest.nominal_steps(trained + 1)
