"""Mistral and its descendants."""

from dataclasses import replace
from typing import Any

from raydix.engine.model.config import JsonObject, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, layer_windows, rope_parameters


def _mistral(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    window = settings.stated.get("sliding_window", 4096)  # null: none
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
    )


# Mistral: every layer has the window, and no projection a bias. Its GGUF files call themselves llama.
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    title="Mistral",
    sizes={"7B": 7.25, "Nemo 12B": 12.2, "Small 24B": 23.6},
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    describe=_mistral,
)


def _ministral(settings: Settings) -> ModelConfig:
    window = settings.stated.get("sliding_window", 4096)  # null: none
    return replace(
        decoder(settings),
        layer_windows=layer_windows(settings, window, lambda _: True),
        attention_bias=False,
        attention_output_bias=False,
    )


# Ministral (8B): Mistral whose layers have a window or none, as `layer_types` says.
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    title="Ministral",
    sizes={"8B": 8.02},
    defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    describe=_ministral,
)


_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(settings: Settings) -> ModelConfig:
    rope: JsonObject = rope_parameters(settings) or _MINISTRAL3_ROPE
    plain = decoder(settings.changed(rope_parameters=rope, rope_scaling=None))
    window = settings.get("sliding_window")
    beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
        query_scaling=(float(beta), int(original)) if beta and original else None,
    )


# Ministral 3: Mistral stretched by YaRN, whose queries grow with the logarithm of their position.
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    title="Ministral 3",
    sizes={"3B": 3.43, "8B": 8.49, "14B": 13.5},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    describe=_ministral3,
)


def _mixtral(settings: Settings) -> ModelConfig:
    of_all = experts_of(settings.changed(norm_topk_prob=True))
    plain, window = decoder(settings), settings.get("sliding_window")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
        experts=replace(
            of_all,
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        ),
    )


# Mixtral: Mistral with 8 experts, of which each token takes 2.
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    sizes={"8x7B": 46.7, "8x22B": 140.6},
    gguf_name="llama",
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    describe=_mixtral,
)
