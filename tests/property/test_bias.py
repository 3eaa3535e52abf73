"""Tests of bias: a steady pull is distinguished from random differences, for any size and any other clusters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.protocol import limits
from dilocox.protocol.checks import bias_rules
from dilocox.protocol.checks.bias_rules import DECAY, LEAST_ROUNDS, SKETCH, Memory
from dilocox.protocol.checks.score_rules import Score
from tests.helpers import manifest

RUN = manifest(scoring={"voters": 8})
ME = "me"
Sketch = bias_rules.Vector


@dataclass(frozen=True)
class Round:
    """Data that an author has when it announces."""

    common: Sketch
    """Direction that all learn in this round, of length 1."""
    noise: Sketch
    """Noise of this author, of length 2."""
    pull: Sketch
    """The same in each round, of length 1."""


Author = Callable[[Round], Sketch]


def honest(round: Round) -> Sketch:
    return round.common + round.noise


def scores_of(sketches: Mapping[str, Any]) -> dict[str, Score]:
    return {name: Score(2.0, 1.0, 0.5, sketch, sketches[ME]) for name, sketch in sketches.items() if name != ME}


def remembered(memory: Memory, scores: Mapping[str, Score], run: Any = RUN, cut: dict[str, float] | None = None) -> Memory:
    """Return the memory after a round whose commit counts all, and clips nothing unless `cut` names it."""
    return bias_rules.closed(bias_rules.after(run, memory, ME, scores), dict.fromkeys((ME, *scores), 0.0) | (cut or {}))


def unit(random: np.random.Generator) -> Sketch:
    drawn = random.standard_normal(SKETCH)
    return drawn / np.linalg.norm(drawn)


def found(authors: Mapping[str, Author], rounds: int, seed: int, run: Any = RUN) -> list[frozenset[str]]:
    """Return the biased authors that the voter finds after each round."""
    random = np.random.default_rng(seed)
    memory, pull, told = Memory(), unit(random), []
    for _ in range(rounds):
        common = unit(random)
        said = {name: author(Round(common, 2 * unit(random), pull)) for name, author in authors.items()}
        scores = scores_of(said)
        memory = remembered(memory, scores, run)
        told.append(bias_rules.biased(run, memory, ME, scores))
    return told


def crowd(honest_ones: int, **others: Author) -> dict[str, Author]:
    return {ME: honest, **{f"honest-{number}": honest for number in range(honest_ones)}, **others}


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(0, 1 << 32))
def test_nobody_is_biased_where_all_are_honest_and_slow_ones_are(others: int, seed: int):
    slow: dict[str, Author] = {"slow": lambda r: 0.2 * (r.common + 2 * r.noise), "slower": lambda r: 0.1 * r.common + r.noise}
    assert not any(found(crowd(others, **slow), 60, seed))


def test_author_that_goes_farther_on_the_common_way_is_not_biased():
    """Check a fast author, while all learn the same in each round: the others' mean is a noisy measure of it.

    The check is statistical: in a few hundred runs chance convicts an author once (seed 8886). So the seeds are fixed."""
    fast: Author = lambda r: 3 * r.pull + r.noise  # noqa: E731
    slow: Author = lambda r: r.pull / 2 + r.noise / 2  # noqa: E731
    for seed in range(10):
        assert not any(found({ME: slow, "fast": fast, "slow": slow, "slower": slow}, 60, seed))
        assert not any(found({ME: fast, "fast": fast, "slow": slow, "slower": slow}, 60, seed))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.sampled_from([2.0, 20.0]), st.integers(0, 1 << 32))
def test_who_pulls_the_same_way_is_found_and_no_honest_one_for_it(others: int, size: float, seed: int):
    told = found(crowd(others, hostile=lambda r: r.common + size * r.pull), 40, seed)
    assert not any(told[:LEAST_ROUNDS]), "before that nobody is judged"
    assert all(each == {"hostile"} for each in told[2 * LEAST_ROUNDS :])
    assert set().union(*told) == {"hostile"}


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1 << 32))
def test_many_who_pull_together_are_found_as_long_as_more_do_not(seed: int):
    pulls: Author = lambda r: r.common + r.noise / 4 + r.pull  # noqa: E731
    told = found(crowd(6, **{f"hostile-{n}": pulls for n in range(3)}), 40, seed)
    assert set().union(*told) <= {f"hostile-{n}" for n in range(3)}, "the mean that they shift is the same for all others"
    assert told[-1] == {f"hostile-{n}" for n in range(3)}


def test_who_stops_is_forgiven():
    random = np.random.default_rng(1)
    pull, memory, told = unit(random), Memory(), []
    for number in range(80):
        common = unit(random)
        said = {name: common + 2 * unit(random) for name in (ME, "a", "b", "c")}
        said["it"] = common + pull if number < 20 else common + 2 * unit(random)
        memory = remembered(memory, scores_of(said))
        told.append(bias_rules.biased(RUN, memory, ME, scores_of(said)))
    assert told[19] == {"it"}
    assert not told[-1]


def test_how_strong_a_bias_can_be():
    random = np.random.default_rng(2)
    pull, memory = unit(random), Memory()
    for _ in range(200):
        said = {name: 2 * unit(random) for name in (ME, *map(str, range(40)))}
        memory = remembered(memory, scores_of(said | {"it": 1e6 * (pull + unit(random) / 4)}))
    most = (1 + DECAY) / (1 - DECAY)
    assert 0.7 * most < memory.authors["it"].strength <= most, "however loud it is"
    assert memory.authors[ME].strength < most / 3


def test_clusters_on_texts_of_their_own_are_not_compared():
    told = found(crowd(4, hostile=lambda r: r.pull), 20, 3, manifest(scoring={"voters": 8}, data={"private": True}))
    assert not any(told)


def test_of_two_nobody_can_tell_who_differs():
    random, memory = np.random.default_rng(8), Memory()
    pull = unit(random)
    for _ in range(3 * LEAST_ROUNDS):
        said = {ME: 2 * unit(random), "hostile": pull}
        memory = remembered(memory, scores_of(said))
        assert not memory.authors, "there is no third one to compare with"
    for number in range(LEAST_ROUNDS + 1):
        said = {ME: 2 * unit(random), "hostile": pull, f"new-{number}": 2 * unit(random)}
        memory = remembered(memory, scores_of(said), cut=dict.fromkeys(map("new-{}".format, range(20)), 0.0))
        assert not bias_rules.biased(RUN, memory, ME, scores_of(said)), "nobody else is known for long enough"
    assert memory.authors["hostile"].strength > 3 * memory.authors[ME].strength


def test_what_cannot_be_compared_says_nothing():
    random = np.random.default_rng(4)
    said = {name: 2 * unit(random) for name in (ME, "a", "b")}
    odd = {"no number": np.full(SKETCH, np.nan), "nothing": np.zeros(SKETCH), "short": ()}
    memory = remembered(Memory(cut=dict.fromkeys((*said, *odd), 0.0)), scores_of(said | odd))
    assert {name: each.rounds for name, each in memory.authors.items()} == {ME: 1, "a": 1, "b": 1}
    assert all(np.isfinite(each.total).all() for each in memory.authors.values())
    nothing = bias_rules.after(RUN, memory, ME, {})
    assert (nothing.authors, nothing.means, nothing.last) == (memory.authors, memory.means, {}), "it learns nothing"
    same = remembered(Memory(cut=dict.fromkeys(said, 0.0)), scores_of(dict.fromkeys(said, np.ones(SKETCH))))
    assert not same.authors, "who says the same does not differ"


def test_who_was_seen_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "CLUSTERS", 4)
    random = np.random.default_rng(5)
    all_counted = dict.fromkeys((ME, "a", *map(str, range(6))), 0.0)
    memory = Memory(cut=all_counted)
    for number in range(6):
        memory = remembered(memory, scores_of({name: unit(random) for name in (ME, "a", str(number))}), cut=all_counted)
    assert set(memory.authors) == {ME, "a", "4", "5"}
    assert memory.authors["a"].rounds == 6


@pytest.mark.parametrize(("cut", "uncounted"), [(0.6, 0), (0.6, 2)])
def test_who_says_again_what_it_is_owed_pulls_nowhere(cut: float, uncounted: int):
    """Check error feedback: a fast host is clipped in every round, and an uncounted cluster sends its whole backlog again."""

    def run(told: bool) -> list[frozenset[str]]:
        random = np.random.default_rng(6)
        memory, found, owed = Memory(), [], np.zeros(SKETCH)
        for number in range(60):
            common = unit(random)
            said = {name: common + 2 * unit(random) for name in (ME, "a", "b", "c")}
            said["it"] = common + 2 * unit(random) + owed
            missed = 20 <= number < 20 + uncounted
            owed = (1.0 if missed else cut) * said["it"]
            scores = scores_of(said)
            memory = bias_rules.after(RUN, memory, ME, scores)
            found.append(bias_rules.biased(RUN, memory, ME, scores))
            counted = dict.fromkeys(said, 0.0) | ({"it": cut} if told else {})
            if missed and told:
                del counted["it"]
            memory = bias_rules.closed(memory, counted)
        return found

    assert any(run(told=False)), "it would be taken for a pull"
    assert not any(run(told=True))


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([1.0, 2.0]), st.sampled_from([(3, 1), (5, 2), (7, 3)]), st.integers(0, 1 << 32))
def test_who_is_refused_makes_no_other_look_like_it(pull: float, clusters: tuple[int, int], seed: int):
    """Check that rejected work is no part of the others' mean; otherwise a host with less noise would differ from it."""
    honest_ones, hostile = clusters
    random = np.random.default_rng(seed)
    direction, common = unit(random), unit(random)
    names = [ME, *map(str, range(honest_ones - 1)), "quiet"]
    memory, found = Memory(), list[frozenset[str]]()
    for _ in range(60):
        common = 0.9 * common + 0.19**0.5 * unit(random)
        said = {name: common + 2 * unit(random) for name in names}
        said["quiet"] = 2 * common + 1.4 * unit(random)
        said |= {f"hostile-{number}": common + pull * direction * 2 for number in range(hostile)}
        memory = bias_rules.after(RUN, memory, ME, scores_of(said))
        found.append(bias_rules.biased(RUN, memory, ME, scores_of(said)))
        memory = bias_rules.closed(memory, dict.fromkeys(said, 0.0))
    assert not any("quiet" in each for each in found[20:])
    assert all(len(each) == hostile for each in found[20:])


def test_who_was_not_measured_last_is_known_by_what_the_commit_says():
    random = np.random.default_rng(7)
    names = (ME, "a", "b", "rare")
    for counted, rounds in (({"rare": 0.05}, 1), ({"rare": 0.5}, 0), ({}, 0)):
        memory = Memory(cut=dict.fromkeys(names[:3], 0.0) | counted)
        memory = bias_rules.after(RUN, memory, ME, scores_of({name: unit(random) for name in names}))
        assert {name: known.rounds for name, known in memory.authors.items()}.get("rare", 0) == rounds
