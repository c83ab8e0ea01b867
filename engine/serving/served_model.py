"""The model as clients see it."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name and sizes of the model."""

    name: str
    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    """Values of a hidden state, and so of an embedding."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since the epoch."""
