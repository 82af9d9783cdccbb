"""Deadlines of the wire and of the services over it, in seconds. A ring's own are where its rules are:
`cluster/ring_life.py` (load, link, probe, unload) and `ring/progress.py` (steps)."""

from __future__ import annotations

CONNECT_S = 5.0
TLS_S = 5.0
"""A handshake, both ways and with two P-256 signatures; a half one must not keep a socket."""
HELLO_S = 5.0
"""From the connection (or the channel) to WELCOME; that the listener refused a certificate, too, only shows here."""
JOIN_S = 10.0
"""A connection without a certificate, from its first byte to its last: it is there for one exchange."""
DRAIN_S = 60.0
"""Requests that still run when a model is unloaded."""
WORKER_EXIT_S = 3.0
"""A worker whose input closed, before SIGTERM (at node shutdown: before SIGKILL)."""
WORKER_TERM_S = 10.0
"""A worker after SIGTERM, before SIGKILL."""
DEVICE_PROBE_S = 60.0
"""A process that imports torch, from a cold disk, and looks for cards; a peer that may have one joins after it."""
NODE_SHUTDOWN_S = 5.0
"""The whole of a node's clean end; after it `os._exit`."""
CHANNEL_CLOSE_S = 2.0
"""Queued frames of a channel that is closed in good order, while its connection still has to take them."""
TCP_USER_TIMEOUT_S = 30.0
"""Bytes the other machine does not acknowledge: the kernel then breaks the connection."""
WRITE_S = 60.0
"""One write of WRITE_BYTES at most: 17 KB/s, slower than any line that could serve a model. Who takes longer does not
read, and what waits for him is memory."""
FRAME_S = 60.0
"""SLOWEST_FRAME_BYTES of a frame that has begun: who sends it byte by byte holds its buffer and its reader."""
KEEPALIVE_S = 30.0
"""Silence on a connection before the kernel asks whether the other machine is still there: a laptop that was switched
off would otherwise hold its connections, and its places among those of its node, for ever."""
RELAY_ANSWER_S = 5.0
"""A node that is called through the coordinator, to dial it from its side: as long as a direct connection may take."""
DIAL_BACK_S = 5.0
"""The coordinator's attempt to reach an address that a peer asked about; the peer's user waits for it."""
PUSH_S = 20.0
"""A polled link's push of 1 MiB at most: 50 KB/s; a slower uplink serves no model."""
POLL_ANSWER_S = 40.0
"""A polled link's GET, which the coordinator holds for 25 s without news; a proxy may add some."""
