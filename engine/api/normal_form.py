"""The normal form of a request: a `GenerationSpec` of fields that are each valid, if they go together."""

from collections.abc import Sequence
from dataclasses import replace

from raydix.engine.api.fields import SamplingFields
from raydix.engine.api.prompts import Message, continued_answers
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.api.validation import ignored_fields
from raydix.engine.core.errors import RequestError

MAX_CHOICES = 1024  # choices of one response: prompts times `n`


def normal_form(
    fields: SamplingFields, asked: GenerationSpec, *, messages: Sequence[Message] = (), logprobs: int | None = None
) -> GenerationSpec:
    """Return the normal form of a request whose fields are each valid.

    `asked` has what only the request's own route knows; `logprobs` is as the route understands that field. The parts
    that all routes share are filled here, from `fields` and `messages`. Raises RequestError for contradicting fields.
    """
    for index, message in enumerate(messages):
        message.check(index)

    constraint = fields.constraint()
    spec = replace(
        asked,
        best_of=None if asked.best_of == asked.n else asked.best_of,
        messages=tuple(message.for_template() for message in messages),
        continued=continued_answers(messages),
        sampling=fields.sampling(0 if logprobs == -1 else logprobs, None if constraint is None else constraint.grammar),
        grammar_param=None if constraint is None else constraint.param,
        all_logprobs=logprobs == -1,
        all_prompt_logprobs=fields.prompt_logprobs == -1,
        truncation=fields.truncated_to(),
        seed=fields.seed,
        ignore_eos=bool(fields.ignore_eos),
        bad_words=tuple(fields.bad_words or ()),
        stop=tuple(dict.fromkeys(fields.stop or ())),
        form=fields.form(asked.form),
        service=fields.service(asked.service),
        retention=fields.retention(asked.retention),
        ignored=ignored_fields(fields),
    )
    _require_few_choices(spec)
    refuse_contradictions(spec)
    return spec


def refuse_contradictions(spec: GenerationSpec) -> None:
    """Raise RequestError for fields that do not go together."""
    if spec.retention.store and not spec.form.skip_special_tokens:
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


def _require_few_choices(spec: GenerationSpec) -> None:
    """Raise RequestError for more choices than a response has, or for a contradiction between `best_of` and others."""
    n, best_of, num_prompts = spec.n, spec.best_of, len(spec.prompts)
    if best_of is not None and best_of < n:
        raise RequestError(f"'best_of' must be at least 'n' ({n}), got {best_of}.", param="best_of")
    if best_of is not None and best_of > n and spec.form.stream:
        raise RequestError("'best_of' above 'n' is not supported in a stream.", param="best_of")

    name, count = ("n", n) if best_of is None else ("best_of", best_of)
    if count * num_prompts > MAX_CHOICES:
        raise RequestError(
            f"'{name}' times the number of prompts must be at most {MAX_CHOICES}, got {count} x {num_prompts}.",
            param=name,
        )
