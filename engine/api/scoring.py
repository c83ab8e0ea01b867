"""Bodies of `/generative_scoring` and `/v1/score`: how likely each of some tokens is behind a text.

A prompt is the query with one item. Its scores are the probabilities of the label tokens as its next token: "Is this
about sport? " with "Goal in the last minute. Answer:" and the ids of " yes" and " no". Both routes compute the same.
`/generative_scoring` answers in vLLM's form with the first label's probability, `/v1/score` in SGLang's with all.

Query and item are joined before they are tokenized where they are texts, as the model would read them in one prompt;
where they are token ids the ids are joined. All prompts of a request that begin with the query share its KV.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, fsum
from typing import Annotated

import orjson
from pydantic import Field

from raydix.engine.api.fields import TokenId
from raydix.engine.api.inputs import InputsFields
from raydix.engine.api.known import Ignored, UnlessEmpty, UnlessFalse, Unsupported
from raydix.engine.api.prompts import Inputs, OnePrompt
from raydix.engine.api.responses import Json, ResponseHead, TokenUsage
from raydix.engine.api.spec import DEFAULT_SAMPLING, GenerationSpec, LabelScoring, Prompt, ScoreForm
from raydix.engine.api.validation import NO_RULES, BodyRules, ignored_fields, parse_body
from raydix.engine.core.errors import RequestError
from raydix.engine.core.types import TokenLogprobs

MAX_LABELS = 128
MAX_JOINED = 1 << 22  # characters, or token ids, of the prompts of a request: the query counts with each item


class ScoringFields(InputsFields):
    """The fields that both routes take."""

    query: OnePrompt = Field(description="A text or token ids, part of each prompt.")
    items: Inputs = Field(description="A text, or a list of up to 2,048 texts or lists of token ids: a prompt each.")
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LABELS)] = Field(
        description="Tokens whose probabilities behind each prompt are the scores."
    )
    apply_softmax: bool | None = Field(
        default=None,
        description="Probabilities among the labels, whose sum is 1, instead of among all tokens; true at "
        "`/generative_scoring`, false at `/v1/score`.",
    )
    item_first: bool | None = Field(default=None, description="The item stands before the query; false.")

    rid: Unsupported = None
    lora_path: UnlessEmpty = None
    metadata: Ignored = None
    embed_override_token_id: Unsupported = None
    query_embed_overrides: UnlessEmpty = None
    item_embed_overrides: UnlessEmpty = None
    return_pooled_hidden_states: UnlessFalse = None

    def spec(self, form: ScoreForm) -> GenerationSpec:
        """The request in normal form, to be answered in `form`. Raises RequestError for texts beside token ids."""
        num_joined = len(self.query) * len(self.items) + sum(map(len, self.items))
        if num_joined > MAX_JOINED:
            parts = "characters" if isinstance(self.query, str) else "token ids"
            raise RequestError(
                f"'query' and 'items' make prompts of {num_joined:,} {parts}, more than the {MAX_JOINED:,} that a "
                "request may have; send the items in several requests.",
                param="items",
            )
        labels = tuple(dict.fromkeys(self.label_token_ids))

        # Each form has the default of the server that it comes from: vLLM's scores add up to 1, SGLang's do not.
        is_relative = form == "generative_scoring" if self.apply_softmax is None else self.apply_softmax
        return replace(
            self.of_inputs(tuple(self._joined(item) for item in self.items)),
            scoring=LabelScoring(form, tuple(self.label_token_ids), is_relative),
            sampling=replace(
                DEFAULT_SAMPLING, temperature=0.0, logprobs=0, logprob_token_ids=labels, speculation=False
            ),
            max_tokens=1,
            ignore_eos=True,
        )

    def _joined(self, item: Prompt) -> Prompt:
        first, second = (item, self.query) if self.item_first else (self.query, item)
        if isinstance(first, str) and isinstance(second, str):
            return first + second
        if isinstance(first, str) or isinstance(second, str):
            raise RequestError("'query' and 'items' must both be texts, or both be token ids.", param="items")
        return (*first, *second)


class GenerativeScoringRequest(ScoringFields):
    """Body of `/generative_scoring`."""


class ScoreRequest(ScoringFields):
    """Body of `/v1/score`."""


def _parsed(kind: type[ScoringFields], form: ScoreForm, body: bytes, rules: BodyRules) -> GenerationSpec:
    request = parse_body(kind, body, takes_unknown=rules.takes_unknown)
    return replace(request.spec(form), ignored=ignored_fields(request))


def parse_generative_scoring(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/generative_scoring` in normal form. Raises RequestError naming the field at fault."""
    return _parsed(GenerativeScoringRequest, "generative_scoring", body, rules)


def parse_score(body: bytes, rules: BodyRules = NO_RULES) -> GenerationSpec:
    """A body of `/v1/score` in normal form. Raises RequestError naming the field at fault."""
    return _parsed(ScoreRequest, "score", body, rules)


def scores(scoring: LabelScoring, at: TokenLogprobs) -> list[float]:
    """Probabilities of the labels, in their order, from the log-probabilities of a prompt's next token."""
    logprobs = dict(zip(at.top_ids, at.top_logprobs, strict=True))
    if not scoring.is_relative:
        return [exp(logprobs[label]) for label in scoring.labels]
    highest = max(logprobs[label] for label in scoring.labels)
    weights = {label: exp(logprobs[label] - highest) for label in scoring.labels}
    total = fsum(weights.values())
    return [weights[label] / total for label in scoring.labels]


def scores_body(head: ResponseHead, form: ScoreForm, found: Sequence[Sequence[float]], usage: TokenUsage) -> bytes:
    """The response, with the scores of each item in their order. SGLang's form has no completion tokens: the one token
    that each prompt takes to compute is in neither form's answer."""
    own: Json
    if form == "score":
        usage = replace(usage, completion_tokens=0)
        own = {"object": "scoring", "scores": found}
    else:
        data = [{"object": "score", "index": index, "score": of_item[0]} for index, of_item in enumerate(found)]
        own = {"object": "list", "data": data}
    return orjson.dumps({"id": head.id, "created": head.created, "model": head.model, **own, "usage": usage.object()})
