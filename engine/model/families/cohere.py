"""Command R and Command A: layer norms without a bias, and attention and MLP side by side."""

from dataclasses import replace

from raydix.engine.model.config import LayerNorms, ModelConfig
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import decoder, interleaved, layer_windows

_DEFAULTS = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _cohere(settings: Settings) -> ModelConfig:
    has_head_norms = bool(settings.get("use_qk_norm"))
    return replace(
        interleaved(decoder(settings.changed(rms_norm_eps=settings["layer_norm_eps"]))),
        layer_norm=True,
        norms=LayerNorms(mlp=None),
        is_parallel=True,
        qk_norm=has_head_norms,
        qk_norm_by_head=has_head_norms,
        logit_scale=float(settings["logit_scale"]),
    )


# Command R and R+, Aya 23 and Expanse: Llama with one layer norm before both halves of a layer.
COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    title="Command R, Aya",
    sizes={"Aya 8B": 8.03, "Aya 32B": 32.3, "R 35B": 35.0, "R+ 104B": 104.0},
    defaults=_DEFAULTS,
    describe=_cohere,
)


def _cohere2(settings: Settings) -> ModelConfig:
    pattern = int(settings["sliding_window_pattern"])
    windows = layer_windows(
        settings, settings.stated.get("sliding_window", 4096), lambda index: (index + 1) % pattern != 0
    )
    return replace(
        _cohere(settings.changed(use_qk_norm=False)),
        layer_windows=windows,
        layers_without_rope=tuple(index for index, window in enumerate(windows) if window is None),
    )


# Command R7B and Command A: three of four layers have a window, and only these are rotated.
COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    title="Command R7B, Command A",
    sizes={"R7B": 8.03, "A 111B": 111.0},
    defaults={**_DEFAULTS, "sliding_window_pattern": 4},
    describe=_cohere2,
)
