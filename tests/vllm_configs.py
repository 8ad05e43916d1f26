"""The parts of real models' config.json that decide how much KV a token takes."""

from __future__ import annotations

from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 128,  # not hidden_size / num_attention_heads, which is 64
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "rope_scaling": None,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
    },
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
#: 5 layers with full attention, 29 with a sliding window; below the config of an image model
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 2560,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
}
#: 12 layers with each kind of attention
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
}
#: every fourth layer has full attention, the others a state
QWEN3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
}
FALCON_7B: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "multi_query": True,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
}
