"""Write the goldens of models that see: `.venv-peers/bin/python tools/make_vision_goldens.py [CASE ...]`.

Every case is a tiny random model that `transformers` runs in float32 over a text with two pictures, which its processor
of Pillow has prepared. Stored are the configuration with the shapes of the tensors, the prepared pixels, the rows that
the tower makes of them and the logits (tests/models/vision_goldens/CASE). Weights come from the seed on both sides.
Pixels alone, for many sizes of pictures, are in tests/models/vision_pixels.json.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))

from vision_models import GOLDENS, draw_picture, draw_weights  # noqa: E402 -- needs the path

IMAGE, START, END = 120, 121, 122
TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 40,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}
IDS = {"image_token_id": IMAGE, "video_token_id": 123, "vision_start_token_id": START, "vision_end_token_id": END}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_TEXT = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
}
QWEN: dict[str, dict[str, Any]] = {
    "qwen3vl": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": TEXT
        | {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": TOWER | {"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [1, 2]},
    },
    "qwen35": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": TEXT
        | DELTA
        | {
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": TOWER | {"model_type": "qwen3_5_vision"},
    },
    "qwen25vl": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": QWEN2_TEXT | {"model_type": "qwen2_5_vl_text"},
        "vision_config": {key: value for key, value in TOWER.items() if key != "num_position_embeddings"}
        | {
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "window_size": 32,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "qwen2vl": {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "text_config": QWEN2_TEXT | {"model_type": "qwen2_vl_text"},
        "vision_config": {
            "model_type": "qwen2_vl_vision",
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 48,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 2,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 48,
    "patch_size": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
GEMMA = {
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 9,
        "text_config": TEXT
        | {
            "model_type": "gemma3_text",
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
        "vision_config": SIGLIP,
    }
}
GEMMA4 = {
    name: {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "image_token_id": IMAGE,
        "boi_token_id": START,
        "eoi_token_id": END,
        "video_token_id": 123,
        "audio_token_id": 124,
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in TEXT.items() if key != "hidden_act"}
        | {
            "model_type": "gemma4_text",
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "global_head_dim": 32,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 20000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        }
        | text,
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "position_embedding_size": 3360,
        }
        | tower,
    }
    for name, text, tower in (
        ("gemma4", {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}, {"standardize": True}),
        (
            "gemma4e",
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 131, "num_kv_shared_layers": 2},
            {"use_clipped_linears": True},
        ),
    )
}
UNIFIED = {
    name: GEMMA4["gemma4"]
    | {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": {
            key: value for key, value in GEMMA4["gemma4"]["text_config"].items() if key != "hidden_size_per_layer_input"
        }
        | {"model_type": "gemma4_unified_text"},
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 32,
            "mm_posemb_size": 1120,
            "output_proj_dims": 32,
        },
        "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 40},
    }
    for name in ("gemma4unified",)
}
SMOL = {
    "smolvlm": {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": TEXT | {"model_type": "llama", "architectures": ["VLlama3ForCausalLM"]},
        "vision_config": SIGLIP | {"model_type": "smolvlm_vision", "image_size": 32, "vision_use_head": None},
    }
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 64,
    "patch_size": 8,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
MISTRAL_TEXT = TEXT | {"model_type": "mistral", "sliding_window": None}
MISTRAL = {
    "mistral3": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": False,
        "tie_word_embeddings": False,
        "text_config": MISTRAL_TEXT,
        "vision_config": PIXTRAL,
    },
    "pixtral": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "text_config": MISTRAL_TEXT,
        "vision_config": PIXTRAL | {"patch_size": 16, "hidden_act": "gelu"},
    },
}
LFM = {
    "lfm2vl": {
        "model_type": "lfm2_vl",
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": IMAGE,
        "downsample_factor": 2,
        "projector_hidden_size": 56,
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in TEXT.items() if key not in ("hidden_act", "rms_norm_eps")}
        | {
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
        "vision_config": {key: value for key, value in SIGLIP.items() if key != "image_size"}
        | {"model_type": "siglip2_vision_model", "num_patches": 25},
    }
}
INTERNVL = {
    "internvl": {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "attention_bias": True,
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
    }
}
GLM = {
    name: {
        "model_type": kind,
        "architectures": [architecture],
        "image_token_id": IMAGE,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_token_id": 123,
        "video_start_token_id": 124,
        "video_end_token_id": 125,
        "tie_word_embeddings": False,
        "text_config": QWEN2_TEXT
        | {
            "model_type": f"{kind}_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": sections,
                "partial_rotary_factor": sum(sections) / 8,
            },
        },
        "vision_config": {key: value for key, value in TOWER.items() if key != "num_position_embeddings"}
        | {
            "model_type": f"{kind}_vision",
            "hidden_act": "silu",
            "image_size": 40,
            "attention_bias": kind == "glm_ocr",
            "rms_norm_eps": 1e-5,
        },
    }
    for name, kind, architecture, sections in (
        ("glm4v", "glm4v", "Glm4vForConditionalGeneration", [2, 1, 1]),
        ("glmocr", "glm_ocr", "GlmOcrForConditionalGeneration", [4, 2, 2]),
    )
}
MEAN, DEVIATION = [0.5, 0.4, 0.5], [0.5, 0.5, 0.6]
QWEN_PREPARES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 256, "longest_edge": 24 * 256},
    "image_mean": MEAN,
    "image_std": DEVIATION,
}
GEMMA_PREPARES = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 48, "width": 48},
    "image_mean": MEAN,
    "image_std": DEVIATION,
}
GEMMA4_PREPARES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 3,
}
SMOL_PREPARES = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 32},
    "image_mean": MEAN,
    "image_std": DEVIATION,
}
MISTRAL_PREPARES = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": 16, "width": 16},  # of merged patches
    "size": {"longest_edge": 64},
    "image_mean": MEAN,
    "image_std": DEVIATION,
}
SIZES = [(37, 70), (90, 41)]
PIXEL_SIZES = (
    *((1, 1), (1, 200), (200, 1), (16, 16), (47, 48), (48, 48), (80, 80), (112, 144), (14, 42), (255, 257)),
    *((64, 64), (256, 256), (333, 111), (20, 3000), (1000, 5), (97, 211), (2, 400), (3000, 15), (72, 40), (40, 24)),
    *((88, 88), (100, 100), (56, 112), (500, 499), (641, 359), (359, 641), (7, 9), (1, 3), (130, 65), (384, 512)),
)
LONG_SIZES = (20_000, 1), (1, 20_000)  # which Qwen's processor refuses and Pixtral's fails with
# The processor of LFM2-VL fails if a whole picture beside its tiles is longer than they are.
SPREAD_SIZES = *(size for size in PIXEL_SIZES if max(size) < 3000), (300, 40), (120, 500)
Pixels = list[np.ndarray]
Answer = tuple[dict[str, Any], Pixels, list[list[int]]]  # for the model; tiles; the words of each picture


def settle(prepares: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Keywords of a processor."""
    return {key: value for key, value in prepares.items() if key != "image_processor_type"} | changes


