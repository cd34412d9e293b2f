"""Random models from a seed: the same weights for the tests and for the script that writes the golden logits.

Takes a `config.json` as a dictionary, gives tensors under their Hugging Face names. RandomState's stream is frozen by
NumPy's compatibility promise, so the weights need not be stored.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxr.models import families
from mlxr.models.components.layer import ALTUP_PRODUCTS
from mlxr.models.families import read_folder, read_model
from mlxr.models.folders.tensors import LAYER_NAMES, MODEL_NAMES, WHOLE_NAMES
from mlxr.models.weights import expected_tensors

Weights = dict[str, NDArray[np.float32]]
Config = Mapping[str, Any]

# Names of modules in folders that differ from the usual ones, by `model_type`.
_MODULES = {
    **{kind: {"ffn_up": "mlp.gate_up_proj"} for kind in ("glm", "glm4", "phi3")},
    **{kind: {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"} for kind in ("gpt2", "gpt_bigcode", "starcoder2")},
    **{kind: {"output_norm": "model.final_layernorm"} for kind in ("phi", "jamba")},
    "gpt_neox": {"output": "lm_head"},
}
_LAYERS = {
    "gpt_neox": "gpt_neox.layers",
    **dict.fromkeys(("mpt", "dbrx"), "transformer.blocks"),
    **dict.fromkeys(("mamba", "falcon_mamba"), "backbone.layers"),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "bloom", "falcon"), "transformer.h"),
}
_IN_MIXTURES = re.compile(r"(ffn_gate_inp|ffn_\w+_(sh)?exps?|exp_probs_b)\b")  # whose names `list_mixture` knows


def make_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a model folder with this configuration has.

    Most are those of the model that the configuration states, by the names of folders. If they were wrong, transformers
    would refuse the folder when it computes the golden logits.
    """
    kind, table = config["model_type"], (config["vocab_size"], config.get("hidden_size"))
    for start, list_others in _OTHERS.items():
        if kind.startswith(start):
            embeddings = {} if kind in ("nemotron_h", "mamba2") else {"model.embed_tokens.weight": table}
            return embeddings | list_others(config)
    stated = read_folder(config)
    modules: dict[str, str] = dict(_MODULES.get(kind, {}))
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        modules["attn_norm"] = "input_layernorm"
    for folder_name, name in (*stated.layout.names.items(), *LAYER_NAMES.items()):
        modules.setdefault(name, folder_name)
    outside = {name: folder_name for folder_name, name in reversed(MODEL_NAMES.items())}
    outside |= {
        name: folder_name for folder_name, name in stated.layout.names.items() if name.endswith((".weight", ".bias"))
    }
    layers = _LAYERS.get(kind, "model.layers")
    wholes = {name: folder_name for folder_name, name in reversed(WHOLE_NAMES.items())}
    ends = ".weight", ".bias"
    for folder_name, name in stated.layout.names.items():
        if name in wholes or (name.endswith(ends) and not folder_name.endswith(ends)):
            wholes[name] = folder_name
    shapes: dict[str, tuple[int, ...]] = {}
    for full_name, shape in expected_tensors(read_model(stated)).items():
        if stated.layout.exchanges and full_name.startswith("blk.") and len(shape) == 2:
            shape = shape[::-1]
        if full_name in ALTUP_PRODUCTS:  # of which folders have the matrices one by one
            parts = {f"{full_name.removesuffix('weight')}{part}.weight": shape[1:] for part in range(shape[0])}
            shapes |= {outside[part]: own_shape for part, own_shape in parts.items()}
            continue
        if full_name in outside:
            name, _, end = full_name.rpartition(".")
            shapes[f"{modules[name]}.{end}" if name in modules else outside[full_name]] = shape
            continue
        _, index, part = full_name.split(".", 2)
        layer, (name, _, end) = f"{layers}.{index}.", part.rpartition(".")
        if name in ("attn_q", "attn_k", "attn_v") and "attn_qkv" in stated.layout.names.values():
            axis = 1 if stated.layout.exchanges and end == "weight" else 0
            joined = list(shapes.get(f"{layer}{modules['attn_qkv']}.{end}", shape))
            joined[axis] += shape[axis] if name != "attn_q" else 0
            shapes[f"{layer}{modules['attn_qkv']}.{end}"] = tuple(joined)
            continue
        if _IN_MIXTURES.match(part):
            shapes |= {layer + own: own_shape for own, own_shape in list_mixture(config).items()}
        elif kind == "stablelm" and name.endswith(("q_norm", "k_norm")):
            for head in range(shape[0]):
                shapes[f"{layer}self_attn.{name[5]}_layernorm.norms.{head}.{end}"] = shape[1:]
        elif name == "attn_k_b":  # folders have it and the next one together
            shapes[f"{layer}self_attn.kv_b_proj.weight"] = (shape[0] * (shape[2] + config["v_head_dim"]), shape[1])
        elif name != "attn_v_b":
            shape = (1, 1, *shape) if part == "ssm_a" and kind == "kimi_linear" else shape
            shape = (shape[0], 1, shape[1]) if part == "ssm_conv1d.weight" else shape
            is_whole = part in wholes and name not in stated.layout.names.values()
            shapes[layer + (wholes[part] if is_whole else f"{modules[name]}.{end}")] = shape
        if name == "attn_q_b" and "index_topk" in config:
            heads, size = config["index_n_heads"], config["index_head_dim"]
            own = {"wq_b.weight": (heads * size, config["q_lora_rank"]), "wk.weight": (size, config["hidden_size"])}
            own |= {"weights_proj.weight": (heads, config["hidden_size"])}
            own |= {"k_norm.weight": (size,), "k_norm.bias": (size,)}
            if "index_kpool" in config:
                own |= {"index_kpool_compress_ape": (config["index_kpool"], size)}
                own |= {"index_kpool_compress_gate": (size, config["hidden_size"])}
            own = own if config.get("indexer_types", ["full"] * (int(index) + 1))[int(index)] == "full" else {}
            shapes |= {f"{layer}self_attn.indexer.{module}": own_shape for module, own_shape in own.items()}
        if config.get("hidden_act") == "xielu":
            numbers: dict[str, tuple[int, ...]] = {"alpha_n": (1,), "alpha_p": (1,), "beta": (), "eps": ()}
            shapes |= {f"{layer}mlp.act_fn.{own}": own_shape for own, own_shape in numbers.items()}
    return shapes


