"""`GenerationSpec`: one request after validation, the same whether it came over HTTP or the Python handle.

What depends on the model (context length, vocabulary, end-of-sequence ids) is settled by `sampling_params`, which the
ingress calls once per choice after tokenizing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.core.errors import ContextLengthError, RequestError
from engine.core.types import SamplingParams

Prompt: TypeAlias = str | tuple[int, ...]
ChatMessage: TypeAlias = Mapping[str, object]
"""`role` and `content` (str), and what else the chat template may look at: `name`, `tool_call_id`, `tool_calls`."""

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of a completion that does not say; a chat may fill the context."""

_SEED_MASK = 2**63 - 1
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A valid request. For a completion `prompts` has at least one element, for a chat `messages` has."""

    kind: Literal["completion", "chat"]
    model: str | None = None
    """None: the one model there is (Python handle only)."""
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    n: int = 1
    """Choices per prompt."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """The stop string that ended the text stays in it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    """The answer's text begins with the prompt's, and so do its log-probabilities (completions only)."""

    user: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    cache_priority: int = 0
    cache_ttl_s: float | None = None
    request_id: str | None = None

    @property
    def num_choices(self) -> int:
        """Choices of the response, all prompts together."""
        return self.n * max(1, len(self.prompts))

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives to report for each prompt token, wherever they are shown; None: report nothing."""
        echoed = self.logprobs if self.echo else None
        return max((count for count in (self.prompt_logprobs, echoed) if count is not None), default=None)

    @property
    def prompt_param(self) -> str:
        """The field of the request that holds the prompt, for error messages."""
        return "messages" if self.kind == "chat" else "prompt"


def sampling_params(
    spec: GenerationSpec,
    *,
    prompt_len: int,
    max_model_len: int,
    eos_token_ids: Collection[int],
    vocab_size: int,
    default_seed: int,
    choice: int = 0,
) -> SamplingParams:
    """The sampling parameters of one choice of `spec`.

    `prompt_len` and `max_model_len` are in tokens; `choice` is the choice's index in the response (prompt by prompt,
    `n` each). With a `seed` in the request, a choice depends only on its prompt and its place among that prompt's
    choices; without, every choice draws from `default_seed` and its index.

    Raises ContextLengthError if prompt and `max_tokens` do not fit, RequestError for ids outside the vocabulary and
    for `min_tokens` above `max_tokens`.
    """
    max_tokens = _max_tokens(spec, prompt_len, max_model_len)
    if spec.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' must be at most max_tokens ({max_tokens}), got {spec.min_tokens}.", param="min_tokens"
        )
    require_token_ids(spec.stop_token_ids, vocab_size, "stop_token_ids")
    require_token_ids([token for token, _ in spec.logit_bias], vocab_size, "logit_bias")
    seed, index = (default_seed, choice) if spec.seed is None else (spec.seed, choice % spec.n)
    own_stops = () if spec.ignore_eos else tuple(sorted(eos_token_ids))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=_choice_seed(seed, index),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        logit_bias=spec.logit_bias,
        stop_token_ids=tuple(dict.fromkeys((*own_stops, *spec.stop_token_ids))),
        min_tokens=spec.min_tokens,
        logprobs=spec.logprobs,
        prompt_logprobs=spec.num_prompt_logprobs,
    )


def require_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError naming `param` unless all ids are in `[0, vocab_size)`."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"'{param}' has token id {wrong}, but the model's ids are 0 to {vocab_size - 1}.", param=param
        )


def _max_tokens(spec: GenerationSpec, prompt_len: int, max_model_len: int) -> int:
    """`max_tokens`, explicit or default, checked against the context."""
    room = max_model_len - prompt_len
    if room < (spec.max_tokens != 0):
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, "
            f"but your prompt has {prompt_len} tokens and leaves no room for an answer. "
            f"Please shorten '{spec.prompt_param}'.",
            param=spec.prompt_param,
        )
    if spec.max_tokens is None:
        return room if spec.kind == "chat" else min(room, DEFAULT_COMPLETION_TOKENS)
    if spec.max_tokens > room:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but you asked for "
            f"{prompt_len + spec.max_tokens}: {prompt_len} in '{spec.prompt_param}' and {spec.max_tokens} in "
            f"'max_tokens'. Please shorten one of them.",
            param="max_tokens",
        )
    return spec.max_tokens


def _choice_seed(seed: int, index: int) -> int:
    """A seed in `[0, 2**63)` for each index; index 0 keeps `seed`, so `n` does not change the first choice."""
    return (seed + index * _ODD) & _SEED_MASK