RAW = {"do_rescale": False, "do_normalize": False}


def list_tiles(values: Any) -> Pixels:
    """Turn pixels (tiles, 3, height, width) that were not normalised into tiles (height, width, 3)."""
    return [np.ascontiguousarray(np.asarray(tile).transpose(1, 2, 0)).astype(np.uint8) for tile in values]


def join_qwen(made: Any, half: int) -> Pixels:
    """Join the patches of Qwen's processor to pictures."""
    pictures, at = [], 0
    for _, rows, columns in made["image_grid_thw"].tolist():
        patches = made["pixel_values"][at : at + rows * columns]
        at += rows * columns
        parts = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, half, half)[:, :, :, :, :, 0]
        pictures.append(parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * half, columns * half, 3).astype(np.uint8))
    return pictures


def show_qwen(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a Qwen sees them."""
    inputs = Qwen2VLImageProcessorPil(**settle(QWEN_PREPARES))(pictures, return_tensors="pt")
    made = Qwen2VLImageProcessorPil(**settle(QWEN_PREPARES, **RAW))(pictures, return_tensors="np")
    counts = [rows * columns // 4 for _, rows, columns in inputs["image_grid_thw"].tolist()]
    return dict(inputs), join_qwen(made, 8), [[START, *[IMAGE] * count, END] for count in counts]


def show_gemma(config: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a Gemma 3 sees them."""
    inputs = Gemma3ImageProcessorPil(**settle(GEMMA_PREPARES))(pictures, return_tensors="pt")
    made = Gemma3ImageProcessorPil(**settle(GEMMA_PREPARES, **RAW))(pictures, return_tensors="np")
    words = [START, *[IMAGE] * config["mm_tokens_per_image"], END]
    return {"pixel_values": inputs["pixel_values"]}, list_tiles(made["pixel_values"]), [words] * len(pictures)


def join_gemma4(made: Any, patch: int) -> Pixels:
    """Join the patches of Gemma 4's processor to pictures."""
    pictures = []
    for patches, places in zip(made["pixel_values"], made["image_position_ids"], strict=True):
        columns, rows = (int(end) + 1 for end in places.max(axis=0))
        parts = patches[: rows * columns].reshape(rows, columns, patch, patch, 3).transpose(0, 2, 1, 3, 4)
        pictures.append(parts.reshape(rows * patch, columns * patch, 3).astype(np.uint8))
    return pictures


def show_gemma4(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a Gemma 4 sees them."""
    inputs = Gemma4ImageProcessorPil(**settle(GEMMA4_PREPARES))(pictures, return_tensors="pt")
    made = Gemma4ImageProcessorPil(**settle(GEMMA4_PREPARES, **RAW))(pictures, return_tensors="np")
    words = [[START, *[IMAGE] * int(count), END] for count in inputs["num_soft_tokens_per_image"]]
    return {name: inputs[name] for name in ("pixel_values", "image_position_ids")}, join_gemma4(made, 4), words


def show_unified(config: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a Gemma 4 12B sees them: patches of all their pixels, padded to the most."""
    _, tiles, words = show_gemma4(config, pictures)
    grids = [(tile.shape[0] // 12, tile.shape[1] // 12) for tile in tiles]
    most = max(rows * columns for rows, columns in grids)
    values, places = np.zeros((len(tiles), most, 432), np.float32), np.full((len(tiles), most, 2), -1)
    for at, (tile, (rows, columns)) in enumerate(zip(tiles, grids, strict=True)):
        cut = (tile / np.float32(255)).reshape(rows, 12, columns, 12, 3).transpose(0, 2, 1, 3, 4)
        values[at, : rows * columns] = cut.reshape(rows * columns, 432)
        places[at, : rows * columns] = [[column, row] for row in range(rows) for column in range(columns)]
    given = {"pixel_values": torch.from_numpy(values), "image_position_ids": torch.from_numpy(places)}
    return given, tiles, words


def show_smol(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a SmolVLM sees them."""
    settled = settle(SMOL_PREPARES, return_row_col_info=True)
    inputs = Idefics3ImageProcessorPil(**settled)([pictures], return_tensors="pt")
    made = Idefics3ImageProcessorPil(**settled, **RAW)([pictures], return_tensors="np")
    words = []
    for rows, columns in zip(inputs["rows"][0], inputs["cols"][0], strict=True):
        tiles = [token for at in range(rows * columns) for token in (START, 100 + at, *[IMAGE] * 4)]
        words.append([*tiles, START, END, *[IMAGE] * 4, START])
    given = {"pixel_values": inputs["pixel_values"], "pixel_attention_mask": inputs["pixel_attention_mask"]}
    return given, list_tiles(made["pixel_values"][0]), words


def show_mistral(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a Mistral sees them: a break behind each line of rows but the last."""
    inputs = PixtralImageProcessorPil(**settle(MISTRAL_PREPARES))(pictures, return_tensors="pt")
    made = [PixtralImageProcessorPil(**settle(MISTRAL_PREPARES, **RAW))(one, return_tensors="np") for one in pictures]
    words = []
    for height, width in inputs["image_sizes"].tolist():
        lines = [token for _ in range(height // 16) for token in (*[IMAGE] * (width // 16), 123)]
        words.append([*lines[:-1], END])
    tiles = [tile for one in made for tile in list_tiles(one["pixel_values"])]
    return {"pixel_values": inputs["pixel_values"], "image_sizes": inputs["image_sizes"]}, tiles, words


INTERN_PREPARES = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": 32, "width": 32},
    "max_patches": 4,
    "image_mean": MEAN,
    "image_std": DEVIATION,
}


def show_internvl(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as an InternVL sees them: in tiles, then as a whole."""
    settled = settle(INTERN_PREPARES, crop_to_patches=True)
    inputs = GotOcr2ImageProcessorPil(**settled)(pictures, return_tensors="pt")
    made = GotOcr2ImageProcessorPil(**settled, **RAW)(pictures, return_tensors="np")
    words = [[START, *[IMAGE] * (4 * count), END] for count in inputs["num_patches"].tolist()]
    return {"pixel_values": inputs["pixel_values"]}, list_tiles(made["pixel_values"]), words


GLM_PREPARES = QWEN_PREPARES | {
    "image_processor_type": "Glm4vImageProcessor",
    "size": {"shortest_edge": 8 * 256, "longest_edge": 48 * 256},  # of two frames
}


def show_glm(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """Pictures as a GLM-4.1V sees them."""
    inputs = Glm4vImageProcessorPil(**settle(GLM_PREPARES))(pictures, return_tensors="pt")
    made = Glm4vImageProcessorPil(**settle(GLM_PREPARES, **RAW))(pictures, return_tensors="np")
    counts = [rows * columns // 4 for _, rows, columns in inputs["image_grid_thw"].tolist()]
    return dict(inputs), join_qwen(made, 8), [[START, *[IMAGE] * count, END] for count in counts]


LFM_PREPARES = {
    "image_processor_type": "Lfm2VlImageProcessor",
    "min_image_tokens": 4,
    "max_image_tokens": 6,
    "max_tiles": 4,
    "tile_size": 32,
    "image_mean": MEAN,
    "image_std": DEVIATION,
}


def show_lfm(_: dict[str, Any], pictures: list[Any]) -> Answer:
    """One picture as a LFM2-VL sees it whole, the other in two tiles and whole; its processor wants torchvision."""
    sizes = [[(32, 48)], [(32, 32), (32, 32), (48, 32)]]
    shown = [
        (one.resize(size[::-1]), size) for one, all_sizes in zip(pictures, sizes, strict=True) for size in all_sizes
    ]
    tiles = [np.asarray(one) for one, _ in shown]
    values, mask = np.zeros((len(tiles), 24, 192), np.float32), np.zeros((len(tiles), 24), np.int64)
    for at, tile in enumerate(tiles):
        shades = (tile.astype(np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
        rows, columns = tile.shape[0] // 8, tile.shape[1] // 8
        cut = shades.reshape(rows, 8, columns, 8, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, 192)
        values[at, : len(cut)], mask[at, : len(cut)] = cut, 1
    shapes = torch.tensor([[height // 8, width // 8] for _, (height, width) in shown])
    inputs = {"pixel_values": torch.from_numpy(values), "spatial_shapes": shapes}
    words = [[START, *[IMAGE] * 6, END], [START, 101, *[IMAGE] * 4, 102, *[IMAGE] * 4, 103, *[IMAGE] * 6, END]]
    return inputs | {"pixel_attention_mask": torch.from_numpy(mask)}, tiles, words


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    **{
        name: (config | IDS | {"tie_word_embeddings": False}, QWEN_PREPARES, show_qwen, "mm_token_type_ids")
        for name, config in QWEN.items()
    },
    **{name: (config, GEMMA_PREPARES, show_gemma, "token_type_ids") for name, config in GEMMA.items()},
    **{name: (config, GEMMA4_PREPARES, show_gemma4, "mm_token_type_ids") for name, config in GEMMA4.items()},
    **{name: (config, GEMMA4_PREPARES, show_unified, "mm_token_type_ids") for name, config in UNIFIED.items()},
    **{name: (config, SMOL_PREPARES, show_smol, "") for name, config in SMOL.items()},
    **{name: (config, INTERN_PREPARES, show_internvl, "") for name, config in INTERNVL.items()},
    **{name: (config, GLM_PREPARES, show_glm, "mm_token_type_ids") for name, config in GLM.items()},
    **{name: (config, LFM_PREPARES, show_lfm, "") for name, config in LFM.items()},
    **{name: (config, MISTRAL_PREPARES, show_mistral, "") for name, config in MISTRAL.items()},
}


def list_pixel_rules() -> list[tuple[dict[str, Any], Any]]:
    """Rules in the form of `mlxr.pictures.worker`, and functions that make a picture's tiles with transformers."""
    rules: list[tuple[dict[str, Any], Any]] = []
    for factor, least, most in ((32, 4096, 65536), (28, 3136, 50176), (16, 256, 20480)):
        stated = {"patch_size": factor // 2, "merge_size": 2, "size": {"shortest_edge": least, "longest_edge": most}}
        qwen = Qwen2VLImageProcessorPil(**stated, **RAW)
        rules.append(
            (
                {"kind": "near", "factor": factor, "least": least, "most": most},
                lambda one, made=qwen, half=factor // 2: ((1, 1), join_qwen(made(one, return_tensors="np"), half)),
            )
        )
    stated = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 2 * 12544, "longest_edge": 2 * 50176}}
    glm = Glm4vImageProcessorPil(**stated, **RAW)
    rules.append(
        (
            {"kind": "near", "factor": 28, "least": 12544, "most": 50176, "grows": 1},
            lambda one: ((1, 1), join_qwen(glm(one, return_tensors="np"), 14)),
        )
    )
    gemma = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, **RAW)
    rules.append(
        (
            {"kind": "square", "side": 56, "resample": 2},
            lambda one: ((1, 1), list_tiles(gemma(one, return_tensors="np")["pixel_values"])),
        )
    )
    gemma4 = Gemma4ImageProcessorPil(max_soft_tokens=70, **RAW)
    rules.append(
        (
            {"kind": "budget", "factor": 48, "most": 70},
            lambda one: ((1, 1), join_gemma4(gemma4(one, return_tensors="np"), 16)),
        )
    )
    intern = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=6, **RAW)

    def tile(one: Any) -> tuple[tuple[int, int], Pixels]:
        grid = get_optimal_tiled_canvas((one.height, one.width), (32, 32), 1, 6)
        return grid[::-1], list_tiles(intern(one, return_tensors="np")["pixel_values"])

    rules.append(({"kind": "grid", "tile": 32, "most_tiles": 6}, tile))
    smol = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 32}, return_row_col_info=True, **RAW
    )

    def cut(one: Any) -> tuple[tuple[int, int], Pixels]:
        made = smol([[one]], return_tensors="np")
        grid = int(made["rows"][0][0]), int(made["cols"][0][0])
        return (max(1, grid[0]), max(1, grid[1])), list_tiles(made["pixel_values"][0])

    rules.append(({"kind": "tiles", "tile": 32, "longest": 128, "most": 99}, cut))
    if importlib.util.find_spec("torchvision") is not None:
        rules.append(make_spread_rule())
    pixtral = PixtralImageProcessorPil(size={"longest_edge": 420}, patch_size={"height": 28, "width": 28}, **RAW)
    rules.append(
        (
            {"kind": "within", "factor": 28, "longest": 420, "most": 999},
            lambda one: ((1, 1), list_tiles(pixtral(one, return_tensors="np")["pixel_values"])),
        )
    )
    return rules


def make_spread_rule() -> tuple[dict[str, Any], Any]:
    """The rule of LFM2-VL, whose processor uses only torchvision: shades may differ by one, and Pillow's are stored."""
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    from mlxr.pictures import worker

    bounds = {"min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 10}
    processor = Lfm2VlImageProcessor(encoder_patch_size=8, tile_size=64, return_row_col_info=True, **bounds, **RAW)
    rule = {"kind": "spread", "factor": 16, "least": 1024, "most": 4096, "tile": 64, "most_tiles": 10}

    def spread(one: Any) -> tuple[tuple[int, int], Pixels]:
        made = processor(one, return_tensors="np")
        one.save(file := io.BytesIO(), "PNG")
        own = [np.asarray(tile) for tile in worker.prepare(file.getvalue(), rule)[0]]
        for patches, (rows, columns), tile in zip(made["pixel_values"], made["spatial_shapes"], own, strict=True):
            parts = patches[: rows * columns].reshape(rows, columns, 8, 8, 3).transpose(0, 2, 1, 3, 4)
            assert np.abs(parts.reshape(rows * 8, columns * 8, 3).astype(int) - tile).max() <= 1, one.size
        return (int(made["image_rows"][0]), int(made["image_cols"][0])), own

    return rule, spread


def write_pixels() -> None:
    """Write the results of each rule for pictures of many sizes: the grid of tiles, their sizes and a checksum."""
    stated = []
    for rule, prepare in list_pixel_rules():
        rows = []
        sizes = PIXEL_SIZES if rule["kind"] in ("near", "within") else PIXEL_SIZES + LONG_SIZES
        for seed, (height, width) in enumerate(SPREAD_SIZES if rule["kind"] == "spread" else sizes):
            grid, tiles = prepare(Image.fromarray(draw_picture(height, width, seed)))
            digest = hashlib.sha256(b"".join(tile.tobytes() for tile in tiles)).hexdigest()[:32]
            rows.append([height, width, list(grid), [list(tile.shape[:2]) for tile in tiles], digest])
        stated.append({"rule": rule, "rows": rows})
    (GOLDENS.parent / "vision_pixels.json").write_text(json.dumps(stated) + "\n")


def list_rows(model: Any, inputs: dict[str, Any]) -> Any:
    """Rows of all pictures, (rows, columns), with those for later layers beside them."""
    seen = model.model.get_image_features(**inputs, return_dict=True)
    made = seen.pooler_output
    rows = made.reshape(-1, made.shape[-1]) if isinstance(made, torch.Tensor) else torch.cat(list(made))
    deep = [torch.cat(list(part)) for part in getattr(seen, "deepstack_features", None) or []]
    return torch.cat([rows, *deep], dim=1)


def mask_generation(model: Any, ids: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The masks with which a Gemma 4 12B answers; without them it would see pictures both ways in all layers."""
    if model.config.model_type != "gemma4_unified":
        return {}
    streams = torch.zeros(*ids.shape, model.config.get_text_config().hidden_size)
    masks = model.create_masks_for_generate(
        model.config, streams, None, None, torch.arange(ids.shape[1])[None], is_first_iteration=True, **given
    )
    return {"attention_mask": masks}


def write_case(case: str) -> None:
    """Compute one case."""
    config, prepares, show, types = CASES[case]
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, config["architectures"][0])._from_config(hf_config, dtype=torch.float32).eval()
    is_tied = config.get("tie_word_embeddings", True)
    states = {name: value for name, value in model.state_dict().items() if not (is_tied and name == "lm_head.weight")}
    shapes = {name: list(value.shape) for name, value in states.items()}
    weights = {name: torch.from_numpy(value) for name, value in draw_weights(config, shapes).items()}
    model.load_state_dict(weights, strict=not is_tied)
    inputs, tiles, words = show(config, [Image.fromarray(draw_picture(*size, seed)) for seed, size in enumerate(SIZES)])
    text = np.random.RandomState(3).randint(1, 110, 40).tolist()
    tokens = [*text[:9], *words[0], *text[9:14], *words[1], *text[14:]]
    ids = torch.tensor([tokens])
    with torch.no_grad():
        rows = list_rows(model, inputs)
        given = {types: (ids == IMAGE).int()} if types else {}
        given |= mask_generation(model, ids, given)
        logits = model(input_ids=ids, **inputs, **given).logits[0]
    stored = {"rows": rows.numpy(), "logits": logits.numpy()}
    GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(GOLDENS / f"{case}.npz", **{f"pixels{at}": tile for at, tile in enumerate(tiles)}, **stored)
    stated = {"config": config, "preprocessor": prepares, "shapes": shapes, "sizes": SIZES, "tokens": tokens}
    (GOLDENS / f"{case}.json").write_text(json.dumps(stated) + "\n")
    print(case, len(tokens), stored["rows"].shape, float(logits.std()))


if __name__ == "__main__":
    if not sys.argv[1:]:
        write_pixels()
    for chosen in sys.argv[1:] or CASES:
        write_case(chosen)
