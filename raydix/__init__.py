"""raydix for other programs: a model in the program itself, or a running server.

import raydix

llm = raydix.LLM()
[output] = llm.generate("One, two,", raydix.SamplingParams(max_tokens=8))

import raydix

server = raydix.connect()
answer = server.generate(raydix.GenerateRequest(prompt="One, two,", max_tokens=8))
server.batch("requests.jsonl", "answers.jsonl")
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydix.client import Client, connect
    from raydix.engine.api.embeddings import EmbedRequest, EmbedResponse
    from raydix.engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
    from raydix.engine.batches.offline import BatchSummary
    from raydix.engine.core.batches.batch_run import Progress
    from raydix.engine.core.errors import (
        AnswerNotFoundError,
        AuthenticationError,
        ContextLengthError,
        LateError,
        ModelFailedError,
        ModelNotFoundError,
        NotFoundError,
        NoWorkerError,
        OverloadedError,
        PermissionDeniedError,
        RaydixError,
        RequestError,
        ServiceError,
        StartupError,
    )
    from raydix.llm import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "AnswerNotFoundError",
    "AuthenticationError",
    "BatchSummary",
    "Client",
    "CompletionOutput",
    "ContextLengthError",
    "EmbedRequest",
    "EmbedResponse",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResponse",
    "LateError",
    "ModelFailedError",
    "ModelNotFoundError",
    "NoWorkerError",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "Progress",
    "RaydixError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ServiceError",
    "StartupError",
    "connect",
]

# Modules of the names above; those that stand in none of them are errors.
HOMES = {
    "raydix.client": ("Client", "connect"),
    "raydix.engine.api.embeddings": ("EmbedRequest", "EmbedResponse"),
    "raydix.engine.api.generate": ("GenerateChunk", "GenerateRequest", "GenerateResponse"),
    "raydix.engine.batches.offline": ("BatchSummary",),
    "raydix.engine.core.batches.batch_run": ("Progress",),
    "raydix.llm": ("LLM", "CompletionOutput", "RequestOutput", "SamplingParams"),
}
ERRORS = "raydix.engine.core.errors"


def __getattr__(name: str) -> Any:
    """A name above, when it is first used: each process of a server imports this package, and few need these names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in HOMES.items() if name in names), ERRORS)
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
