"""The API port's limits and deadlines in one place, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Tests make them small; nothing else changes them."""

    body_bytes: int = 4 << 20
    """About a million tokens of English; parsing it takes under 100 ms of the event loop."""
    body_idle_s: float = 20.0
    """A body that stands still this long is given up (408): a slow writer must not hold a request for ever."""
    body_total_s: float = 120.0
    """4 MiB over a 300 kbit/s uplink."""
    connections: int = 512
    """Open at once: half of the 1,024 descriptors that a process usually may have. Beyond it the connection that has
    been idle longest makes room for a new one, so whoever opens thousands drives out his own."""
    link_connections: int = 256
    """Of those: calls that other nodes forward, all together, so that the port's own clients always have as many."""
    node_connections: int = 128
    """Of those: calls that one other node forwards. It never has more under way, and a member of the swarm that went
    wrong must leave room for the others."""
    local_connections: int = 16
    """Kept free for callers on this machine: whoever takes all the other places can still be removed, by hand."""
    handshake_s: float = 10.0
    """TLS needs two round trips and a signature; whoever takes longer only holds a socket."""
    header_s: float = 10.0
    """From a request's first byte to the end of its headers: those fit into one packet or a few."""
    cut_s: float = 2.0
    """How long a reply that is cut (a revoked token) may take to tell the client why, before its connection ends."""
    linger_s: float = 2.0
    """After an early refusal the body is still read this long, so that the client sees the answer, not a reset."""
    sse_keep_alive_s: float = 10.0
    """Well under the 60 s after which nginx and load balancers cut a silent connection."""
    idle_connection_s: float = 130.0
    """Above the 120 s for which client pools keep connections, so that the client closes first."""
    write_s: float = 30.0
    """A client that does not read for so long is gone; its request is cancelled and its memory freed."""
    grace_s: float = 1.0
    """How long running replies may finish when the server stops; then they are cut."""


DEFAULT_LIMITS = ApiLimits()
