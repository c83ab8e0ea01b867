"""Reasoning of chats: the fields for it, its limit, and the form of what stands behind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from raydix.engine.api.spec import GenerationSpec, ReasoningUse
from raydix.engine.api.validation import INTEGRAL, StrictModel
from raydix.engine.core.answers.lead import Lead
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.answers.reasoning_limit import ReasoningLimit
from raydix.engine.core.errors import RequestError
from raydix.engine.core.ingress.parsers.events import WHITESPACE
from raydix.engine.core.ingress.parsers.reasoning import REASONING_TAGS, begins_inside, ends_reasoning

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

FULL_EFFORTS = ("high", "xhigh", "max")  # those that are as much as the model likes, where nothing limits them


class ReasoningFields(StrictModel):
    """Reasoning of the model before its answer."""

    include_reasoning: bool | None = Field(
        default=None, description="The answer has its reasoning beside the text; true. The tokens count in either case."
    )
    separate_reasoning: bool | None = Field(
        default=None, description="Reasoning is told from the text; true. With false the text has all that is written."
    )
    reasoning_effort: Effort | None = Field(
        default=None,
        description="For chat templates with a variable `reasoning_effort`, or `enable_thinking`, which `none` sets to "
        "false. Without the former the others limit the reasoning to the tokens in `model.effort_tokens`; ignored "
        "where the model has no reasoning.",
    )
    thinking_token_budget: Annotated[int, Field(ge=-1), INTEGRAL] | None = Field(
        default=None, description="The end of the reasoning is forced behind so many tokens; -1 for never, the default."
    )

    def reasoning_use(self) -> ReasoningUse:
        """Return the fields in normal form."""
        return ReasoningUse(
            is_separate=self.separate_reasoning is not False,
            is_shown=self.include_reasoning is not False,
            effort=self.reasoning_effort,
            max_tokens=None if self.thinking_token_budget == -1 else self.thinking_token_budget,
        )


def with_effort(
    spec: GenerationSpec, template: str, limits: Mapping[str, int], *, has_reasoning: bool = True
) -> GenerationSpec:
    """Have a chat's effort act by the variables of its `template`, and where these do not tell efforts apart by a limit
    of the reasoning's tokens, which `limits` has by effort.

    An effort that nothing acts on is named among the fields without effect if it is a hint, `none`, or one of
    `FULL_EFFORTS`, or if the model has no reasoning or the request has a limit of its own; `none` of a model without
    reasoning is not named. Raises RequestError for any other effort.
    """
    asked = spec.reasoning
    effort = asked.effort
    # The limit is there already where a chat is read once more.
    if effort is None or asked.limit_param == asked.param:
        return spec
    arguments = effort_arguments(effort, template)
    # A client's own arguments go before those made of the effort.
    spec = replace(spec, template=replace(spec.template, arguments={**arguments, **spec.template.arguments}))
    # Without reasoning there is none, as the client asks.
    if "reasoning_effort" in arguments or (effort == "none" and (arguments or not has_reasoning)):
        return spec

    # A limit that the request itself gives goes before that of the effort.
    limit = limits.get(effort) if has_reasoning and asked.max_tokens is None else None
    if limit is not None:
        reasoning = replace(asked, max_tokens=limit, limit_param=asked.param)
        applied = f"{asked.param}:thinking_token_budget:{limit}"
        return replace(spec, reasoning=reasoning, applied=(*spec.applied, applied))
    if arguments:
        return spec
    if not has_reasoning or asked.is_hint or asked.max_tokens is not None or effort in (*FULL_EFFORTS, "none"):
        ignored = spec.ignored if asked.param in spec.ignored else (*spec.ignored, asked.param)
        return replace(spec, ignored=ignored)
    raise RequestError(
        f"'{asked.param}' of '{effort}' is not supported: the chat template of this model does not know it, and no "
        "limit of tokens stands for it.",
        param=asked.param,
    )


def effort_arguments(effort: str, template: str) -> Mapping[str, object]:
    """The variables by which a chat template is told of an effort; none if it knows none."""
    # A name in the source of the template is enough: a template that only mentions it is given a variable that it does
    # not use.
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    return {}


def with_limit(
    spec: GenerationSpec,
    prompt: str,
    encode: Callable[[str], Sequence[int]],
    pieces: Mapping[int, bytes],
    tags: tuple[str, str] = REASONING_TAGS,
) -> GenerationSpec:
    """Have the reasoning of an answer to the rendered prompt end in time, if the request limits it. `encode` makes ids
    of a text; `pieces` as `tag_pieces`, of the `tags` around the reasoning.

    Raises RequestError where a tag of reasoning is more than one token; other opening tags may be several.
    """
    limit = spec.reasoning.max_tokens
    if limit is None:
        return spec
    opening, closing = map(encode, tags)
    lead = lead_of(prompt, tags)
    # The closing tag is forced as one token; the opening one must be seen, unless the prompt has it.
    is_seen = lead.is_open or len(opening) == 1 or tags is not REASONING_TAGS
    if len(closing) != 1 or not is_seen:
        param = spec.reasoning.limit_param
        raise RequestError(
            f"'{param}' is not supported: this model's tokenizer has no tokens for the tags of reasoning.", param=param
        )
    whole = {ids[0]: tag for ids, tag in ((opening, lead.opening), (closing, lead.closing)) if len(ids) == 1}
    known = ReasoningLimit(limit, closing[0], lead, {**pieces, **whole})
    return replace(spec, sampling=replace(spec.sampling, reasoning_limit=known))


def with_lead(spec: GenerationSpec, prompt: str) -> GenerationSpec:
    """Have the grammar of an answer, if there is one, begin behind the reasoning that the rendered prompt allows.

    Raises RequestError where the answer begins in reasoning that is to be part of its text.
    """
    grammar = spec.sampling.grammar
    if grammar is None:
        return spec
    is_open = begins_inside(prompt)
    # The grammar would hold the reasoning to the form of the answer.
    if is_open and not spec.reasoning.is_separate:
        raise RequestError(
            f"'{spec.grammar_param}' together with 'separate_reasoning' false is not supported where the answer begins "
            "with reasoning, as this model's chat template has it.",
            param=spec.grammar_param,
        )
    lead = lead_of(prompt) if is_open or _may_reason(spec, prompt) else None
    return replace(spec, sampling=replace(spec.sampling, grammar=replace(grammar, lead=lead)))


def lead_of(prompt: str, tags: tuple[str, str] = REASONING_TAGS) -> Lead:
    """The reasoning with which an answer to the rendered prompt may begin, between these tags."""
    opening, closing = (tag.encode() for tag in tags)
    return Lead(opening, closing, is_open=prompt.rstrip(WHITESPACE).endswith(tags[0]))


def _may_reason(spec: GenerationSpec, prompt: str) -> bool:
    """True if the model itself may open reasoning, told from the text: at an answer's beginning, unless the request
    wants none."""
    is_off = spec.reasoning.effort == "none" or spec.template.arguments.get("enable_thinking") is False
    is_beginning = spec.chat_end is ChatEnd.ANSWER and not ends_reasoning(prompt)
    return spec.reasoning.is_separate and is_beginning and not is_off
