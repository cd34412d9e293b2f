"""Write the goldens of models that hear: `.venv-peers/bin/python tools/make_hearing_goldens.py [CASE ...]`.

Every case is a tiny random model that `transformers` runs in float32 over a text with a picture and a sound, which its
feature extractor has cut into frames. Stored are the configuration with the shapes of the tensors, pixels and frames,
the rows of the sound and the logits (tests/models/hearing_goldens/CASE). Weights and sound come from the seed on both
sides.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor

from make_vision_goldens import GEMMA4, GEMMA4_PREPARES, IMAGE, UNIFIED, mask_generation, show_gemma4, show_unified

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))

from hearing_models import GOLDENS, PLACE, SAMPLES, draw_sound
from vision_models import draw_picture, draw_weights

IDS = {"audio_token_id": PLACE, "boa_token_id": 125, "eoa_token_id": 126}
CONFORMER = {
    "model_type": "gemma4_audio",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [16, 4],
    "output_proj_dims": 24,
    "use_clipped_linears": True,
}
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "conformer": (
        GEMMA4["gemma4e"] | IDS | {"audio_config": CONFORMER},
        Gemma4AudioFeatureExtractor(feature_size=16),
        show_gemma4,
    ),
    "plain": (
        UNIFIED["gemma4unified"] | IDS,
        Gemma4UnifiedAudioFeatureExtractor(feature_size=40, audio_samples_per_token=40),
        show_unified,
    ),
}


def write_case(case: str) -> None:
    """Compute one case."""
    config, extractor, show = CASES[case]
    hf_config = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    hf_config._attn_implementation = "eager"
    model = getattr(transformers, config["architectures"][0])._from_config(hf_config, dtype=torch.float32).eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    weights = {name: torch.from_numpy(value) for name, value in draw_weights(config, shapes).items()}
    model.load_state_dict(weights, strict=False)
    inputs, tiles, words = show(config, [Image.fromarray(draw_picture(37, 70))])
    heard = dict(extractor([draw_sound(SAMPLES[case])], return_tensors="pt", return_attention_mask=True))
    kept = torch.as_tensor(heard["input_features_mask"])[0].bool()
    with torch.no_grad():
        made = model.model.get_audio_features(**heard, return_dict=True)
        rows = made.pooler_output[0][torch.as_tensor(made.attention_mask)[0].bool()]
        text = np.random.RandomState(3).randint(1, 110, 30).tolist()
        sound = [IDS["boa_token_id"], *[PLACE] * len(rows), IDS["eoa_token_id"]]
        tokens = [*text[:9], *words[0], *text[9:14], *sound, *text[14:]]
        ids = torch.tensor([tokens])
        kinds = (ids == IMAGE).int() + 3 * (ids == PLACE).int()
        given = {"mm_token_type_ids": kinds}
        given |= mask_generation(model, ids, given)
        logits = model(input_ids=ids, **inputs, **heard, **given).logits[0]
    stored = {"pixels": tiles[0], "frames": torch.as_tensor(heard["input_features"])[0][kept].numpy()}
    GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(GOLDENS / f"{case}.npz", **stored, rows=rows.numpy(), logits=logits.numpy())
    stated = {"config": config, "preprocessor": GEMMA4_PREPARES, "shapes": shapes, "tokens": tokens}
    (GOLDENS / f"{case}.json").write_text(json.dumps(stated) + "\n")
    print(case, len(tokens), stored["frames"].shape, tuple(rows.shape), float(rows.std()), float(logits.std()))


for chosen in sys.argv[1:] or CASES:
    write_case(chosen)
