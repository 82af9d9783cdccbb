"""NF4 and int8 weights of bitsandbytes, quantized as they are read: what a quantized `from_pretrained` would hold.

Transformers' own rules say which linear layers are replaced (never the head), and bitsandbytes' own kernels quantize.
Both work by blocks of 64 weights or by rows, so a tensor is quantized in chunks with the same result, and what is held
beside the slice is one tensor in full precision.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import nn

from swarmnode.compute.spec import BNB_METHODS
from swarmnode.errors import KernelsFailed, LoadRefused

NF4, INT8 = BNB_METHODS
NF4_BLOCK = 64
"""Weights that share one absmax; bitsandbytes' and transformers' default."""
_CHUNK_ELEMENTS = 1 << 18
"""Quantized at a time, a multiple of NF4_BLOCK: bitsandbytes' CPU kernel takes some 17 bytes of scratch for each."""


def replace_linears(model: Any, method: str, dtype: torch.dtype) -> None:
    """Swap the linear layers that transformers would quantize for bitsandbytes' own; `model` is whole and on meta.

    Raises KernelsFailed where bitsandbytes is missing, LoadRefused where it would leave most weights alone.
    """
    bnb = _bitsandbytes()
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    _refuse_fused_experts(model, method)
    make: Any = transformers.BitsAndBytesConfig
    config = (
        make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        if method == NF4
        else make(load_in_8bit=True)
    )
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=config)
    if not any(isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) for module in model.modules()):
        raise LoadRefused(f"{method} weights were asked for, but the model has no linear layers to quantize")
    # It warns of every bfloat16 row that it turns into float16, once per layer and token.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def quantized(module: Any, leaf: str, value: torch.Tensor) -> nn.Parameter | None:
    """`value` as the parameter that `module` holds under `leaf`; None where that one is not quantized."""
    if leaf != "weight" or not type(module).__module__.startswith("bitsandbytes."):
        return None
    try:
        return _nf4(module, value) if isinstance(module, _bitsandbytes().nn.Linear4bit) else _int8(value)
    except RuntimeError as error:
        refusal = LoadRefused if isinstance(error, torch.OutOfMemoryError) else KernelsFailed
        raise refusal(f"bitsandbytes cannot quantize on {value.device}: {str(error)[:500]}") from error


def weight_bytes(parameter: nn.Parameter) -> int:
    """Bytes of a parameter with what its quantization keeps beside it."""
    state: Any = getattr(parameter, "quant_state", None)
    scales: Any = getattr(parameter, "SCB", None)
    beside = (state.absmax, state.code) if state is not None else (scales,) if scales is not None else ()
    return parameter.nbytes + sum(int(tensor.nbytes) for tensor in beside)


def _nf4(module: Any, value: torch.Tensor) -> nn.Parameter:
    """In blocks over the flat weight, so a chunk of whole blocks quantizes as it would within the whole."""
    bnb = _bitsandbytes()
    packed = torch.empty(((value.numel() + 1) // 2, 1), dtype=torch.uint8, device=value.device)
    absmax = torch.empty(-(-value.numel() // NF4_BLOCK), dtype=torch.float32, device=value.device)
    flat = value.view(-1)
    for begin in range(0, len(flat), _CHUNK_ELEMENTS):
        part, state = bnb.functional.quantize_4bit(
            flat[begin : begin + _CHUNK_ELEMENTS], blocksize=NF4_BLOCK, quant_type="nf4"
        )
        packed[begin // 2 : begin // 2 + len(part)] = part
        absmax[begin // NF4_BLOCK : begin // NF4_BLOCK + len(state.absmax)] = state.absmax
    state.absmax, state.shape = absmax, value.shape
    module.quant_state = state
    parameter: nn.Parameter = bnb.nn.Params4bit(
        packed,
        quant_state=state,
        blocksize=NF4_BLOCK,
        compress_statistics=False,
        quant_type="nf4",
        module=module,
        bnb_quantized=True,
    )
    return parameter


def _int8(value: torch.Tensor) -> nn.Parameter:
    """A scale per row, from the weight in float16 as bitsandbytes has it."""
    bnb = _bitsandbytes()
    codes = torch.empty(value.shape, dtype=torch.int8, device=value.device)
    scales = torch.empty(value.shape[0], dtype=torch.float32, device=value.device)
    step = max(1, _CHUNK_ELEMENTS // value.shape[1])
    for begin in range(0, value.shape[0], step):
        part = slice(begin, begin + step)
        codes[part], scales[part], _ = bnb.functional.int8_vectorwise_quant(value[part].to(torch.float16))
    parameter: nn.Parameter = bnb.nn.Int8Params(codes, requires_grad=False, CB=codes, SCB=scales)
    return parameter


def _refuse_fused_experts(model: Any, method: str) -> None:
    """Transformers keeps experts as one tensor per layer, which bitsandbytes leaves as it is."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 2 and "conv" not in name:
            raise LoadRefused(
                f"architecture {type(model).__name__!r} cannot be served with {method}: bitsandbytes quantizes linear "
                f"layers alone, and its experts ({name}) are none; load it without quantization"
            )


def _bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise KernelsFailed("bitsandbytes is not installed on this peer")
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelsFailed(f"bitsandbytes does not run on this peer: {str(error)[:200]}") from error
    return bitsandbytes
