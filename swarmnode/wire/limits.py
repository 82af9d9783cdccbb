"""The wire's limits, each with its reason; everything that comes from outside is held against them first."""

from __future__ import annotations

MAX_POSITIONS = 4096
"""Positions in one prompt piece: their ids (5 bytes each at most) stay well inside a header."""
MAX_ROWS = 1024
"""Sessions in one decode group: far more than any home GPU decodes at once, and 20 bytes a row fit a header."""
MAX_STAGES = 1024
"""Stages a message can have passed (one compute time each): a model has no more layers than that."""
MAX_HEADER_BYTES = 64 << 10
"""A header: 4096 ids of 5 bytes, or 1024 rows of 20, three times over."""
MAX_PIECE_POSITIONS = 1024
"""Positions a stage 0 puts in one prompt piece at most, whatever it was asked for."""
MAX_BODY_BYTES = 64 << 20
"""A body: MAX_PIECE_POSITIONS in fp32 of hidden size 16384, the largest of the open models."""
MAX_FRAME_BYTES = MAX_HEADER_BYTES + MAX_BODY_BYTES
"""What the four length bytes may say (header and body together)."""
MAX_JOIN_FRAME_BYTES = 16 << 10
"""A frame of somebody who has no certificate yet: a name, a secret and a request of some 500 bytes."""
MAX_HELLO_FRAME_BYTES = MAX_HEADER_BYTES
"""The first frame of a channel, before anybody looked at who opens it: HELLO has no body."""
MAX_CONTROL_FRAME_BYTES = MAX_HEADER_BYTES + (1 << 20)
"""The list of ten thousand removed nodes, or a beat with the gauges of hundreds of stages."""
MAX_UNREAD_BYTES = 64 << 20
"""Of one node, on all its channels together, that is not read yet: four structured bodies of the longest kind."""
MAX_CARRIED_BYTES = 256 << 20
"""The same for lanes and tunnels: a frame of the longest kind on each of four, or full windows on thirty-two."""
MAX_STRANGER_UNREAD_BYTES = 64 << 10
"""Of a connection without a certificate: it sends three frames, and waits for an answer between them."""
MAX_TEXT_CHARS = 16_000
"""Characters of one `text` frame: at four bytes each they still fit a header; a longer text goes in several."""
MAX_MAP_BODY_BYTES = 16 << 20
"""A structured body: a chat of a million tokens as text, twice over."""
MAX_DOCUMENT_BYTES = 8 << 20
"""The swarm's document: ten thousand nodes take 3 MiB, a thousand API tokens and the manifests of models the rest."""
MAX_CHUNK_BYTES = 1 << 20
"""File bytes in one `data` frame: small enough to show progress on a slow uplink, large enough to fill a fast one."""
MAX_BODY_DEPTH = 16
"""Nesting of a structured body: chat messages with content parts need 6."""
MAX_BODY_ITEMS = 1 << 20
"""Entries of one list or map of a structured body."""
MAX_RANK = 4
"""Dimensions of a tensor: (positions, hidden) needs 2; 4 leaves room for what drafts may send."""
MAX_DIMENSION = 1 << 24
"""One dimension; the product is bounded by MAX_BODY_BYTES anyway."""

STREAM_WINDOW_BYTES = 8 << 20
"""Unread bytes a channel may hold: 8 MiB keep 1 Gbit/s busy at 60 ms RTT (h2's own 64 KiB: 1 MB/s)."""
MAX_CHANNELS = 32
"""Channels open on one connection, whose window is all of theirs together: so a channel whose consumer stalls can never
take credit from another. Calls that a node forwards have one each; the others need a single one."""
MAX_MEMBER_CONNECTIONS = 64
"""Of one member to one listener: control, requests, four for calls, a dozen fetches of files, and two lanes of each of
a dozen rings, once more while they are linked anew and the old ones have not been missed yet."""
SLOWEST_FRAME_BYTES = 64 << 10
"""What FRAME_S must bring of a frame that has begun, unless that is its end: 1 KB/s, far below any line in use even
where 32 channels share it."""
API_WINDOW_BYTES = 1 << 20
"""The same for a call that one node forwards to another: many of their readers are slow, and 1 MiB is 8 s of text at
1 Mbit/s."""
MAX_HTTP_BYTES = 64 << 10
"""HTTP/1.1 bytes in one `http` frame: what the API writes and reads at a time."""
H2_FRAME_BYTES = 1 << 20
"""SETTINGS_MAX_FRAME_SIZE: at the default of 16 KiB a 16 MiB piece costs 1,024 rounds of Python."""
DATA_FRAME_BYTES = 256 << 10
"""What one channel sends before the next has its turn: 2 ms at 1 Gbit/s."""
WRITE_BYTES = 1 << 20
"""One write to the socket at most: a frame queued meanwhile waits for no more than this."""
READ_BYTES = 256 << 10
"""One read from the socket."""
SEND_QUEUE_BYTES = 8 << 20
"""Queued on a channel before `send` waits and `send_nowait` refuses; one frame may overshoot it."""
