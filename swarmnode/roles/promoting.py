"""A person's word that the other voters are gone for good: this node's copy of the document is the swarm's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.cluster.election import Election
from swarmnode.cluster.election_messages import ForceAlone, Persist
from swarmnode.errors import Conflict, InvalidRequest
from swarmnode.roles.ballot import STATE_FILE, Ballot
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.running_node import is_running

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.cluster.election_messages import Entry


def promote(data_dir: Path) -> Entry:
    """Make the node of `data_dir` the only voter; it coordinates from its next start on. Returns what it goes on with.

    Raises Conflict while the node runs, InvalidRequest for one that was never admitted as a voter.
    """
    if is_running(data_dir):
        raise Conflict(f"the node of {data_dir} runs; stop it, promote it, and start it again")
    ballot, kept = Ballot(data_dir / STATE_FILE), NodeIdentity.open(data_dir)
    if not ballot.exists or SwarmAuthority.kept(kept) is None:
        raise InvalidRequest(
            f"{data_dir} is not of a node that can coordinate: only one that was started with --voter, and was "
            "admitted while the coordinator was there, holds the swarm's document and its key"
        )
    election = Election(kept.node, ballot.read(()), 0.0, lambda: 0.0)
    election.receive(ForceAlone(), 0.0)
    for effect in election.outgoing():
        if isinstance(effect, Persist):
            ballot.write(effect.stored)
    return election.entry
