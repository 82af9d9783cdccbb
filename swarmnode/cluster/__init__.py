"""The rules of the swarm: membership, placement, ring life. No I/O, no torch, no clock."""
