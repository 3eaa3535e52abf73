"""The bars of `bench.boxes`, without a process."""

from bench.boxes import Line, missed
from dilocox.testnet.namespaces import Traffic

NONE = Traffic(0, 0)


def line(boxes: int, sent: int, received: int) -> Line:
    return Line(boxes, f"box of {boxes}", Traffic(sent, received), NONE, NONE)


def test_a_box_of_two_carries_its_share_both_ways():
    whole = [line(1, 900, 1000), line(1, 1100, 1000)]
    assert missed([*whole, line(2, 600, 600)], 0) == []
    assert missed([*whole, line(2, 601, 600)], 0) == ["box of 2 sent 0.60 of what a cluster's only box does, at most 0.6"]
    assert missed([*whole, line(2, 500, 700)], 0) == ["box of 2 received 0.70 of what a cluster's only box does, at most 0.6"]


def test_rounds_that_left_somebody_out_say_nothing():
    (sentence,) = missed([line(1, 1000, 1000), line(2, 500, 500)], 1)
    assert "not counted" in sentence
