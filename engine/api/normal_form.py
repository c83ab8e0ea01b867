"""The normal form of a request: a `GenerationSpec` of fields that are each valid, if they go together."""

from collections.abc import Sequence
from typing import Literal

from raydix.engine.api.fields import SamplingFields
from raydix.engine.api.prompts import Message, continued_answers
from raydix.engine.api.spec import GenerationSpec, Prompt, ReasoningUse, ToolUse
from raydix.engine.api.validation import ignored_fields
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatEnd, ChatTemplate
from raydix.engine.core.errors import RequestError

MAX_CHOICES = 1024
"""Choices of one response: prompts times `n`."""


def build_spec(
    fields: SamplingFields,
    *,
    kind: Literal["completion", "chat"],
    model: str | None,
    prompts: tuple[Prompt, ...] = (),
    messages: list[Message] | None = None,
    given_prompt: tuple[int, ...] | None = None,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    suffix: str | None = None,
    n: int = 1,
    best_of: int | None = None,
    stream: bool = False,
    include_usage: bool = False,
    continuous_usage: bool = False,
    store: bool = False,
    text_if_missing: bool = False,
    tools: ToolUse | None = None,
    reasoning: ReasoningUse | None = None,
    session_id: str | None = None,
    request_id: str | None = None,
    tokens_as_ids: bool = False,
    add_special_tokens: bool = True,
    chat_end: ChatEnd = ChatEnd.ANSWER,
    template: ChatTemplate = MODEL_TEMPLATE,
    prediction: str | None = None,
) -> GenerationSpec:
    """Return the normal form of a request whose fields are each valid. Raises RequestError for contradicting fields."""
    _require_few_choices(n, best_of, prompts, is_stream=stream)
    for index, message in enumerate(messages or ()):
        message.check(index)

    constraint = fields.constraint()
    spec = GenerationSpec(
        kind=kind,
        model=model,
        prompts=prompts,
        messages=tuple(message.for_template() for message in messages or ()),
        continued=continued_answers(messages or ()),
        given_prompt=given_prompt,
        template=template,
        text_if_missing=text_if_missing,
        tools=tools,
        reasoning=reasoning or ReasoningUse(),
        store=store,
        n=n,
        best_of=None if best_of == n else best_of,
        sampling=fields.sampling(0 if logprobs == -1 else logprobs, None if constraint is None else constraint.grammar),
        grammar_param=None if constraint is None else constraint.param,
        all_logprobs=logprobs == -1,
        truncation=fields.truncated_to(),
        max_tokens=max_tokens,
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        bad_words=tuple(fields.bad_words or ()),
        stop=tuple(dict.fromkeys(fields.stop or ())),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
        echo=echo,
        suffix=suffix,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=bool(fields.return_token_ids),
        user=fields.user or None,
        session_id=session_id or fields.session_id,
        priority=fields.priority or 0,
        objectives=fields.objectives(),
        cache_salt=fields.cache_salt,
        cache_priority=fields.cache_priority or 0,
        cache_ttl_s=fields.cache_ttl_s,
        request_id=request_id,
        tokens_as_ids=tokens_as_ids,
        add_special_tokens=add_special_tokens,
        chat_end=chat_end,
        prediction=prediction,
        ignored=ignored_fields(fields),
    )
    refuse_contradictions(spec)
    return spec


def refuse_contradictions(spec: GenerationSpec) -> None:
    """Raise RequestError for fields that do not go together."""
    if spec.store and not spec.skip_special_tokens:
        raise RequestError("'skip_special_tokens' must be true with 'store'.", param="skip_special_tokens")

    asked = spec.sampling
    if asked.logprob_token_ids and (asked.logprobs is None or spec.all_logprobs or spec.echoes_prompt):
        raise RequestError(
            "'logprob_token_ids' is only allowed with 'logprobs', not with all of them, and not with 'echo'.",
            param="logprob_token_ids",
        )
    if spec.all_logprobs and spec.echoes_prompt:
        raise RequestError("'logprobs' of -1 is not supported together with 'echo'.", param="logprobs")

    if spec.truncation is not None and spec.continued:
        raise RequestError(
            "'truncate_prompt_tokens' is not supported where messages have 'id' or 'token_ids'.",
            param="truncate_prompt_tokens",
        )
    if spec.max_tokens == 0 and not spec.echoes_prompt and asked.prompt_logprobs is None:
        raise RequestError(
            "'max_tokens' must be at least 1, got 0; with 'prompt_logprobs', or a completion's 'echo', it may be 0.",
            param="max_tokens",
        )


def _require_few_choices(n: int, best_of: int | None, prompts: Sequence[Prompt], *, is_stream: bool) -> None:
    if best_of is not None and best_of < n:
        raise RequestError(f"'best_of' must be at least 'n' ({n}), got {best_of}.", param="best_of")
    if best_of is not None and best_of > n and is_stream:
        raise RequestError("'best_of' above 'n' is not supported in a stream.", param="best_of")

    name, count = ("n", n) if best_of is None else ("best_of", best_of)
    if count * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"'{name}' times the number of prompts must be at most {MAX_CHOICES}, got {count} x {len(prompts)}.",
            param=name,
        )
