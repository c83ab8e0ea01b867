"""SmolLM 3: every fourth layer is not rotated, so its attention knows no positions."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, layer_windows


def _describe(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    interval = int(settings["no_rope_layer_interval"])
    # One for a layer that is rotated, zero for one that is not.
    rotated = settings.get("no_rope_layers") or [(index + 1) % interval for index in range(plain.num_layers)]
    window = settings.get("sliding_window") if settings.get("use_sliding_window") else None
    return replace(
        plain,
        mlp_bias=bool(settings["mlp_bias"]),
        layers_without_rope=tuple(index for index in range(plain.num_layers) if not rotated[index]),
        layer_windows=layer_windows(settings, window, lambda index: not rotated[index]),
    )


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    title="SmolLM 3",
    sizes={"3B": 3.08},
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    describe=_describe,
)
