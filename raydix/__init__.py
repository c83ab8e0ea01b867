"""raydix for other programs: a model in the program itself, or a running server.

import raydix

llm = raydix.LLM()
[output] = llm.generate("One, two,", raydix.SamplingParams(max_tokens=8))

import raydix

server = raydix.connect()
answer = server.generate(raydix.GenerateRequest(prompt="One, two,", max_tokens=8))
server.batch("requests.jsonl", "answers.jsonl")
"""

from engine.api.embeddings import EmbedRequest, EmbedResponse
from engine.api.generate import GenerateChunk, GenerateRequest, GenerateResponse
from engine.batches.offline import BatchSummary
from engine.core.batches.batch_run import Progress
from engine.core.errors import (
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
from raydix.client import Client, connect
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
