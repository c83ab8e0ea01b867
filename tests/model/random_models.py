"""Every supported architecture in a small random configuration, as transformers saves it."""

from pathlib import Path
from typing import Any

import torch

from raydix.engine.model.tokenizer import quiet_transformers

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}

GEMMA3 = {"layer_types": ["sliding_attention", "full_attention"] * 2}

GEMMA4: dict[str, Any] = {
    **GEMMA3,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 200,
}
GEMMA4_UNIFIED = {key: value for key, value in GEMMA4.items() if "per_layer" not in key}

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
QWEN3_MOE = {"head_dim": 32, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [2]}

SHARED_EXPERT = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}
DELTA: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 72,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
NEMOTRON = {
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 1e-6,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# Configurations of a few experts in the way of DeepSeek V3, in two groups, one of them chosen.
CORRECTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}

LATENT: dict[str, Any] = {
    **CORRECTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.0 + 1.7 * index for index in range(8)],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {"num_key_value_heads": 4}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen 2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 2.5 yarn": ("Qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen 3": ("Qwen3", {"head_dim": 32}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
    "ministral": ("Ministral", {"sliding_window": 24, "layer_types": GEMMA3["layer_types"], "head_dim": 32}),
    "seed-oss": ("SeedOss", {"head_dim": 32}),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True, "head_dim": 32}),
    "helium": ("Helium", {"head_dim": 16, "attention_bias": True}),
    "smollm 3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "phi 3": ("Phi3", {"sliding_window": 24}),
    "phi 3 longrope": (
        "Phi3",
        {"original_max_position_embeddings": 100, "rope_parameters": LONG_ROPE},
    ),
    "phi 3 within its context": (
        "Phi3",
        {"original_max_position_embeddings": 512, "rope_parameters": LONG_ROPE},
    ),
    "phi 4 mini": (
        "Phi3",
        {
            "head_dim": 32,
            "hidden_size": 128,
            "original_max_position_embeddings": 100,
            "rope_parameters": {
                **LONG_ROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 12,
                "long_factor": [1.0 + 1.7 * index for index in range(12)],
            },
        },
    ),
    "granite": ("Granite", MULTIPLIERS),
    "olmo 2": ("Olmo2", {}),
    "olmo 3": ("Olmo3", {"sliding_window": 24, "rope_scaling": {**YARN_ROPE, "attention_factor": 1.2}}),
    "exaone 4": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "exaone 4 without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "ministral 3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **YARN_ROPE,
                "original_max_position_embeddings": 40,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "qwen 3 moe": ("Qwen3Moe", {**EXPERTS, **QWEN3_MOE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 24}),
    "olmoe": ("Olmoe", EXPERTS),
    "granite moe": ("GraniteMoe", {**MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "gpt-oss": ("GptOss", {**EXPERTS, "head_dim": 32, "sliding_window": 24}),
    "glm": ("Glm", {"head_dim": 32}),
    "glm 4": ("Glm4", {"head_dim": 32}),
    "qwen 2 moe": ("Qwen2Moe", {**EXPERTS, **SHARED_EXPERT, "mlp_only_layers": [2]}),
    "qwen 3 next": ("Qwen3Next", {**EXPERTS, **SHARED_EXPERT, **DELTA}),
    "qwen 3.5": ("Qwen3_5", DELTA),
    "qwen 3.5 moe": ("Qwen3_5Moe", {**EXPERTS, **SHARED_EXPERT, **DELTA}),
    "glm 4.5": ("Glm4Moe", {**CORRECTED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            "head_dim": 32,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "dots.llm1": ("Dots1", {**CORRECTED, "head_dim": 32, "sliding_window": 24, "max_window_layers": 2}),
    "minimax m2": (
        "MiniMaxM2",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16, "intermediate_size": 40},
    ),
    "lfm 2 moe": (
        "Lfm2Moe",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **LATENT,
            "norm_topk_prob": False,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
        },
    ),
    "deepseek v2 lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "n_group": None, "topk_group": None, "norm_topk_prob": False},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**LATENT, "attention_bias": True, "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek v3 in halves": ("DeepseekV3", {**LATENT, "rope_interleave": False}),
    "glm 4.7 flash": ("Glm4MoeLite", {**LATENT, "v_head_dim": 48, "mlp_layer_types": ["dense", "sparse"] * 2}),
    "glm 4.5 air": ("Glm4Moe", {**CORRECTED, "head_dim": 32, "n_group": 1, "n_shared_experts": 1}),
    "lfm 2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 32,
            "tie_word_embeddings": False,
        },
    ),
    "granite 4": ("GraniteMoeHybrid", {**MAMBA, **MULTIPLIERS, "num_local_experts": 0, "tie_word_embeddings": True}),
    "granite 4 moe": (
        "GraniteMoeHybrid",
        {**MAMBA, **MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3, "mamba_n_groups": 1},
    ),
    "granite 4 of attention": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            **MULTIPLIERS,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 4,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": (
        "Bamba",
        {**{key: value for key, value in MAMBA.items() if key.startswith("mamba")}, "attn_layer_indices": [1]},
    ),
    "nemotron h": ("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "M-*M-"}),
    "nemotron h, attention last": ("NemotronH", {**NEMOTRON, "hybrid_override_pattern": "-MM*", "use_bias": True}),
    "nemotron 3": (
        "NemotronH",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "ME*E",
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
        },
    ),
    "gemma 3": ("Gemma3", {**GEMMA3, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
}

CASES |= {
    "gemma 4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma 4 large": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
        },
    ),
}

