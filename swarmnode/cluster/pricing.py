"""What a stage of a model takes in memory, by arithmetic over the parameters that its headers list.

Nothing here loads anything, and nothing is guessed from a model's dimensions: an import has every tensor's header, an
adapter's too. Bytes per parameter follow the serving dtype or the quantization; the KV cache is priced by
position, recurrent states by session; workspace is what one forward and the load itself need beside those.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.cluster.quantization import (
    BNB_INT8,
    BYTES_PER_PARAM,
    CARD_INPUTS,
    HEAD_BYTES_PER_PARAM,
    INT4_CARD,
    INT4_FAST,
    INT8,
    NF4,
    NONE,
    merges_adapter,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HEADROOM = 1.2
"""All that is priced is multiplied by this: fragmentation, the allocator's rounding, what grows for a moment."""
WORKER_BYTES = 380 << 20
"""What a stage worker takes beside weights: interpreter, torch, transformers, what a load leaves (measured on CPU, as
resident memory)."""
KERNELS_BYTES = 80 << 20
"""What a worker takes that compiles its kernels, most of it LLVM's own code. One without llvmlite takes it not, nor one
on a card; they are priced alike."""
BITSANDBYTES_BYTES = 40 << 20
"""What the library adds to a worker that quantizes with it. torchao adds nothing: transformers imports it anyway."""
_LIBRARY_BYTES = {
    NONE: KERNELS_BYTES,
    NF4: BITSANDBYTES_BYTES,
    BNB_INT8: BITSANDBYTES_BYTES,
    INT8: KERNELS_BYTES,
    INT4_FAST: KERNELS_BYTES,
}
PIECE_TOKENS = 256
"""Prompt positions that one forward reads (SWARM_SERVE_PREFILL_CHUNK's default)."""
_ROW_WIDTHS = 16
"""Values per position that a block has alive at once, in hidden sizes: qkv, gate and up, residuals, scores."""
_LOGITS_ROWS = 8
"""Rows of float32 logits that a group makes and the sampler copies."""
_STATES_KEPT = 2
"""A recurrent state and the one before its last forward; float32, whatever the serving dtype."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What placement needs to know of a model; parameters per layer, values of KV per position and layer."""

    layer_params: tuple[int, ...]
    embed_params: int
    head_params: int
    kv_values_per_token_layer: int
    context_tokens: int
    recorded_stages: int
    recorded_boundaries: tuple[int, ...] | None
    """None: it records no split, and serves only over its own stages."""
    weightless: bool = False
    """A scripted servable: no torch, no weights."""
    tied: bool = False
    """The head is the embedding's table: a stage that has both holds it once, unless the head is packed."""
    hidden_size: int = 0
    vocab_size: int = 0
    recurrent_layers: frozenset[int] = frozenset()
    """These keep a state per session and no KV."""
    state_values_per_layer: int = 0
    shard_boundaries: tuple[int, ...] | None = None
    """Where the shards of a model that records no split are cut; None: that is not known here."""
    adapter_params: tuple[int, ...] = ()
    """Of a LoRA adapter, by layer."""
    dora: bool = False
    """The adapter scales its rows to trained magnitudes."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """The price of layers `first` … `end`-1; `need` adds up."""

    embed: int
    layers: int
    head: int
    kv_token: int
    """Per position, all sessions together."""
    states: int
    """Recurrent states of the sessions in flight."""
    worker: int
    workspace: int

    @property
    def weights(self) -> int:
        return self.embed + self.layers + self.head

    @property
    def fixed(self) -> int:
        """All but KV."""
        return self.weights + self.states + self.worker + self.workspace

    def step_gib(self, *, is_last: bool) -> float:
        """GiB of weights that a step of one row reads: blocks and the last stage's head, which may be the embedding. A
        script's steps read nothing, and are all the same."""
        return (self.layers + ((self.head or self.embed) if is_last else 0)) / (1 << 30) or 1.0

    def need(self, kv_tokens: int) -> float:
        """Bytes that a peer must offer."""
        return (self.fixed + kv_tokens * self.kv_token) * HEADROOM


def price_stage(
    shape: ModelShape,
    first: int,
    end: int,
    dtype: str,
    quantization: str,
    in_flight: int,
    piece_tokens: int = PIECE_TOKENS,
) -> StageBytes:
    """For prompts in pieces of `piece_tokens`. Embeddings stay in the serving dtype on the first stage; layers and the
    last stage's head follow `quantization`, as it is stored on the stage's device (`stored_as`)."""
    size = DTYPE_BYTES[dtype]
    is_first, is_last = first == 0, end == len(shape.layer_params)
    head_size = HEAD_BYTES_PER_PARAM.get(quantization, size)
    head = shape.head_params * head_size if is_last else 0
    if shape.tied and is_first and is_last and quantization not in HEAD_BYTES_PER_PARAM:
        head -= shape.embed_params * head_size
    recurrent = sum(first <= layer < end for layer in shape.recurrent_layers)
    if shape.weightless:
        return StageBytes(0, 0, 0, shape.kv_values_per_token_layer * (end - first) * size, 0, 0, 0)
    return StageBytes(
        embed=shape.embed_params * size if is_first else 0,
        layers=int(sum(shape.layer_params[first:end]) * _layer_param_bytes(shape, quantization, size))
        + _adapter_bytes(shape, first, end, quantization),
        head=int(max(head, 0)),
        kv_token=shape.kv_values_per_token_layer * (end - first - recurrent) * size,
        states=recurrent * shape.state_values_per_layer * 4 * _STATES_KEPT * in_flight,
        worker=WORKER_BYTES + _LIBRARY_BYTES.get(quantization, 0),
        workspace=_workspace(shape, first, end, size, quantization, piece_tokens),
    )


def _layer_param_bytes(shape: ModelShape, quantization: str, size: int) -> float:
    """On a card with what torchao adds to the rows of a block's matrices, most of which are a hidden size long."""
    per_param = BYTES_PER_PARAM.get(quantization, size)
    if quantization != INT4_CARD or not shape.hidden_size:
        return per_param
    return per_param * -(-shape.hidden_size // CARD_INPUTS) * CARD_INPUTS / shape.hidden_size


def _adapter_bytes(shape: ModelShape, first: int, end: int, quantization: str) -> int:
    """Kept in float32 beside quantized weights; merged it takes nothing."""
    return 0 if merges_adapter(quantization, dora=shape.dora) else sum(shape.adapter_params[first:end]) * 4


def _workspace(shape: ModelShape, first: int, end: int, size: int, quantization: str, piece_tokens: int) -> int:
    """The larger of a prompt piece with its logits, and of a block in full precision while it is quantized."""
    piece = piece_tokens * _ROW_WIDTHS * shape.hidden_size * size
    if end == len(shape.layer_params):
        piece += _LOGITS_ROWS * shape.vocab_size * 4
    block = 0 if quantization == NONE or not shape.hidden_size else max(shape.layer_params[first:end]) * size
    return max(piece, block)


def mib(count: float) -> str:
    """Bytes as people are told them."""
    return f"{count / (1 << 20):,.0f} MiB"
