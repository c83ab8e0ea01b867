"""Base of the sections of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys, infinity and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