CASES |= {
    "gemma 4 moe": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
}
LAYER_NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "command r": ("Cohere", {"num_key_value_heads": 4}),
    "command r+": ("Cohere", {"use_qk_norm": True, "attention_bias": True}),
    "command a": ("Cohere2", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm in parallel": ("StableLm", {"use_parallel_residual": True}),
    "phi 2": ("Phi", {}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 24}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox in sequence": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
}
CASES |= LAYER_NORMS

LAYER_BY_LAYER = {*LAYER_NORMS, "olmo 2", "olmo 3", "exaone 4", "exaone 4 without windows", "ministral 3"}
LAYER_BY_LAYER |= {"olmoe", "qwen 2 moe", "qwen 3 next", "qwen 3.5", "qwen 3.5 moe", "lfm 2"}
LAYER_BY_LAYER |= {"gemma 4", "gemma 4 large", "gemma 4 moe", "glm 4.5", "glm 4.5 air"}
LAYER_BY_LAYER |= {"ernie 4.5 moe", "dots.llm1", "minimax m2", "lfm 2 moe"}
LAYER_BY_LAYER |= {case for case, (family, _) in CASES.items() if family in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite")}
LAYER_BY_LAYER |= {case for case in CASES if case.startswith(("granite", "bamba", "nemotron"))}
"""Cases with a part that the pass of all layers in one call does not know."""


def reference(case: str, folder: Path) -> tuple[list[int], torch.Tensor]:
    """Saves a model with random weights to `folder`; some tokens, and the logits that transformers gives for them."""
    family, extra = CASES[case]
    with quiet_transformers():
        import transformers

        name = f"{family}Text" if family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else family
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
        torch.manual_seed(0)
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():  # norms begin as ones and biases as zeros, which would hide a swapped one
            for name, parameter in theirs.named_parameters():
                if parameter.dim() == 1 or name.endswith("_norm.weight"):
                    parameter.add_(0.2 * torch.randn_like(parameter))
            for name, buffer in theirs.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.0)
                if name.endswith("bias"):  # corrections of experts' scores
                    buffer.add_(0.2 * torch.randn_like(buffer))
        theirs.save_pretrained(folder)
        token_ids = torch.randint(1, 200, (150,))
        with torch.inference_mode():
            return token_ids.tolist(), theirs(token_ids[None]).logits[0]
