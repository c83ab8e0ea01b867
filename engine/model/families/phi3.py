"""Phi-3, 3.5 and 4: fused projections, every layer has the window, and LongRoPE stretches the long ones.

Phi-4-mini rotates three quarters of each head.
"""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, rope_parameters


def _describe(settings: Settings) -> ModelConfig:
    rope = dict(rope_parameters(settings))
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("su", "yarn"):  # names of LongRoPE in early checkpoints
        rope |= {"rope_type": "longrope"}
    plain = decoder(settings.changed(rope_parameters=rope, rope_scaling=None))
    window = settings.get("sliding_window")
    return replace(
        plain,
        layer_windows=(None if window is None else int(window),) * plain.num_layers,
        attention_bias=False,
        attention_output_bias=False,
        fused_qkv=True,
        fused_gate_up=True,
    )


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    title="Phi 3 and 4",
    sizes={"mini 3.8B": 3.82, "4 mini 3.8B": 3.84, "medium 14B": 14.0, "4 14B": 14.7},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    describe=_describe,
)
