"""`GenerationSpec`: one request after validation, the same over HTTP and through the Python handle.

Its `Sampling` are as the client asked for. Values that depend on the model (context length, vocabulary,
end-of-sequence ids) or on the choice are settled by `sampling_params`, which the ingress calls once per choice after
tokenizing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from raydix.engine.api.context_edits import Edit
from raydix.engine.api.validation import name_all
from raydix.engine.core.answers.prompt_form import MODEL_TEMPLATE, ChatEnd, ChatTemplate
from raydix.engine.core.errors import ContextLengthError, RequestError
from raydix.engine.core.objectives import NO_OBJECTIVES, Objectives
from raydix.engine.core.types import Sampling

Prompt: TypeAlias = str | tuple[int, ...]
Api: TypeAlias = Literal["openai", "messages", "responses"]
"""API whose form an answer has; of OpenAI's completions and chats `GenerationSpec.kind` says which."""
ChatMessage: TypeAlias = Mapping[str, object]
"""`role` and `content` (str), and further keys for the chat template: `name`, `tool_call_id`, `tool_calls`."""

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's `max_tokens` of a completion that does not say; a chat may fill the context

DEFAULT_THRESHOLD = 150_000  # Anthropic's default number of tokens above which a conversation begins anew

MAX_OBJECTIVE_MS = 3_600_000  # bound of an objective: an hour

MAX_LISTED = 2**20  # log-probabilities of a response that lists all tokens at each position

_SEED_MASK = 2**63 - 1
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class ContinuedAnswer:
    """An assistant's message whose token ids the client names: by reference, or as they are."""

    index: int
    """Number of the message."""
    content: str | None
    """Text that the ids stand for according to the client; None if the client gives no text."""
    reference: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def param(self) -> str:
        return f"messages[{self.index}].{'id' if self.token_ids is None else 'token_ids'}"


@dataclass(frozen=True, slots=True)
class PromptMark:
    """A place in a chat up to which the prompt's KV is to be kept longer than the rest."""

    index: int
    """Number of the message."""
    length: int
    """Characters of the message's content before the mark."""
    ttl_s: float
    """Seconds from the end of the request on."""


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """Part of a request of OpenAI's Responses API that makes a conversation of stored responses."""

    previous: str | None
    """Id of the response to go on from."""
    is_stored: bool
    num_own: int
    """Messages at the end that are the request's input. Instructions stand before, which a later response does not
    have."""
    items: tuple[bytes, ...]
    """The input as the API lists it, without ids: JSON of each item."""
    repeated: Mapping[str, object]
    """Fields that the response repeats."""
    shows_messages: bool = False
    """The response has prompt and answer as texts and token ids."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of the functions that stand in namespaces, by the name that the model knows."""
    num_instructions: int = 0
    """Messages at the beginning that are the request's instructions."""
    is_whole: bool = False
    """The messages have those of the response to go on from."""
    conversation: str | None = None
    """Id of the conversation that the request goes on from, and that the answer is added to."""
    earlier: bytes = b""
    """The conversation (`raydix.engine.api.openai_responses.conversations`), until its messages stand in the prompt."""
    in_background: bool = False
    """The response is generated whether its client waits or not."""


