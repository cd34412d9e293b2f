"""Names and row order on the way from a Hugging Face folder to GGUF."""

from __future__ import annotations

import numpy as np
import pytest
from test_config import NAMES, TINYLLAMA, TINYLLAMA_GGUF
from tiny_models import read_golden

from mlxr.core.errors import ModelError
from mlxr.models import model_from_folder, model_from_gguf
from mlxr.models.folders.tensors import canonical_name, order_rows, rename_hf_tensors


@pytest.mark.parametrize(
    ("hf_name", "name"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.layers.17.self_attn.k_proj.bias", "blk.17.attn_k.bias"),
        ("model.layers.3.self_attn.o_proj.weight", "blk.3.attn_output.weight"),
        ("model.layers.3.self_attn.q_norm.weight", "blk.3.attn_q_norm.weight"),
        ("model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight"),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.3.self_attn.q_layernorm.norms.11.weight", "blk.3.attn_q_norm.11.weight"),
        ("model.language_model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
        ("model.language_model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        ("model.language_model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        ("model.language_model.layers.3.per_layer_input_gate.weight", "blk.3.inp_gate.weight"),
        ("model.language_model.layers.3.per_layer_projection.weight", "blk.3.proj.weight"),
        ("model.language_model.layers.3.post_per_layer_input_norm.weight", "blk.3.post_norm.weight"),
    ],
)
def test_names(hf_name: str, name: str | None) -> None:
    assert canonical_name(hf_name) == name


@pytest.mark.parametrize(
    "hf_name",
    [
        "model.layers.0.block_sparse_moe.experts.0.w4.weight",
        "model.layers.00.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.scales",
        "transformer.h.0.attn.weight",
        "model.layers.0.mlp.up_proj.weight\n",
    ],
)
def test_unknown_names_are_refused(hf_name: str) -> None:
    with pytest.raises(ModelError, match="is not one of a supported model"):
        canonical_name(hf_name)


def test_renaming_leaves_derived_tensors_out() -> None:
    tensors = {"model.norm.weight": 1, "model.layers.0.self_attn.rotary_emb.inv_freq": 2}
    assert rename_hf_tensors(tensors) == {"output_norm.weight": 1}


def test_tensors_of_gpt2_have_a_prefix_or_none_and_masks_are_left_out() -> None:
    names = {"wte.weight": "token_embd.weight", "attn.c_attn": "attn_qkv"}
    own = {"wte.weight": 1, "h.3.attn.c_attn.bias": 2, "transformer.h.4.mlp.c_fc.weight": 3, "h.3.attn.bias": 4}
    found = rename_hf_tensors(own, names)
    assert found == {"token_embd.weight": 1, "blk.3.attn_qkv.bias": 2, "blk.4.ffn_up.weight": 3}


@pytest.mark.parametrize(("name", "heads"), [("blk.0.attn_q.weight", 32), ("blk.7.attn_k.bias", 4)])
def test_row_order_is_that_of_llama_files(name: str, heads: int) -> None:
    """The published conversion: split each head in (2, half), swap these two axes."""
    order = order_rows(name, TINYLLAMA)
    rows = np.arange(heads * 64).reshape(heads, 2, 32).swapaxes(1, 2).reshape(-1)
    assert order == rows.tolist()


def test_rows_that_are_not_rotated_stay() -> None:
    heads = {"llama.attention.head_count_kv": 1, "llama.rope.dimension_count": 4}
    narrow = model_from_gguf(TINYLLAMA_GGUF | heads, dict.fromkeys(NAMES))  # type: ignore[arg-type]
    order = order_rows("blk.0.attn_k.weight", narrow)
    assert order == [0, 2, 1, 3, *range(4, 64)]


@pytest.mark.parametrize("name", ["blk.0.attn_v.weight", "blk.0.attn_q_norm.weight", "token_embd.weight"])
def test_other_tensors_keep_their_rows(name: str) -> None:
    assert order_rows(name, TINYLLAMA) is None


def test_files_that_rotate_halves_keep_their_rows() -> None:
    for case in ("qwen2", "cohere"):
        assert order_rows("blk.0.attn_q.weight", model_from_folder(read_golden(case)[0])) is None
