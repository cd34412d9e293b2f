"""Writes tests/formats/packed_goldens.npz: random weights packed by other libraries, and their unpacked numbers.

Needs torch, compressed-tensors (0.20.1), gptqmodel (7.7.0), which has AutoAWQ's packing, too, bitsandbytes (0.50.2) and
torchao (0.18.0): `pip install compressed-tensors gptqmodel bitsandbytes torchao`, then
`python tools/make_packed_goldens.py`. A case's keys are CASE.PART, as folders have them, CASE.codes (rows, columns) and
CASE.zeros (rows, groups), as the libraries unpack them, or CASE.meaning, the numbers that the libraries compute.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from gptqmodel.quantization.awq.utils.packing_utils import reverse_awq_order, unpack_awq
from gptqmodel.utils.model_dequant import _correct_gptq_v1_qzeros, unpack_cols, unpack_rows
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

ROWS, COLUMNS, GROUP = 32, 128, 64
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # added by convert_gptq_v1_to_v2_format_module, too
TARGET = Path(__file__).resolve().parents[1] / "tests" / "formats" / "packed_goldens.npz"


def draw(*shape: int) -> torch.Tensor:
    """Random words."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)


def make_cases() -> dict[str, torch.Tensor]:
    """Each case under its prefix: the parts of a folder, and their numbers."""
    groups, found = COLUMNS // GROUP, {}
    for bits in (2, 3, 4, 8):
        for version in (1, 2):
            words, zeros = draw(COLUMNS * bits // 32, ROWS), draw(groups, ROWS * bits // 32)
            more = zeros if version == 2 else _correct_gptq_v1_qzeros(zeros, bits) if bits == 3 else zeros + ONES[bits]
            case = {"qweight": words, "qzeros": zeros, "g_idx": (torch.arange(COLUMNS) // GROUP).int()}
            case |= {"codes": unpack_rows(words, bits).T, "zeros": unpack_cols(more, bits).T}
            found |= {f"gptq{bits}v{version}.{name}": part for name, part in case.items()}
    words, zeros = draw(COLUMNS, ROWS // 8), draw(groups, ROWS // 8)
    codes, less = (part & 15 for part in reverse_awq_order(*unpack_awq(words, zeros, 4), 4))
    found |= {"awq4.qweight": words, "awq4.qzeros": zeros, "awq4.codes": codes.T, "awq4.zeros": less.T}
    for bits in (4, 8):
        half = 1 << (bits - 1)
        codes = torch.randint(-half, half, (ROWS, COLUMNS), dtype=torch.int8)
        zeros = torch.randint(-half, half, (ROWS, groups), dtype=torch.int8)
        case = {"weight_packed": pack_to_int32(codes, bits), "weight_shape": torch.tensor(codes.shape)}
        case |= {"weight_zero_point": pack_to_int32(zeros, bits, packed_dim=0), "codes": codes, "zeros": zeros}
        found |= {f"int{bits}.{name}": part for name, part in case.items()}
    for kind, is_nested in (("nf4", True), ("fp4", False)):
        weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested)
        case = {"weight": packed, "meaning": bitsandbytes.functional.dequantize_4bit(packed, state).float()}
        case |= {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        found |= {f"bnb_{kind}.{name}": part for name, part in case.items()}
    packed, most, _ = bitsandbytes.functional.int8_vectorwise_quant(torch.randn(ROWS, COLUMNS, dtype=torch.float16))
    meaning = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(packed, most)
    found |= {"bnb_int8.weight": packed, "bnb_int8.SCB": most, "bnb_int8.meaning": meaning}
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16))
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)))
    for name, part in flatten_tensor_state_dict(model.state_dict())[0].items():
        found[f"torchao.{name.removeprefix('0.')}"] = part.float() if part.is_floating_point() else part
    found["torchao.meaning"] = model[0].weight.dequantize().float()
    scale, factor = draw(ROWS, COLUMNS // 64).view(torch.uint8) & 127, torch.tensor([321.5])
    packed, scale = draw(ROWS, COLUMNS // 8).view(torch.uint8), torch.where(scale == 127, 1, scale).to(torch.uint8)
    numbers = unpack_fp4_from_uint8(packed, ROWS, COLUMNS).float()
    stated = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", symmetric=True, group_size=16)
    steps = scale.view(torch.float8_e4m3fn).float()
    meaning = dequantize(x_q=numbers, scale=steps, args=stated, global_scale=factor, dtype=torch.float32)
    found |= {"nvfp4.weight_packed": packed, "nvfp4.weight_scale": scale, "nvfp4.weight_global_scale": factor}
    found["nvfp4.meaning"] = meaning
    found["f8_e4m3.values"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    found["f8_e5m2.values"] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
    return found


if __name__ == "__main__":
    torch.manual_seed(1)
    small = {"codes": np.int16, "zeros": np.int16}
    cases = {name: part.numpy() for name, part in make_cases().items()}
    arrays = {name: part.astype(small.get(name.rpartition(".")[2], part.dtype)) for name, part in cases.items()}
    np.savez_compressed(TARGET, **arrays)
