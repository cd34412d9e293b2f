"""Write the golden states of encoders: `.venv-peers/bin/python tools/make_encoder_goldens.py [CASE ...]`.

Every case is a tiny random model that `transformers` runs in float32 over one text, or a pair of texts. Stored are its
configuration with the shapes of its tensors, the tokens and their types, and the states after the last layer, or the
logits of a model that ranks (tests/models/encoder_goldens/CASE). Weights come from the seed on both sides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))

from encoder_models import GOLDENS, draw_weights  # noqa: E402 -- needs the path

from goldens.encoders import OWN  # noqa: E402

TOKENS, SEED = 40, 7
BASE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
BERT = BASE | {"model_type": "bert", "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
ROBERTA = BERT | {
    "model_type": "xlm-roberta",
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "max_position_embeddings": 66,
}
MODERN = BASE | {
    "model_type": "modernbert",
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "norm_eps": 1e-5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
NOMIC = BASE | {"model_type": "nomic_bert", "type_vocab_size": 2, "hidden_act": "silu", "layer_norm_eps": 1e-12}
GEMMA = BASE | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "use_bidirectional_attention": True,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
EURO = BASE | {
    "model_type": "eurobert",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0},
}
JINA2 = BERT | {
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "num_attention_heads": 6,
    "hidden_size": 96,
}
JINA3 = ROBERTA | {
    "model_type": "jina_embeddings_v3",
    "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
}
NEO = {key: value for key, value in BASE.items() if key != "max_position_embeddings"} | {
    "model_type": "neobert",
    "max_length": 64,
    "intermediate_size": 144,
    "norm_eps": 1e-5,
    "hidden_act": "SwiGLU",
    "rope": True,
    "rms_norm": True,
    "ngpt": False,
}
NOMIC_MIXTURE = {
    "model_type": "nomic_bert",
    "vocab_size": 160,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 96,
    "n_positions": 64,
    "type_vocab_size": 1,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000,
    "rotary_emb_fraction": 1.0,
    "activation_function": "gelu",
    "num_experts": 8,
    "moe_top_k": 2,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
}
T5 = {
    "model_type": "t5",
    "vocab_size": 160,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "n_positions": 64,
}
RANKS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
SAME = {"LlamaBidirectionalModel": {"model_type": "eurobert", "architectures": ["EuroBertModel"]}}  # its model
CASES: dict[str, dict[str, Any]] = {
    "bert": BERT | {"architectures": ["BertModel"]},
    "bert-ranks": BERT | RANKS | {"architectures": ["BertForSequenceClassification"]},
    "xlm-roberta": ROBERTA | {"architectures": ["XLMRobertaModel"]},
    "xlm-roberta-ranks": ROBERTA | RANKS | {"architectures": ["XLMRobertaForSequenceClassification"]},
    "modernbert": MODERN | {"architectures": ["ModernBertModel"]},
    "modernbert-ranks": MODERN | RANKS | {"architectures": ["ModernBertForSequenceClassification"]},
    "nomic": NOMIC | {"architectures": ["NomicBertModel"]},
    "eurobert": EURO | {"architectures": ["EuroBertModel"]},
    "llama-embed": EURO | {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
    "jina-v2": JINA2 | {"architectures": ["JinaBertModel"]},
    "jina-v3": JINA3 | {"architectures": ["JinaEmbeddingsV3Model"]},
    "neo": NEO | {"architectures": ["NeoBERT"]},
    "nomic-mixture": NOMIC_MIXTURE | {"architectures": ["NomicBertModel"]},
    "t5": T5 | {"architectures": ["T5EncoderModel"]},
    "t5-gated": T5 | {"feed_forward_proj": "gated-gelu", "architectures": ["T5EncoderModel"]},
    "umt5": T5
    | {"model_type": "umt5", "num_layers": 2, "feed_forward_proj": "gated-gelu", "architectures": ["UMT5EncoderModel"]},
    "gemma": GEMMA | {"architectures": ["Gemma3TextModel"]},
}


def make_model(case: str, config: dict[str, Any]) -> torch.nn.Module:
    """The model: that of transformers, or one of `OWN`, whose folders bring their own code."""
    if case in OWN:
        return OWN[case](config).eval().float()
    run = config | SAME.get(config["architectures"][0], {})
    hf_config = transformers.AutoConfig.for_model(**{k: v for k, v in run.items() if k != "architectures"})
    hf_config._attn_implementation = "eager"
    return getattr(transformers, run["architectures"][0])(hf_config).eval().float()


def make_golden(case: str) -> None:
    """Run one case and store it."""
    config = CASES[case]
    model = make_model(case, config)
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if value.dtype.is_floating_point}
    weights = {name: torch.from_numpy(value) for name, value in draw_weights(shapes, SEED).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all("position_ids" in name or "inv_freq" in name for name in missing), missing
    tokens = np.random.RandomState(SEED).randint(4, config["vocab_size"], TOKENS).astype(np.int32)
    has_types = config.get("type_vocab_size", 0) > 1 and case not in OWN
    types = (np.arange(TOKENS) >= TOKENS // 3).astype(np.int32) * int(has_types)
    given = {"input_ids": torch.from_numpy(tokens.astype(np.int64))[None]}
    if "type_vocab_size" in config and case not in OWN:
        given["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
    with torch.no_grad():
        result = model(**given)
    states = (result.logits if hasattr(result, "logits") else result.last_hidden_state[0]).numpy().astype(np.float32)
    folder = GOLDENS / case
    folder.mkdir(parents=True, exist_ok=True)
    described = {"config": config, "seed": SEED, "shapes": shapes}
    (folder / "model.json").write_text(json.dumps(described, indent=1) + "\n")
    np.savez_compressed(folder / "states.npz", tokens=tokens, types=types, states=states)
    print(case, states.shape, float(np.abs(states).max()))


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        make_golden(name)
