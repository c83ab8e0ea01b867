"""gpt-oss: experts with biases and a clamped activation, attention sinks, and a window in every other layer.

Published experts are in MXFP4, in which they are kept with `model.quantization: stored`; otherwise they are widened.
"""

from dataclasses import replace

from raydix.engine.core.errors import StartupError
from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, experts_of, layer_windows


def _describe(settings: Settings) -> ModelConfig:
    if (settings["swiglu_alpha"], settings["swiglu_limit"]) != (1.702, 7.0):
        raise StartupError("GptOssForCausalLM has another swiglu_alpha or swiglu_limit here, which is not supported")
    quantized = settings.get("quantization_config") or {}
    return replace(
        decoder(settings),
        layer_windows=layer_windows(settings, settings.get("sliding_window"), lambda index: index % 2 == 0),
        activation="clamped_swiglu",
        attention_sinks=True,
        experts=replace(
            experts_of(settings.changed(norm_topk_prob=True)),
            router="mlp.router",
            gate=None,
            up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
            has_bias=True,
            stored="mxfp4" if quantized.get("quant_method") == "mxfp4" else "transposed",
        ),
    )


GPT_OSS = Family(
    model_type="gptoss",
    architecture="GptOssForCausalLM",
    title="gpt-oss",
    sizes={"20B": 20.9, "120B": 116.8},
    gguf_name="gpt-oss",
    reads_quantized=("mxfp4",),
    stored_bytes=0.67,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    describe=_describe,
)
