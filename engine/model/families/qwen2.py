"""Qwen 2 and 2.5: queries, keys and values have a bias; layers have a window only if `use_sliding_window` says so."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, layer_windows

DEFAULTS = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "max_window_layers": 28}


def qwen(settings: Settings) -> ModelConfig:
    """Describe the decoder as far as Qwen 2 and 3 are alike."""
    plain = decoder(settings)
    if not settings.get("use_sliding_window"):
        return plain
    window = settings.stated.get("sliding_window", 4096)  # null: none
    windows = layer_windows(settings, window, lambda index: index >= int(settings["max_window_layers"]))
    return replace(plain, layer_windows=windows)


def _describe(settings: Settings) -> ModelConfig:
    return replace(qwen(settings), attention_bias=True, attention_output_bias=False)


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    title="Qwen 2 and 2.5",
    sizes={"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.8, "32B": 32.8, "72B": 72.7},
    also=("qwen2vl", "qwen25vl", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    gguf_name="qwen2",
    defaults=DEFAULTS,
    describe=_describe,
)
