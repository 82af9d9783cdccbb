"""Where the compiled block finds its numbers: names of the 64-bit slots of the records that Python fills for it."""

from __future__ import annotations

MATRIX_NAMES = ("qkv", "o", "gate_up", "down")
"""In the order they are multiplied."""
MATRIX_SLOTS = ("entries", "weights", "beside", "bias", "tiles", "groups")
"""`entries`: addresses of the product's functions for one row, two rows, …; `bias` may be null."""
BLOCK_SLOTS = (
    *(f"{matrix}_{slot}" for matrix in MATRIX_NAMES for slot in MATRIX_SLOTS),
    *("heads", "kv_heads", "head_dim", "window", "scaling"),
    *("input_gain", "mlp_gain", "query_gain", "key_gain"),
    *("input_eps", "mlp_eps", "query_eps", "key_eps"),
    "rotates",
)
"""Of a block. A window of 0 is none; gains are float32, those of queries and keys may be null; `scaling` and eps are
float32 in the slot's lower half."""
STEP_SLOTS = ("rows", "qkv", "queries", "attended", "gate_up", "cos", "sin", "sessions", "count", "threads")
"""Of one step through one block, of `count` rows. In the block's dtype: `rows` (count, hidden), which become its
result; room for `qkv`, `attended` and `gate_up`; `cos` and `sin` (count, head_dim), the sine signed as a RotaryTable's.
In float32 room for `queries`. `sessions`: a record of SESSION_SLOTS for each row."""
SESSION_SLOTS = ("keys", "values", "capacity", "length")
"""Of a row's session: its buffers, (kv_heads, capacity, head_dim) in the block's dtype, and how many positions they
hold."""