# GGUF's other names, by golden cases with the same layers.
RELATIVES = {
    "baichuan": "llama-mha",
    "bailingmoe": "deepseek",
    "deci": "llama-llama3",
    "exaone": "llama-llama3",
    "internlm2": "llama-gqa-64",
    "minicpm": "granite",
    "orion": "stablelm",
    "pangu-embedded": "llama-bias-gelu",
    "qwen": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3vlmoe": "qwen3moe",
    "xverse": "llama-128",
}


def give_name(monkeypatch: Any, model_type: str, name: str) -> None:
    """Convert folders of this `model_type` to files of the architecture `name`."""

    def state(c: Any, of_folder: Any) -> None:
        of_folder(c)
        if name == "qwen":  # whose files state the features of gate and up together
            c.out.put("feed_forward_length", 2 * c.out.integer("feed_forward_length"))
        if name in (
            "qwen2vl",
            "qwen3vlmoe",
        ):  # to texts, whose positions are one number, all divisions among the axes are alike
            pairs = c.out.integer("attention.key_length") // 2
            c.out.put("rope.dimension_sections", [pairs - pairs // 3 * 2, pairs // 3, pairs // 3, 0])

    named = families.find_family(name)
    given = tuple(
        (named, replace(one, state=partial(state, of_folder=one.state))) if one.model_type == model_type else (own, one)
        for own, one in families.FOLDERS
    )
    monkeypatch.setattr(families, "FOLDERS", given)


def count_experts(config: Config) -> int:
    """Return how many experts a layer with a mixture has; 0 if none has one."""
    config = {**config, **config.get("ffn_config", {})}
    return next(
        (
            config[key]
            for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            if key in config
        ),
        0,
    )


def _list_qwen35(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Qwen3.5 or Qwen3-Next but the table of embeddings."""
    hidden, ffn, head_dim = config["hidden_size"], config.get("intermediate_size", 0), config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    heads, key_dim = config["linear_num_value_heads"], config["linear_key_head_dim"]
    values, all_keys = heads * config["linear_value_head_dim"], config["linear_num_key_heads"] * key_dim
    channels = 2 * all_keys + values
    inputs = {"qkv": channels, "z": values, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":
        inputs = {"qkvz": channels + values, "ba": 2 * heads}
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}."
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if count_experts(config):
            parts |= list_mixture(config)
        else:
            parts |= {
                "mlp.gate_proj.weight": (ffn, hidden),
                "mlp.up_proj.weight": (ffn, hidden),
                "mlp.down_proj.weight": (hidden, ffn),
            }
        if kind == "full_attention":
            parts |= {
                "self_attn.q_proj.weight": (2 * queries, hidden),
                "self_attn.k_proj.weight": (keys, hidden),
                "self_attn.v_proj.weight": (keys, hidden),
                "self_attn.o_proj.weight": (hidden, queries),
                "self_attn.q_norm.weight": (head_dim,),
                "self_attn.k_norm.weight": (head_dim,),
            }
        else:
            parts |= {
                **{f"linear_attn.in_proj_{name}.weight": (rows, hidden) for name, rows in inputs.items()},
                "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
                "linear_attn.dt_bias": (heads,),
                "linear_attn.A_log": (heads,),
                "linear_attn.norm.weight": (config["linear_value_head_dim"],),
                "linear_attn.out_proj.weight": (hidden, values),
            }
        shapes |= {layer + name: shape for name, shape in parts.items()}
    return shapes


def _list_qwen4(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Qwen3.8-Flash-Next but the table of embeddings: those of a Qwen3.5 without its norms of the
    stream, and those of its residual streams.
    """
    hidden, wide, rank = config["hidden_size"], config["hc_count"] * config["hidden_size"], config["hc_lowrank"]
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
    shapes = {name: shape for name, shape in _list_qwen35(config).items() if not name.endswith(norms)}
    mixed = {"hc_norm": (wide,), "input_mix_weight_down": (rank, wide), "input_mix_weight_up": (wide, rank)}
    shapes |= {f"model.hyper_connection_mixer.{name}.weight": shape for name, shape in mixed.items()}
    mixed |= {"block_inject_weight": (config["hc_count"], wide)}
    indexer, size = config["indexer_n_heads"] + 1, config["indexer_head_dim"]
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}."
        for module in ("attn_hyper_connection", "mlp_hyper_connection"):
            shapes |= {f"{layer}{module}.{name}.weight": shape for name, shape in mixed.items()}
        if kind == "full_attention":
            own = {"index_qk_proj": (indexer * size, hidden), "q_layernorm": (size,), "k_layernorm": (size,)}
            shapes |= {f"{layer}self_attn.indexer.{name}.weight": shape for name, shape in own.items()}
    layer, width = f"model.layers.{config['ple_layer_ids'][0] - 1}.ple.", config["ple_embed_dim"]
    shapes |= {f"{layer}key_proj.weight": (wide, width), f"{layer}value_proj.weight": (hidden, width)}
    shapes |= {f"{layer}norm_{name}.weight": (wide,) for name in ("key", "query", "conv")}
    shapes[f"{layer}conv1d.weight"] = (wide, 1, config["ple_conv_kernel_size"])
    stated = read_folder(config).values
    parts, rows = config["split_ngram_parts"], stated["mlxr.ngram_rows"]
    for part in range(parts):
        name = f"{layer}ple_embedding.ngram_embedding.shard_{part}.weight"
        shapes[name] = (int(str(rows)) // parts, int(str(stated["qwen4exp.embedding_length_per_layer_input"])))
    return shapes


def _list_lfm2(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of an LFM2 but the table of embeddings, to which its output is tied."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, ffn = hidden // heads, config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        ffn = -(-int(config["block_ffn_dim_multiplier"] * int(2 * ffn / 3)) // multiple) * multiple
    shapes: dict[str, tuple[int, ...]] = {"model.embedding_norm.weight": (hidden,)}
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}."
        parts: dict[str, tuple[int, ...]] = {
            "operator_norm": (hidden,),
            "ffn_norm": (hidden,),
        }
        if has_experts(config, index):
            shapes[f"{layer}feed_forward.expert_bias"] = (count_experts(config),)
            shapes |= {f"{layer}{name}": shape for name, shape in list_mixture(config).items()}
        else:
            parts |= dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), (ffn, hidden))
            parts["feed_forward.w2"] = (hidden, ffn)
        if kind == "conv":
            parts["conv.in_proj"], parts["conv.out_proj"] = (3 * hidden, hidden), (hidden, hidden)
            parts["conv.conv"] = (hidden, 1, config["conv_L_cache"])
        else:
            parts["self_attn.q_proj"], parts["self_attn.out_proj"] = (hidden, hidden), (hidden, hidden)
            parts["self_attn.k_proj"] = parts["self_attn.v_proj"] = (kv_heads * head_dim, hidden)
            parts["self_attn.q_layernorm"] = parts["self_attn.k_layernorm"] = (head_dim,)
        shapes |= {f"{layer}{name}.weight": shape for name, shape in parts.items()}
    return shapes


def _list_granite_hybrid(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Granite 4 but the table of embeddings, to which its output is tied."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    columns, groups = config["mamba_expand"] * hidden, config["mamba_n_groups"]
    states, channels = config["mamba_n_heads"], columns + 2 * groups * config["mamba_d_state"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}."
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if kind in ("mamba", "linear_attention"):
            parts |= {
                "mamba.in_proj.weight": (columns + channels + states, hidden),
                "mamba.conv1d.weight": (channels, 1, config["mamba_d_conv"]),
                "mamba.conv1d.bias": (channels,),
                "mamba.dt_bias": (states,),
                "mamba.A_log": (states,),
                "mamba.D": (states,),
                "mamba.norm.weight": (columns,),
                "mamba.out_proj.weight": (hidden, columns),
            }
        else:
            parts |= {
                "self_attn.q_proj.weight": (heads * head_dim, hidden),
                "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
                "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
                "self_attn.o_proj.weight": (hidden, heads * head_dim),
            }
        parts |= _list_granite(config, count_experts(config), config["intermediate_size"])
        shapes |= {layer + name: shape for name, shape in parts.items()}
    return shapes


def _list_falcon(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Falcon-H1 but the table of embeddings."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, ffn, states = config["head_dim"], config["intermediate_size"], config["mamba_n_heads"]
    columns = config["mamba_d_ssm"]
    channels = columns + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "pre_ff_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head_dim, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
        "mamba.in_proj.weight": (columns + channels + states, hidden),
        "mamba.conv1d.weight": (channels, 1, config["mamba_d_conv"]),
        "mamba.conv1d.bias": (channels,),
        "mamba.dt_bias": (states,),
        "mamba.A_log": (states,),
        "mamba.D": (states,),
        "mamba.out_proj.weight": (hidden, columns),
        "feed_forward.gate_proj.weight": (ffn, hidden),
        "feed_forward.up_proj.weight": (ffn, hidden),
        "feed_forward.down_proj.weight": (hidden, ffn),
    }
    if config["mamba_rms_norm"]:
        parts["mamba.norm.weight"] = (columns,)
    shapes: dict[str, tuple[int, ...]] = {"model.final_layernorm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in parts.items()}
    return shapes


def _list_nemotron(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Nemotron-H, whose names begin in a way of their own."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, ffn, vocabulary = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    states = config["mamba_num_heads"]
    columns = states * config["mamba_head_dim"]
    channels = columns + 2 * config["n_groups"] * config["ssm_state_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (vocabulary, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    blocks: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "in_proj.weight": (columns + channels + states, hidden),
            "conv1d.weight": (channels, 1, config["conv_kernel"]),
            "conv1d.bias": (channels,),
            "dt_bias": (states,),
            "A_log": (states,),
            "D": (states,),
            "norm.weight": (columns,),
            "out_proj.weight": (hidden, columns),
        },
        "*": {
            "q_proj.weight": (heads * head_dim, hidden),
            "k_proj.weight": (kv_heads * head_dim, hidden),
            "v_proj.weight": (kv_heads * head_dim, hidden),
            "o_proj.weight": (hidden, heads * head_dim),
        },
        "-": {"up_proj.weight": (ffn, hidden), "down_proj.weight": (hidden, ffn)},
        "E": _list_nemotron_experts(config, hidden) if count_experts(config) else {},
    }
    for index, letter in enumerate(config["hybrid_override_pattern"]):
        layer = f"backbone.layers.{index}."
        shapes[f"{layer}norm.weight"] = (hidden,)
        shapes |= {f"{layer}mixer.{name}": shape for name, shape in blocks[letter].items()}
    return shapes


def _list_mamba2(config: Config) -> dict[str, tuple[int, ...]]:
    """All tensors of a Mamba-2: those of a Nemotron-H that has nothing else."""
    keys = {"mamba_num_heads": "num_heads", "mamba_head_dim": "head_dim", "ssm_state_size": "state_size"}
    none = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 0)
    letters = "M" * config["num_hidden_layers"]
    own = {name: config[key] for name, key in keys.items()}
    return _list_nemotron({**config, **none, **own, "hybrid_override_pattern": letters})


def _list_nemotron_experts(config: Config, hidden: int) -> dict[str, tuple[int, ...]]:
    experts, ffn = count_experts(config), config["moe_intermediate_size"]
    shared = config["moe_shared_expert_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (experts, hidden),
        "gate.e_score_correction_bias": (experts,),
        "shared_experts.up_proj.weight": (shared, hidden),
        "shared_experts.down_proj.weight": (hidden, shared),
    }
    columns = config.get("moe_latent_size") or hidden
    if config.get("moe_latent_size"):
        shapes |= {"fc1_latent_proj.weight": (columns, hidden), "fc2_latent_proj.weight": (hidden, columns)}
    for expert in range(experts):
        shapes[f"experts.{expert}.up_proj.weight"] = (ffn, columns)
        shapes[f"experts.{expert}.down_proj.weight"] = (columns, ffn)
    return shapes


def has_experts(config: Config, index: int) -> bool:
    """Return True if a layer has a mixture of experts."""
    if not count_experts(config) or index < config.get("first_k_dense_replace", config.get("num_dense_layers", 0)):
        return False
    if "mlp_layer_types" in config:
        return bool(config["mlp_layer_types"][index] == "sparse")
    return (index + 1) % config.get("decoder_sparse_step", 1) == 0 and index not in config.get("mlp_only_layers", [])


def list_mixture(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a mixture, as folders of its family have them."""
    kind, experts = config["model_type"], count_experts(config)
    if kind == "dbrx":
        hidden, rows = config["d_model"], experts * config["ffn_config"]["ffn_hidden_size"]
        stacks = {f"ffn.experts.mlp.{name}": (rows, hidden) for name in ("w1", "v1", "w2")}
        return {"ffn.router.layer.weight": (experts, hidden)} | stacks
    hidden = config["hidden_size"]
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    if kind in ("granitemoe", "granitemoeshared"):
        return _list_granite(config, experts, ffn)
    if kind == "gemma4_text":
        return {
            "router.proj.weight": (experts, hidden),
            "router.scale": (hidden,),
            "router.per_expert_scale": (experts,),
            "experts.gate_up_proj": (experts, 2 * ffn, hidden),
            "experts.down_proj": (experts, hidden, ffn),
        }
    if kind == "gpt_oss":
        return {
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * ffn),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
            "mlp.experts.down_proj": (experts, ffn, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
    if kind == "llama4_text":
        parts = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
        return {
            "feed_forward.router.weight": (experts, hidden),
            "feed_forward.experts.gate_up_proj": (experts, hidden, 2 * ffn),
            "feed_forward.experts.down_proj": (experts, ffn, hidden),
        } | {f"feed_forward.shared_expert.{name}.weight": shape for name, shape in parts.items()}
    block, names = "mlp", {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    if kind == "jamba":
        products = [(f"experts.{expert}.{name}", shape) for expert in range(experts) for name, shape in names.items()]
        return {f"feed_forward.{name}.weight": shape for name, shape in [("router", (experts, hidden)), *products]}
    if kind in ("mixtral", "minimax_m2", "phimoe", "lfm2_moe", "kimi_linear"):
        block = "feed_forward" if kind == "lfm2_moe" else "block_sparse_moe"
        names = {"w1": (ffn, hidden), "w3": (ffn, hidden), "w2": (hidden, ffn)}
    gate = {"hunyuan_v1_moe": "gate.wg", "afmoe": "router.gate", "hy_v3": "router.gate"}.get(kind, "gate")
    shapes: dict[str, tuple[int, ...]] = {f"{block}.{gate}.weight": (experts, hidden)}
    if kind == "mistral4":
        shapes |= {
            "mlp.experts.gate_up_proj": (experts, 2 * ffn, hidden),
            "mlp.experts.down_proj": (experts, hidden, ffn),
        }
        names = {}
    for expert in range(experts):
        shapes |= {f"{block}.experts.{expert}.{name}.weight": shape for name, shape in names.items()}
    shared, shared_ffn = "shared_expert", config.get("shared_expert_intermediate_size", 0)
    if kind == "minimax_m2":
        shapes["block_sparse_moe.e_score_correction_bias"] = (experts,)
    of_deepseek = "dots1", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next_text"
    if kind in (*of_deepseek, "mimo_v2_flash", "laguna"):
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if kind in ("afmoe", "bailing_moe", "exaone_moe"):
        biases = {"afmoe": "expert_bias", "bailing_moe": "gate.expert_bias", "exaone_moe": "e_score_correction_bias"}
        shapes[f"mlp.{biases[kind]}"] = (experts,)
        shared, shared_ffn = "shared_experts", ffn * config["num_shared_experts"]
    elif kind == "laguna":
        shared = "shared_experts"
    elif kind == "kimi_linear":
        shapes[f"{block}.gate.e_score_correction_bias"] = (experts,)
        shared, shared_ffn = "shared_experts", ffn * config["num_shared_experts"]
    elif kind in ("hy_v3", "cohere2_moe"):
        shapes |= {"mlp.expert_bias": (experts,)} if kind == "hy_v3" else {}
        shared, shared_ffn = "shared_mlp" if kind == "hy_v3" else "shared_experts", ffn * config["num_shared_experts"]
    elif "n_shared_experts" in config:
        shared, shared_ffn = "shared_experts", ffn * config["n_shared_experts"]
    elif kind == "ernie4_5_moe":
        shapes["mlp.moe_statics.e_score_correction_bias"] = (1, experts)
        shared, shared_ffn = "shared_experts", ffn * config["moe_num_shared_experts"]
    elif kind == "hunyuan_v1_moe":
        shared, shared_ffn = "shared_mlp", ffn
    else:
        shapes |= {"mlp.shared_expert_gate.weight": (1, hidden)} if shared_ffn else {}
    if shared_ffn:
        shapes[f"{block}.{shared}.gate_proj.weight"] = (shared_ffn, hidden)
        shapes[f"{block}.{shared}.up_proj.weight"] = (shared_ffn, hidden)
        shapes[f"{block}.{shared}.down_proj.weight"] = (hidden, shared_ffn)
    return shapes


def _list_granite(config: Config, experts: int, ffn: int) -> dict[str, tuple[int, ...]]:
    hidden, shared = config["hidden_size"], config.get("shared_intermediate_size", 0)
    shapes: dict[str, tuple[int, ...]] = {}
    if experts:
        shapes["block_sparse_moe.router.layer.weight"] = (experts, hidden)
        shapes["block_sparse_moe.input_linear.weight"] = (experts, 2 * ffn, hidden)
        shapes["block_sparse_moe.output_linear.weight"] = (experts, hidden, ffn)
    if shared:
        shapes["shared_mlp.input_linear.weight"] = (2 * shared, hidden)
        shapes["shared_mlp.output_linear.weight"] = (hidden, shared)
    return shapes


_OTHERS: dict[str, Callable[[Config], dict[str, tuple[int, ...]]]] = {  # with layers of several kinds
    "qwen3_5": _list_qwen35,
    "qwen3_next": _list_qwen35,
    "qwen4_exp": _list_qwen4,
    "lfm2": _list_lfm2,
    "mamba2": _list_mamba2,
    "nemotron_h": _list_nemotron,
    "falcon_h1": _list_falcon,
    "granitemoehybrid": _list_granite_hybrid,
}


def make_weights(config: Config, seed: int) -> Weights:
    """Values of such a size that attention is neither flat nor sharp and logits are of order one."""
    return _make_all(config, make_shapes(config), seed)


def _make_all(config: Config, shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    made = {name: _make_tensor(name, shape, seed) for name, shape in shapes.items()}
    for name, values in made.items():
        from_one = config["model_type"] in (
            "gemma",
            "nemotron",
            "gemma2",
            "gemma3_text",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "qwen3_next",
            "qwen4_exp_text",
        )
        if from_one and name.endswith("norm.weight") and "linear_attn" not in name:
            values -= np.float32(1.0)  # as these families store them
        if config["model_type"] in ("gemma3n_text", "gemma4_text") and name.endswith(
            ("q_norm.weight", "k_norm.weight")
        ):
            values *= np.float32(0.4)  # as scores are not divided by the root of the head size
        if name.endswith("experts.gate_up_proj") and config["model_type"] == "gpt_oss":
            values *= np.float32(4.0)  # so that some are clamped
    return made


def make_head_weights(config: Config, seed: int) -> Weights:
    """Make the draft layer of such a model, as one more layer, or apart from the others as in Qwen3.5's files."""
    shapes = make_shapes(config)
    last = max(name.split(".self_attn.")[0] for name in shapes if ".self_attn.q_proj." in name)
    hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    if config["model_type"].startswith("qwen3_5"):
        layer = "mtp.layers.0"
        around = {
            "mtp.fc.weight": (hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (hidden,),
            "mtp.norm.weight": (hidden,),
        }
    else:
        layer = f"model.layers.{config['num_hidden_layers']}"
        around = {
            f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
            f"{layer}.enorm.weight": (hidden,),
            f"{layer}.hnorm.weight": (hidden,),
            f"{layer}.shared_head.norm.weight": (hidden,),
            f"{layer}.embed_tokens.weight": table,
            f"{layer}.shared_head.head.weight": table,
        }
    own = {layer + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(f"{last}.")}
    return _make_all(config, own | around, seed)


def make_tokens(config: Config, count: int, seed: int) -> NDArray[np.int32]:
    """Draw `count` random token ids; the same seed gives the same ids."""
    return np.random.RandomState(seed).randint(0, config["vocab_size"], count).astype(np.int32)


def _make_tensor(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    random = np.random.RandomState([seed, zlib.crc32(name.encode())])
    values = random.standard_normal(shape)
    if (
        name.endswith(("norm.weight", "norm_f.weight", "layer_scalar", ".norm_1.weight", ".norm_2.weight"))
        or re.search(r"\bln_\w+\.weight$", name)
        or ".norms." in name
    ):
        values = 1.0 + 0.2 * values
    elif name.endswith(("A_log", "dt_bias", "alpha_n", "alpha_p")):
        values = 0.7 * values
    elif name.endswith(("act_fn.beta", "act_fn.eps")):
        values = 0.5 + 0.1 * values if name.endswith("beta") else -0.01 * np.abs(values)
    elif name.endswith(
        (
            "bias",
            "embed_tokens.weight",
            "embed_tokens_per_layer.weight",
            "embeddings.weight",
            "embed_in.weight",
            "wte.weight",
            "wpe.weight",
        )
    ):
        values = 0.3 * values
    elif len(shape) == 1:  # sinks
        values = values + 0.5
    else:
        values = values / np.sqrt(shape[-1] if shape[1] == 1 else shape[1])  # a channel has taps alone
    return np.asarray(values, np.float32)
