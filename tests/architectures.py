"""Tiny configurations of every causal-LM architecture that transformers has, made from their defaults by name."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 512
SIZES = {  # the largest value that keys of these names keep
    512: "vocab_size unpadded_vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size "
    "ngram_vocab_size_base encoder_hash_byte_group_vocab max_source_positions max_target_positions",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size n_inner dim_ff dff d_inner "
    "feed_forward_size dense_intermediate_size intermediate_size_mlp shared_intermediate_size mlp_dim",
    64: "hidden_size d_model n_embd emb_dim dim_model embedding_size embedding_dim lru_width attention_hidden_size "
    "word_embed_proj_dim input_embedding_size output_embedding_size backbone_hidden_size hidden_size_global "
    "pronunciation_embed_dim shape_embed_dim ple_embed_dim image_size num_centroids",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size kv_lora_rank "
    "shared_experts_intermediate_size expert_ffn_hidden_size q_lora_rank centroid_intermediate_top_k hc_lowrank",
    16: "head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim index_head_dim linear_key_head_dim dim_head d_head "
    "linear_value_head_dim kv_channels attention_head_dim linear_head_dim swa_head_dim rotary_dim "
    "hidden_size_per_layer_input",
    8: "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num split_ngram_parts",
    4: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
    "num_heads decoder_attention_heads encoder_attention_heads linear_num_heads num_blocks",
    2: "num_key_value_heads num_kv_heads index_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "n_group topk_group num_expert_group",
}  # fmt: skip
LARGEST = {name: size for size, names in SIZES.items() for name in names.split()}
HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
OWN: dict[str, dict[str, Any]] = {  # what a rule for all cannot know
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 32, "per_layer_config": {}},
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16,
    },
    "gemma3n_text": {
        "intermediate_size": 96, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "num_kv_shared_layers": 0,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": HYBRID},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": HYBRID},
}  # fmt: skip
NOT_SMALL = {  # kind → why there is none here
    "dots3_note": "images and text: its text model is here as dots3_note_text",
    "gemma3n": "needs timm",
    "gemma4_assistant": "drafts for another model, from that one's hidden states",
    "gemma4_unified_assistant": "drafts for another model, from that one's hidden states",
    "musicgen": "makes sounds: its configuration is not that of its language model",
    "musicgen_melody": "makes sounds: its configuration is not that of its language model",
    "qwen4_exp": "images and text: its text model is here as qwen4_exp_text",
}
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NOT_SMALL]


def small_config(kind: str, **own: Any) -> Any:
    """The configuration of a model of this architecture with some 100,000 parameters; `own` overrides its keys."""
    return AutoConfig.for_model(kind, **{**_shrunk(AutoConfig.for_model(kind).to_dict()), **OWN.get(kind, {}), **own})


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value.get("model_type"):  # a model inside a model
            changes[name] = {"model_type": value["model_type"], **_shrunk(value)}
        elif type(value) is int and name in LARGEST:
            changes[name] = min(value, LARGEST[name])
        elif type(value) is int and name.endswith("token_id") and value >= VOCABULARY:
            changes[name] = VOCABULARY - 1
    heads, shared = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and heads == shared:
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    return changes
