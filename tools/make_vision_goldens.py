"""Write the goldens of models that see: `.venv-peers/bin/python tools/make_vision_goldens.py [CASE ...]`.

Every case is a tiny random model that `transformers` runs in float32 over a text with two pictures, which its processor
of Pillow has prepared. Stored are the configuration with the shapes of the tensors, the prepared pixels, the rows that
the tower makes of them and the logits (tests/models/vision_goldens/CASE). Weights come from the seed on both sides.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
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
CASES: dict[str, dict[str, Any]] = {
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
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * 256, "longest_edge": 24 * 256},
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.6],
}
SIZES = [(37, 70), (90, 41)]
RULES = ((32, 4096, 65536), (28, 3136, 50176), (16, 256, 20480))  # the factor of sides, the fewest and the most pixels
PIXEL_SIZES = (
    *((1, 1), (1, 200), (200, 1), (16, 16), (47, 48), (48, 48), (80, 80), (112, 144), (14, 42), (255, 257)),
    *((64, 64), (256, 256), (333, 111), (20, 3000), (1000, 5), (97, 211)),
)


def write_pixels() -> None:
    """Write the sizes that pictures get, and checksums of their pixels then, for several towers."""
    stated = []
    for factor, least, most in RULES:
        settings = {"patch_size": factor // 2, "merge_size": 2, "size": {"shortest_edge": least, "longest_edge": most}}
        processor = Qwen2VLImageProcessorPil(**settings, do_rescale=False, do_normalize=False)
        for seed, (height, width) in enumerate(PIXEL_SIZES):
            picture = Image.fromarray(draw_picture(height, width, seed))
            made = processor(picture, return_tensors="np")
            _, rows, columns = made["image_grid_thw"][0].tolist()
            half = factor // 2
            parts = made["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, half, half)[:, :, :, :, :, 0]
            whole = parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * half, columns * half, 3).astype(np.uint8)
            digest = hashlib.sha256(whole.tobytes()).hexdigest()[:32]
            stated.append([factor, least, most, height, width, *whole.shape[:2], digest])
    (GOLDENS.parent / "vision_pixels.json").write_text(json.dumps(stated) + "\n")


def write_case(case: str) -> None:
    """Compute one case."""
    config = CASES[case] | IDS | {"tie_word_embeddings": False}
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, config["architectures"][0])._from_config(hf_config, dtype=torch.float32).eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    weights = {name: torch.from_numpy(value) for name, value in draw_weights(config, shapes).items()}
    model.load_state_dict(weights)
    settings = {key: PREPROCESSOR[key] for key in PREPROCESSOR if key != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**settings)
    pictures = [draw_picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = processor([Image.fromarray(one) for one in pictures], return_tensors="pt")
    plain = Qwen2VLImageProcessorPil(**settings | {"do_rescale": False, "do_normalize": False})
    grids = inputs["image_grid_thw"].tolist()
    pixels = {}
    for number, (picture, (_, rows, columns)) in enumerate(zip(pictures, grids, strict=True)):
        patches = plain(Image.fromarray(picture), return_tensors="np")["pixel_values"]
        parts = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 8, 8)[:, :, :, :, :, 0]
        whole = parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 8, columns * 8, 3)
        pixels[f"pixels{number}"] = whole.astype(np.uint8)
    counts = [rows * columns // 4 for _, rows, columns in grids]
    text = np.random.RandomState(3).randint(1, 110, 40).tolist()
    tokens = [*text[:9], START, *[IMAGE] * counts[0], END, *text[9:14], START, *[IMAGE] * counts[1], END, *text[14:]]
    ids = torch.tensor([tokens])
    with torch.no_grad():
        seen = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        rows = torch.cat(list(seen.pooler_output))
        deep = [torch.cat(list(part)) for part in getattr(seen, "deepstack_features", None) or []]
        logits = model(
            input_ids=ids,
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            mm_token_type_ids=(ids == IMAGE).int(),
        ).logits[0]
    stored = {"rows": torch.cat([rows, *deep], dim=1).numpy(), "logits": logits.numpy()}
    GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(GOLDENS / f"{case}.npz", **pixels, **stored)
    stated = {"config": config, "preprocessor": PREPROCESSOR, "shapes": shapes, "sizes": SIZES, "tokens": tokens}
    (GOLDENS / f"{case}.json").write_text(json.dumps(stated) + "\n")
    print(case, len(tokens), stored["rows"].shape, float(logits.std()))


if not sys.argv[1:]:
    write_pixels()
for chosen in sys.argv[1:] or CASES:
    write_case(chosen)
