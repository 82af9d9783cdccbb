"""A node's events as people read them."""

from __future__ import annotations

from swarmnode.ui.sentences import sentence


def test_what_was_fetched_is_told_with_its_sources_whose_names_reach_no_terminal() -> None:
    came = {"the coordinator": 3 << 20, "att\x1b[2Jic": 150 << 20}
    said = sentence("fetched", {"model": "tiny", "stage": 1, "bytes": came})
    assert said.startswith("tiny: fetched for stage 1: 3.0 MiB from the coordinator, 150 MiB from att")
    assert "\x1b" not in said


def test_who_was_removed_is_told_how_to_get_in_again() -> None:
    said = sentence("removed", {"reason": "no channel"})
    assert "was removed from the swarm; to have this machine in the swarm again, run `swarmnode join-token`" in said
