"""EXAONE 4: norms as OLMo 2, but of each query and key head; with windows only windowed layers are rotated."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.olmo2 import POST_NORMS
from raydix.engine.model.families.parts import decoder, layer_windows


def _describe(settings: Settings) -> ModelConfig:
    plain = decoder(settings)
    window = settings.stated.get("sliding_window", 4096)  # null: none
    pattern = settings["sliding_window_pattern"]
    if isinstance(pattern, str):  # LLLG: each letter is a layer, G one without a window
        pattern = len(pattern)
    windows = layer_windows(settings, window, lambda index: window is not None and (index + 1) % pattern != 0)
    unrotated = () if window is None else (index for index, each in enumerate(windows) if each is None)
    return replace(
        plain,
        norms=POST_NORMS,
        qk_norm=True,
        attention_bias=False,
        attention_output_bias=False,
        layer_windows=windows,
        layers_without_rope=tuple(unrotated),
    )


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    title="EXAONE 4",
    sizes={"1.2B": 1.28, "32B": 32.0},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window_pattern": 4},
    describe=_describe,
)