@dataclass(frozen=True, slots=True)
class CompactionUse:
    """The way in which a conversation that has become long begins anew with a summary."""

    threshold: int | None
    """Tokens of the prompt above which the summary is made; 0: it is made in any case, and None: above
    `DEFAULT_THRESHOLD`, or above three quarters of the context where that is less."""
    keeps_words: bool = True
    """What the user has said stays word by word beside the summary; false: the question at the end alone does."""
    instructions: str | None = None
    """Asks for the summary; None: the words of raydix do."""
    ends_answer: bool = False
    """The answer ends behind the summary."""

    def within(self, max_model_len: int) -> "CompactionUse":
        """Settle the threshold of a request that names none, for a context of `max_model_len` tokens."""
        if self.threshold is not None:
            return self
        # A client that names none knows nothing of this context: above it there would be an error, and no summary.
        return replace(self, threshold=min(DEFAULT_THRESHOLD, max_model_len * 3 // 4))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that an answer may call."""

    definitions: tuple[Mapping[str, Any], ...]
    """Definitions in the form that chat templates know; at least one."""
    may_call: bool = True
    """False: the prompt has the functions, but no part of the answer is a call."""
    is_single: bool = False
    """The answer ends with its first call."""
    required: tuple[str, ...] = ()
    """Functions of which the answer must call one or several; empty if it need not call any."""
    strict: tuple[str, ...] = ()
    """Functions whose arguments must follow their schemas."""
    schema_field: str = "function.parameters"
    """Field of a tool with its schema, for error messages."""
    inputs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Custom tools, whose calls have a text as their input: by name the schema of the arguments, which say the text."""
    input_field: str = "custom.format.grammar.definition"
    """Field of a custom tool with the grammar of its input, for error messages."""

    @property
    def schemas(self) -> Mapping[str, Mapping[str, object]]:
        """Schema of the arguments of each function, by name."""
        functions = [definition["function"] for definition in self.definitions]
        return {each["name"]: self.inputs.get(each["name"], each["parameters"]) for each in functions}


@dataclass(frozen=True, slots=True)
class Truncation:
    """Part of a prompt that is kept."""

    num_tokens: int | None
    """None: as many as leave room for the answer."""
    keeps_end: bool = True

    def applied(self, token_ids: Sequence[int], spec: "GenerationSpec", max_model_len: int) -> Sequence[int]:
        """The tokens that are kept. Raises RequestError for more than the context has."""
        limit = self.num_tokens
        if limit is None:
            # At least one token is kept: a prompt of none has no next token. A request without a limit is left room for
            # one.
            limit = max(1, max_model_len - (1 if spec.max_tokens is None else spec.max_tokens))
        elif limit > max_model_len:
            raise RequestError(
                f"'truncate_prompt_tokens' must be at most {max_model_len}, the model's context, got {limit}.",
                param="truncate_prompt_tokens",
            )
        return token_ids[-limit:] if self.keeps_end else token_ids[:limit]


@dataclass(frozen=True, slots=True)
class EmbeddingUse:
    """Form of the vectors that answer a request for embeddings."""

    encoding: Literal["float", "base64"] = "float"
    is_normalized: bool = True
    """Vectors have length 1."""
    dimensions: int | None = None
    """Number of values that the client expects."""

    def check(self, hidden_size: int) -> None:
        """Raise RequestError unless a hidden state of `hidden_size` values is a vector of the expected size."""
        if self.dimensions not in (None, hidden_size):
            raise RequestError(
                f"'dimensions' must be {hidden_size}, the size of this model's hidden states, or be left out, got "
                f"{self.dimensions}: a part of a hidden state is no embedding of its own.",
                param="dimensions",
            )


ScoreForm: TypeAlias = Literal["generative_scoring", "score"]
"""Route whose form the scores of labels have."""


@dataclass(frozen=True, slots=True)
class LabelScoring:
    """Tokens whose probabilities behind each prompt are asked for."""

    form: ScoreForm
    labels: tuple[int, ...]
    is_relative: bool
    """Probabilities among the labels alone."""


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """Wishes for the reasoning before an answer, where the model writes any."""

    is_separate: bool = True
    """False: it is part of the text."""
    is_shown: bool = True
    effort: str | None = None
    """Effort for the chat template; None: as the template has it."""
    param: str = "reasoning_effort"
    """Name of the request's field with the effort."""
    max_tokens: int | None = None
    """The reasoning's closing tag is forced behind so many tokens; None: never."""
    limit_param: str = "thinking_token_budget"
    """Name of the request's field with `max_tokens`."""
    is_hint: bool = False
    """True if an effort that nothing acts on is left without effect; false: it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSpec:
    """Form in which a request wants its answers."""

    stream: bool = False
    include_usage: bool = False
    """A stream ends with the request's usage."""
    continuous_usage: bool = False
    """Each chunk of a stream has the usage of its choice so far."""
    echo: bool = False
    """A completion's text begins with the prompt's, and so do its log-probabilities; a chat's text begins with that of
    the last message where the answer goes on with it, or is of the same role."""
    include_stop: bool = False
    """The stop string that ended the text stays in it."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the text."""
    spaces_between_special_tokens: bool = True
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Log-probabilities name tokens by their ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """Place of a request among others, and its names."""

    user: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: int = 0
    """Requests of lower numbers go first."""
    objectives: Objectives = NO_OBJECTIVES


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSpec:
    """Demands on what is kept of a request after its end."""

    salt: str | None = None
    """Cached prefixes are shared with requests of the same salt only."""
    priority: int = 0
    """KV of lower numbers is evicted first, among that of one tenant."""
    ttl_s: float | None = None
    """Seconds from the end of the request on, after which its KV is evicted before any other; None: no such time."""
    marks: tuple[PromptMark, ...] = ()
    """Marks in the order of the prompt (chats only)."""
    store: bool = False
    """Each answer gets a reference by which a later chat can go on from its token ids."""


# Sampling parameters of a request without sampling fields; limit and seed are settled by `sampling_params`.
DEFAULT_SAMPLING = Sampling(max_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A valid request. For a completion `prompts` has at least one element, for a chat `messages` has."""

    kind: Literal["completion", "chat"]
    api: Api = "openai"
    model: str | None = None
    """None: the one model there is (Python handle only)."""
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    continued: tuple[ContinuedAnswer, ...] = ()
    """Messages that stand in the prompt as token ids."""
    given_prompt: tuple[int, ...] | None = None
    """Ids of a chat's prompt, in place of what its messages would be rendered to."""
    template: ChatTemplate = MODEL_TEMPLATE
    """Template that renders the messages."""
    text_if_missing: bool = False
    """Allows a message's text to be tokenized if its reference is unknown."""
    tools: ToolUse | None = None
    reasoning: ReasoningUse = ReasoningUse()
    chat_end: ChatEnd = ChatEnd.ANSWER
    embedding: EmbeddingUse | None = None
    """The answers are embeddings of the prompts; None: they are generated."""
    scoring: LabelScoring | None = None
    """The answers are scores of labels."""
    n: int = 1
    """Choices per prompt."""
    best_of: int | None = None
    """Samples per prompt, of which the `n` with the highest mean log-probability are the choices; None for `n`."""

    sampling: Sampling = DEFAULT_SAMPLING
    """Parameters as asked for, except limit and seed: these depend on the model and the choice (`sampling_params`)."""
    grammar_param: str | None = None
    """Name of the request's field with the grammar of `sampling`, for error messages."""
    all_logprobs: bool = False
    """Log-probabilities of all tokens at each position."""
    all_prompt_logprobs: bool = False
    """Log-probabilities of all tokens at each position of the prompt, but the first."""
    truncation: Truncation | None = None
    max_tokens: int | None = None
    """None: what the context has room for, or a completion's default."""
    is_capped: bool = False
    """Allows a `max_tokens` for which the context has no room: the answer may fill the context then."""
    seed: int | None = None
    """None: another one for each request."""
    ignore_eos: bool = False
    """The model's own end-of-sequence ids do not end generation."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens are never completed; the reading makes `sampling.bad_words` of them."""
    stop: tuple[str, ...] = ()
    form: FormSpec = FormSpec()

    add_special_tokens: bool = True
    """A text begins with the special tokens that the model wants before it (completions only)."""
    suffix: str | None = None
    """Text behind the answer (completions only)."""

    prediction: str | None = None
    """Guess of the answer, for drafts (chats only)."""

    service: ServiceSpec = ServiceSpec()
    retention: RetentionSpec = RetentionSpec()
    previous_message: str | None = None
    """Id of the answer whose prompt this one is compared with; None: the client does not ask."""
    edits: tuple[Edit, ...] | None = None
    """Edits of the messages before their prompt is made (chats only); None: the client does not ask what was left
    out."""
    turn: ResponseTurn | None = None
    compaction: CompactionUse | None = None
    """The way in which the chat begins anew once it is long; None: it never does, or is being read as it is."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that have no effect: hints that nothing here acts on, and unknown ones."""
    applied: tuple[str, ...] = ()
    """Hints that act in another way than by their own switch: the field, what it became and its value, with colons."""

    @property
    def num_choices(self) -> int:
        """Samples to generate, all prompts together."""
        # A chat has messages and no prompts, and counts as one prompt.
        return self.num_samples * max(1, len(self.prompts))

    @property
    def num_samples(self) -> int:
        """Samples to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def echoes_prompt(self) -> bool:
        return self.form.echo and self.kind == "completion"

    @property
    def has_inputs(self) -> bool:
        """True for a request of many inputs with short answers, of which some run at a time."""
        return self.embedding is not None or self.scoring is not None

    @property
    def prompt_param(self) -> str:
        """Name of the request's field with the prompt, for error messages."""
        if self.turn is not None or (self.embedding is not None and self.kind != "chat"):
            return "input"
        if self.scoring is not None:
            return "items"
        if self.given_prompt is not None:
            return "input_ids"
        return "messages" if self.kind == "chat" else "prompt"

    @property
    def is_unresolved(self) -> bool:
        """True while the messages may lack those of the response or conversation to go on from, whose answers would be
        `continued`."""
        turn = self.turn
        return turn is not None and not turn.is_whole and (turn.previous is not None or turn.conversation is not None)


def sampling_params(
    spec: GenerationSpec,
    *,
    prompt_len: int,
    max_model_len: int,
    eos_token_ids: Collection[int],
    vocab_size: int,
    default_seed: int,
    choice: int = 0,
) -> Sampling:
    """Return the sampling parameters of one choice of `spec`.

    `prompt_len` and `max_model_len` are in tokens; `choice` is the choice's index in the response (prompt by prompt,
    `n` each). With a `seed` in the request, a choice depends only on its prompt and its place among that prompt's
    choices; without, every choice draws from `default_seed` and its index.

    Raises ContextLengthError if prompt and `max_tokens` do not fit, RequestError for ids outside the vocabulary and for
    `min_tokens` above `max_tokens`, or for which no token is left.
    """
    asked = spec.sampling
    max_tokens = max_tokens_for(spec, prompt_len, max_model_len)
    # With a seed of the client's a prompt's choices do not depend on the other prompts of the same request.
    seed, index = (default_seed, choice) if spec.seed is None else (spec.seed, choice % spec.num_samples)
    own_stops = () if spec.ignore_eos else tuple(sorted(eos_token_ids))
    # The model's own ends come first, each id once: the order is part of the request that workers get.
    stops = tuple(dict.fromkeys((*own_stops, *asked.stop_token_ids)))
    _require_ids(asked, vocab_size, "logprob_token_ids" if spec.scoring is None else "label_token_ids")
    _require_possible(spec, max_tokens, vocab_size, stops)
    _require_few_listed(spec, prompt_len, max_tokens, vocab_size)
    return replace(
        asked,
        max_tokens=max_tokens,
        seed=_choice_seed(seed, index),
        stop_token_ids=stops,
        logprobs=_num_logprobs(spec, vocab_size),
        prompt_logprobs=_num_prompt_logprobs(spec, vocab_size),
    )


def _require_ids(asked: Sampling, vocab_size: int, labels_param: str) -> None:
    """Raise RequestError for ids outside the vocabulary. `labels_param`: the field with `logprob_token_ids`."""
    require_token_ids(asked.stop_token_ids, vocab_size, "stop_token_ids")
    require_token_ids([token for token, _ in asked.logit_bias], vocab_size, "logit_bias")
    require_token_ids(asked.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    require_token_ids(asked.logprob_token_ids, vocab_size, labels_param)


def _require_possible(spec: GenerationSpec, max_tokens: int, vocab_size: int, stops: Collection[int]) -> None:
    """Raise RequestError for an answer that cannot be generated."""
    asked = spec.sampling
    if asked.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' must be at most max_tokens ({max_tokens}), got {asked.min_tokens}.", param="min_tokens"
        )
    # Below min_tokens the stops are masked, too, and then no token at all would be left to sample from.
    if asked.allowed_token_ids is not None and asked.min_tokens and set(stops).issuperset(asked.allowed_token_ids):
        raise RequestError(
            "'allowed_token_ids' must have a token that does not end the answer, since 'min_tokens' is given.",
            param="allowed_token_ids",
        )


def _require_few_listed(spec: GenerationSpec, prompt_len: int, max_tokens: int, vocab_size: int) -> None:
    """Raise RequestError for an answer that would list the whole vocabulary at too many positions."""
    # The whole response is bounded, not one answer: it is built in the ingress, with all choices in memory.
    if spec.all_logprobs and spec.num_choices * max_tokens * vocab_size > MAX_LISTED:
        most = MAX_LISTED // (spec.num_choices * vocab_size)
        raise RequestError(
            f"Log-probabilities of all {vocab_size} tokens are limited to {most} tokens of each of {spec.num_choices} "
            f"answers, but 'max_tokens' is {max_tokens}.",
            param="max_tokens",
        )
    # Nothing comes before a prompt's first token, which has no log-probability.
    if spec.all_prompt_logprobs and spec.num_choices * (prompt_len - 1) * vocab_size > MAX_LISTED:
        most = MAX_LISTED // (spec.num_choices * vocab_size) + 1
        raise RequestError(
            f"Log-probabilities of all {vocab_size} tokens are limited to prompts of {most} tokens for each of "
            f"{spec.num_choices} answers, but a prompt has {prompt_len}. 'prompt_logprobs' up to 20 are not limited.",
            param="prompt_logprobs",
        )


def _num_logprobs(spec: GenerationSpec, vocab_size: int) -> int | None:
    """Number of alternatives to report for each token, as `Sampling.logprobs`; samples are compared by their
    tokens' log-probabilities."""
    if spec.all_logprobs:
        return vocab_size
    # `best_of` ranks samples by the mean log-probability of their tokens, also where the client asks for none.
    is_compared = spec.sampling.logprobs is None and spec.num_samples > spec.n
    return 0 if is_compared else spec.sampling.logprobs


def _num_prompt_logprobs(spec: GenerationSpec, vocab_size: int) -> int | None:
    """Number of alternatives to report for each prompt token, wherever they are shown; None: report nothing."""
    if spec.all_prompt_logprobs:
        return vocab_size
    # An echoed completion lists the prompt's tokens like those of the answer, so both are scored with the larger
    # number.
    echoed = spec.sampling.logprobs if spec.echoes_prompt else None
    return max((count for count in (spec.sampling.prompt_logprobs, echoed) if count is not None), default=None)


def require_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise RequestError naming `param` and all ids at fault unless all ids are in `[0, vocab_size)`."""
    # Two passes in C for thousands of ids; the wrong ones are only looked for where there are some.
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = name_all(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"'{param}' has token ids that are out of vocabulary: {wrong}. The model's vocab_size is {vocab_size}, so "
            f"its ids are 0 to {vocab_size - 1}.",
            param=param,
        )


def max_tokens_for(spec: GenerationSpec, prompt_len: int, max_model_len: int) -> int:
    """`max_tokens`, explicit or default. Raises ContextLengthError if it and the prompt do not fit into the context."""
    room = max_model_len - prompt_len
    # A request for no tokens may fill the context: its prompt is scored or embedded, and nothing is put behind it.
    if room < (spec.max_tokens != 0):
        raise ContextLengthError.of_prompt(
            f"This model's maximum context length is {max_model_len} tokens, "
            f"but your prompt has {prompt_len} tokens and leaves no room for an answer. "
            f"Please shorten '{spec.prompt_param}'.",
            param=spec.prompt_param,
            num_tokens=prompt_len,
            limit=max_model_len - 1,
        )

    if spec.max_tokens is None:
        return room if spec.kind == "chat" else min(room, DEFAULT_COMPLETION_TOKENS)

    if spec.max_tokens > room and spec.is_capped:
        return room

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
