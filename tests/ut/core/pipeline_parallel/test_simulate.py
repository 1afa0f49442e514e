"""How long a schedule takes, by numbers that can be checked with pencil and paper."""

from __future__ import annotations

import pytest

from hyper_parallel.core.pipeline_parallel import Durations, Kind, Step, draw, make_schedule, simulate


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp, micro_batches", [(1, 4), (2, 4), (4, 8), (4, 4)])
def test_the_bubble_is_that_of_the_papers(name, pp, micro_batches):
    """(pp - 1) / (m + pp - 1): m + pp - 1 rounds of forward 1 and backward 2, of which a rank is busy in m."""
    timeline = simulate(make_schedule(name, pp, micro_batches))
    assert timeline.total == 3 * (micro_batches + pp - 1)
    assert timeline.bubble_share == pytest.approx((pp - 1) / (micro_batches + pp - 1))


@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_interleaving_divides_the_bubble(interleave):
    """(pp - 1) / (interleave * m + pp - 1)."""
    timeline = simulate(make_schedule("interleaved_1f1b", 4, 8, interleave))
    assert timeline.bubble_share == pytest.approx(3 / (interleave * 8 + 3))


def test_1f1b_holds_as_many_micro_batches_as_ranks_come_after_it():
    assert simulate(make_schedule("gpipe", 4, 8)).peak_in_flight == (8, 8, 8, 8)
    assert simulate(make_schedule("1f1b", 4, 8)).peak_in_flight == (4, 3, 2, 1)


def test_transfers_and_reductions_take_time():
    """Forward 1, transfer 0.5, forward and backward 1 + 2, transfer 0.5, backward 2, reduction 4."""
    timeline = simulate(make_schedule("gpipe", 2, 1), Durations(1, 2, 0.5, 4))
    first, last = timeline.spans
    assert [(span.step.kind, span.start, span.end) for span in first] == [
        (Kind.FORWARD, 0, 1),
        (Kind.BACKWARD, 5, 7),
        (Kind.REDUCE_GRAD, 7, 11),
    ]
    assert [(span.start, span.end) for span in last] == [(1.5, 2.5), (2.5, 4.5), (4.5, 8.5)]
    assert timeline.total == 11
    assert timeline.bubble_share == pytest.approx(1 - 14 / 22)


def test_a_slow_stage_sets_the_pace():
    slow = [Durations(1, 2), Durations(10, 20)]
    timeline = simulate(make_schedule("1f1b", 2, 4), slow)
    assert timeline.total == 1 + 4 * 30 + 2
    with pytest.raises(ValueError, match="1 durations were given for 2 stages"):
        simulate(make_schedule("1f1b", 2, 4), slow[:1])


def test_the_drawing_shows_each_micro_batch_where_it_is_computed():
    assert draw(simulate(make_schedule("1f1b", 2, 2))).splitlines() == [
        "rank 0  holds 2 |0>1>....0<<<..1<<<|",
        "rank 1  holds 1 |..0>0<<<1>1<<<....|",
        "idle 33.3 % of the ranks' time; > forward, < backward, = gradient reduction, . idle",
    ]


def test_a_long_drawing_goes_on_below_and_stays_within_its_width():
    text = draw(simulate(make_schedule("interleaved_1f1b", 4, 8, 2)), 60)
    blocks = text.split("\n\n")
    assert len(blocks) > 1
    assert all(len(line) <= 60 for block in blocks for line in block.splitlines() if line.startswith("rank"))
    assert "7'<" in text.replace("\n", "")


def test_an_empty_timeline_draws_nothing():
    assert draw(simulate(make_schedule("gpipe", 1, 1), Durations(0, 0))) == ""
    assert Step(Kind.REDUCE_GRAD, 1).micro_batch == -1
