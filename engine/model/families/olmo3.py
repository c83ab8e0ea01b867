"""OLMo 3: as OLMo 2; three of four layers have a window, and their rotary embedding is never stretched."""

from dataclasses import replace

from raydix.engine.model.config import ModelConfig
from raydix.engine.model.families import olmo2
from raydix.engine.model.families.family import Family, Settings
from raydix.engine.model.families.parts import layer_windows, rope_of, rope_parameters


def _describe(settings: Settings) -> ModelConfig:
    # transformers 5 states the rotary embedding of each kind of layer, transformers 4 that of layers without a window.
    parameters = rope_parameters(settings)
    is_by_kind = "full_attention" in parameters
    everywhere = parameters["full_attention"] if is_by_kind else parameters
    local = parameters.get("sliding_attention") or {} if is_by_kind else {}

    settings = settings.changed(rope_parameters=everywhere, rope_scaling=None)
    return replace(
        olmo2.olmo(settings),
        local_rope=rope_of(settings, local, float(settings["rope_theta"])),
        layer_windows=layer_windows(settings, settings["sliding_window"], lambda index: (index + 1) % 4 != 0),
    )


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    title="OLMo 3",
    sizes={"7B": 7.3, "32B": 32.2},
    defaults={**olmo2.DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096},
    describe=_describe,
)
