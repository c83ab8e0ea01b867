"""Questions to a `Reader`, and its readings."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from raydix.engine.api.context_edits import ContextEdits, Edit
from raydix.engine.api.spec import ChatMessage, GenerationSpec
from raydix.engine.api.validation import NO_RULES, BodyRules
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.divergence import PromptPart
from raydix.engine.core.ingress.parsers import HERMES, ToolFormat
from raydix.engine.core.types import Grammar
from raydix.engine.serving.served_model import ServedModel

Request: TypeAlias = tuple[str, bytes] | GenerationSpec
"""The name of a route and a body, or a request of the Python handle."""
TokenRoute: TypeAlias = Literal["tokenize", "detokenize"]
TokenIds: TypeAlias = "array[int]"


@dataclass(frozen=True, slots=True)
class ReadingFacts:
    """Facts of the model and the configuration that reading needs."""

    model: ServedModel
    folder: Path
    """Folder of the tokenizer."""
    special_tokens_in_messages: bool
    tool_format: ToolFormat = HERMES
    """Format in which the model writes calls."""
    has_reasoning: bool = False
    """True if the model writes reasoning between tags."""
    effort_tokens: Mapping[str, int] = field(default_factory=dict)
    """Limits of the reasoning by effort, for chat templates that do not tell efforts apart."""
    chat_templates_in_requests: bool = False
    rules: BodyRules = NO_RULES
    uses_predictions: bool = False
    """True if workers make drafts of clients' predictions."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A valid request and its tokens. Of a completion `prompts` has the ids of each prompt; a chat has `chat`."""

    spec: GenerationSpec
    """Request whose `prompts` keep only texts that will be echoed."""
    prompts: tuple[TokenIds, ...] = ()
    chat: EncodedText | None = None
    marked_tokens: tuple[int, ...] = ()
    """Tokens of the prompt before each of the request's marks."""
    unread: GenerationSpec | None = None
    """The request before it was read, where its conversation may be compacted."""
    earlier: bytes = b""
    """The conversation that the request went on from, as it was."""
    edits: ContextEdits | None = None
    """What was left out of the client's chat, where the request asks for edits."""
    parts: tuple[PromptPart, ...] = ()
    """Digests of a chat's parts: of a long one they take long, too."""
    prediction: Sequence[int] = ()
    """Tokens of the client's guess of a chat's answer, where workers draft from predictions."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """An answered chat, and a question for its next turn's first tokens (`raydix.engine.model.chats.next_turn`)."""

    messages: tuple[ChatMessage, ...]
    prompt: EncodedText
    answer: ChatMessage
    tools: tuple[Mapping[str, object], ...] = ()
    template: ChatTemplate = MODEL_TEMPLATE
    edits: tuple[Edit, ...] = ()
    """Edits of the next turn's messages, if the client asks for the same again."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A body of `/tokenize` or `/detokenize`."""

    route: TokenRoute
    body: bytes
    models: tuple[str, ...]
    """Names of models that the tenant's requests may have, the model's own first."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """A body of `/v1/chat/completions/batch`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class GrammarQuestion:
    """A question whether a grammar can be compiled; the answer is the grammar in canonical form."""

    grammar: Grammar
    param: str
    """The request's field with the grammar."""


Work: TypeAlias = Request | NextTurn | TokenRequest | GrammarQuestion | Conversations
"""Anything that a `Reader` answers."""
