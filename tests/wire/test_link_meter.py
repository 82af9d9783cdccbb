"""What a link's meter makes of frames and acknowledgements, against links whose figures are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.wire.link_meter import LARGE_BYTES, WINDOW, LinkMeter


@given(st.floats(0.001, 0.3), st.floats(1e5, 1e8), st.lists(st.integers(1, 40 * LARGE_BYTES), min_size=2, max_size=30))
def test_a_quiet_link_is_measured_for_what_it_is(trip_s: float, bytes_per_s: float, sizes: list[int]) -> None:
    """Small frames first: their bytes count for nothing beside the way."""
    meter, now = LinkMeter(), 0.0
    for seq, size in enumerate([1, *sizes]):
        meter.sent(seq, size, now)
        now += trip_s + (size / bytes_per_s if size >= LARGE_BYTES else 0.0)
        meter.acknowledged(seq + 1, now)
        now += 1.0
    assert meter.round_trip_s == pytest.approx(trip_s)
    if any(size >= LARGE_BYTES for size in sizes):
        assert meter.bytes_per_s is not None
        assert meter.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


def test_frames_that_waited_behind_others_do_not_count() -> None:
    meter = LinkMeter()
    meter.sent(0, LARGE_BYTES, 0.0)
    meter.sent(1, 10, 0.0)
    meter.acknowledged(2, 5.0)
    assert meter.round_trip_s is None


def test_an_acknowledgement_that_came_late_for_its_frame_does_not_count() -> None:
    meter = LinkMeter()
    meter.sent(0, 10, 0.0)
    meter.acknowledged(0, 3.0)
    assert meter.round_trip_s is None
    meter.acknowledged(1, 0.05)
    assert meter.round_trip_s == 0.05


def test_bandwidth_needs_a_round_trip_first() -> None:
    meter = LinkMeter()
    meter.sent(0, LARGE_BYTES, 0.0)
    meter.acknowledged(1, 1.0)
    assert meter.bytes_per_s is None


def test_one_hiccup_changes_nothing() -> None:
    meter = LinkMeter()
    for seq in range(WINDOW):
        meter.sent(seq, 10, float(seq))
        meter.acknowledged(seq + 1, seq + (2.0 if seq == 7 else 0.02))
    assert meter.round_trip_s == pytest.approx(0.02)


def test_a_new_link_starts_with_nothing_under_way() -> None:
    meter = LinkMeter()
    meter.sent(0, 10, 0.0)
    meter.forget()
    meter.sent(1, 10, 9.0)
    meter.acknowledged(2, 9.03)
    assert meter.round_trip_s == pytest.approx(0.03)
