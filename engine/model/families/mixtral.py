"""Mixtral: Mistral with 8 experts, of which each token takes 2."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of


def _describe(settings: Settings) -> ModelConfig:
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


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    sizes={"8x7B": 46.7, "8x22B": 140.6},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    describe=_describe,
)
