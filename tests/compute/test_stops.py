from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.stops import StopMatcher

TEXT = st.text("ab你.", max_size=30)
STOPS = st.lists(st.text("ab你.", min_size=1, max_size=5), max_size=5)


def dumb(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is shown of a whole text, and the stop: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_possible(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30)))
def test_it_agrees_with_looking_at_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, shown, seen, stop = StopMatcher(stops), "", "", None
    for chunk in chunks_of(text, cuts):
        step = matcher.push(chunk)
        shown += step.text
        seen += chunk
        if step.stop is not None:
            stop = step.stop
            break
        assert len(seen) - len(shown) == longest_possible(seen, stops)
    if stop is None:
        shown += matcher.finish()
    assert (shown, stop) == dumb(text, stops)


def test_nothing_is_held_back_that_cannot_become_a_stop() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(c).text for c in ("ABC", "D", "E", "X", "DEF")] == ["ABC", "", "", "DEX", ""]
    assert matcher.push("GHIJ rest") == ("", "DEFGHIJ")
    assert matcher.push("more") == ("", None)
    assert matcher.finish() == ""


def test_of_two_stops_that_end_together_the_longer_is_cut_off() -> None:
    assert StopMatcher(["bc", "abc"]).push("xabc") == ("x", "abc")
    assert StopMatcher(["ab", "abc"]).push("xabc") == ("x", "ab")


def test_empty_stops_are_ignored() -> None:
    assert StopMatcher(["", ""]).push("text") == ("text", None)
