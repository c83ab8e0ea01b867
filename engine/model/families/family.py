"""A model family: its names, and a function from its settings to the decoder's description."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raydix.engine.model.config import JsonObject, ModelConfig

# Values that a `config.json` of any family may leave out.
_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

# Keys that only families with recurrent layers have.
_RECURRENT = ("linear_num_value_heads", "conv_L_cache", "mamba_n_heads", "mamba_num_heads")


@dataclass(frozen=True, slots=True)
class Settings:
    """A `config.json` of one family, with values for the keys that it may leave out."""

    architecture: str
    stated: JsonObject
    defaults: JsonObject

    def __getitem__(self, key: str) -> Any:
        """The value of `key`, or its default if it is absent or null; raises `KeyError` without either."""
        value = self.stated.get(key)
        if value is not None:
            return value
        return self.defaults[key] if key in self.defaults else _DEFAULTS[key]

    def get(self, key: str) -> Any:
        """The value of `key`, its default, or None."""
        try:
            return self[key]
        except KeyError:
            return None

    def changed(self, **values: object) -> "Settings":
        """Return the settings of a `config.json` with other values."""
        return replace(self, stated={**self.stated, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The models of one `model_type`."""

    model_type: str
    """The name in `config.json`, without underscores and an ending `_text`."""
    architecture: str
    """The name in `config.json`'s `architectures`."""
    title: str
    """The name as its makers write it."""
    sizes: Mapping[str, float]
    """The commonest published models, smallest first, with their parameters in billions, experts all counted."""
    also: tuple[str, ...] = ()
    """Other architectures and model types that are the same decoder, names as above."""
    gguf_name: str | None = None
    """The name in GGUF's `general.architecture`, which two families may share; None: GGUF files name it otherwise, or
    cannot be read."""
    reads_quantized: tuple[str, ...] = ()
    """Kinds of quantised weights, as `quant_method` names them, that only this family has."""
    stored_bytes: float | None = None
    """About the bytes of a parameter in memory, where the published weights are in few bits and are kept so; None: they
    are published in bfloat16."""
    defaults: JsonObject
    """Values that a `config.json` may leave out because the publisher's configuration class supplies them."""
    describe: Callable[[Settings], ModelConfig]
    """Raises `KeyError`, `TypeError`, `ValueError` or `ZeroDivisionError` for settings that are absent or unusable."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Every architecture of the family, as `config.json` names it."""
        return (self.architecture, *(name for name in self.also if not name.islower()))

    @property
    def has_experts(self) -> bool:
        """True if its layers are mixtures of experts."""
        return "num_experts" in self.defaults

    @property
    def is_recurrent(self) -> bool:
        """True if some of its layers keep a recurrent state."""
        return any(key in self.defaults for key in _RECURRENT)

    @property
    def cpu_only(self) -> str | None:
        """What its models have that runs on CPUs only, as `ModelConfig.cpu_only`."""
        parts = {
            "experts": self.has_experts,
            "recurrent layers": self.is_recurrent,
            "layers of different shapes": "global_head_dim" in self.defaults,
            "layer norms": "layer_norm_eps" in self.defaults,
        }
        return next((name for name, has in parts.items() if has), None)
