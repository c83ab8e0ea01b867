"""Makes tokens of a request's bytes: parse, check, render, tokenize.

No Ray, and no input but the request and the model's facts, so any process may do the reading: the ingress for short
requests, `reader_process` for long ones.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

from raydix.engine.api.context_edits import edited
from raydix.engine.api.conversations import naming, parse_conversations
from raydix.engine.api.openai_responses.conversations import resolved
from raydix.engine.api.reasoning import with_effort, with_lead, with_limit
from raydix.engine.api.routes import parse
from raydix.engine.api.spec import ChatMessage, GenerationSpec, Prompt, ToolUse, max_tokens_for, require_token_ids
from raydix.engine.api.tokenization import detokenize_body, parse_detokenize, parse_tokenize, tokenize_body
from raydix.engine.api.tools import with_calls
from raydix.engine.core.answers.prompt_form import ChatTemplate
from raydix.engine.core.answers.reasoning_limit import tag_pieces
from raydix.engine.core.answers.transcripts import EncodedText
from raydix.engine.core.errors import ContextLengthError, RequestError
from raydix.engine.core.ingress.parsers import harmony
from raydix.engine.core.ingress.parsers.harmony_forms import frame, require_beginning
from raydix.engine.core.ingress.parsers.reasoning import REASONING_TAGS
from raydix.engine.core.types import Grammar
from raydix.engine.model.chats import encode_chat, next_turn, render_chat, tokens_before
from raydix.engine.model.harmony import EFFORT
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.prompt_records import parts_of
from raydix.engine.serving.reader_work import (
    Conversations,
    GrammarQuestion,
    NextTurn,
    Reading,
    ReadingFacts,
    TokenIds,
    TokenRequest,
    Work,
)
from raydix.engine.serving.served_model import require_model

MIN_SLICE = 16_384  # length of a slice in characters: so long that the cuts hardly change the number of tokens
SURPLUS = 2  # times the most tokens: a text whose slices have more tokens than this does not fit as a whole
# Tokens of the longest text that `/tokenize` takes, where the context is not longer: some 50 MB while it is read.
MOST_COUNTED = 131_072
# Times the context: a chat may be so long before its edits, if the context is longer than half of `MOST_COUNTED`.
UNEDITED = 2

MAX_BAD_TOKENS = 1024  # tokens of all bad words of a request
TRUNCATED = 16  # characters of a text to be truncated, for each token of the context: all of the text is tokenized


def template_error() -> RequestError:
    """The error of a client's chat template that goes on beyond its limits."""
    return RequestError("'chat_template' takes too long or too much memory.", param="chat_template")


class Reader:
    """Reads requests to one model. `confined` limits the time and memory of clients' own chat templates."""

    def __init__(
        self,
        facts: ReadingFacts,
        tokenizer: Tokenizer,
        confined: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._confined = confined
        self._lengths = TextLengths(tokenizer, facts.model.max_model_len)
        table = tokenizer.token_bytes(skip_special_tokens=False) if facts.has_reasoning else None
        self._tags = harmony.REASONING_TAGS if facts.tool_format.has_channels else REASONING_TAGS
        self._tag_pieces = tag_pieces(table or (), [tag.encode() for tag in self._tags])
        # Where the template has no switch, no reasoning is reasoning that ends at once.
        self._effort_tokens = {"none": 0, **facts.effort_tokens} if self._can_limit() else {}

    def answer(self, request: Work) -> "Reading | list[Reading] | TokenIds | bytes | Grammar":
        """Return the outcome of `read`, `read_all`, `next_turn`, `check`, `tokenize` or `detokenize` for this request;
        raises their errors."""
        request = self.parse(request)
        if isinstance(request, GrammarQuestion):
            return self.check(request)
        if isinstance(request, NextTurn):
            return self.next_turn(request)
        if isinstance(request, TokenRequest):
            answer = self.tokenize if request.route == "tokenize" else self.detokenize
            return answer(request.body, request.models)
        if isinstance(request, Conversations):
            return self.read_all(request)
        return self.read(request)

    def _can_limit(self) -> bool:
        """True if reasoning can be made to end: its tags are tokens of their own."""
        tags = (self._tokenizer.encode(tag, add_special_tokens=False) for tag in self._tags)
        return self._facts.has_reasoning and all(len(ids) == 1 for ids in tags)

    def parse(self, request: Work) -> GenerationSpec | NextTurn | TokenRequest | GrammarQuestion | Conversations:
        """Return the request of a body. Raises RequestError naming the field at fault."""
        if isinstance(request, tuple):
            route, body = request
            return parse(route, body, self._facts.rules)
        return request

    def runs_program(self, request: Work) -> bool:
        """True if reading a parsed request runs a client's own template, which may take long."""
        if not self._facts.chat_templates_in_requests:
            return False
        if isinstance(request, TokenRequest) and request.route == "tokenize":
            request = parse_tokenize(request.body).prompt
        return isinstance(request, GenerationSpec | NextTurn) and request.template.source is not None

    def check(self, question: GrammarQuestion) -> Grammar:
        """Return a grammar in canonical form. Raises RequestError naming the place where it cannot be compiled."""
        from raydix.engine.serving.grammar_check import check_in_small_stack

        return check_in_small_stack(question.grammar, question.param, self._tokenizer.plain_added_tokens())

    def next_turn(self, turn: NextTurn) -> TokenIds:
        """Return the token ids with which the next turn's prompt begins; none if they are uncertain."""
        messages, answer = self._edited_turn(turn) if turn.edits else (turn.messages, turn.answer)
        with self._limits(turn.template):
            token_ids = next_turn(
                self._tokenizer,
                turn.prompt,
                messages,
                answer,
                tools=turn.tools,
                template=turn.template,
                special_tokens=self._facts.special_tokens_in_messages,
            )
        return array("I", token_ids)

    def _edited_turn(self, turn: NextTurn) -> tuple[Sequence[ChatMessage], ChatMessage]:
        """The messages and the answer of a turn as the next turn's edits will leave them: with the results of the
        answer's calls another old result may be left out."""
        calls = cast(Sequence[Mapping[str, Any]], turn.answer.get("tool_calls") or ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": ""} for call in calls]
        tools = ToolUse(turn.tools) if turn.tools else None
        spec = GenerationSpec(kind="chat", messages=turn.messages, tools=tools, template=turn.template)
        messages, _ = edited((*turn.messages, turn.answer, *results), turn.edits, partial(self._num_tokens, spec))
        return messages[: len(turn.messages)], messages[len(turn.messages)]

    def _num_tokens(self, spec: GenerationSpec, messages: Sequence[ChatMessage]) -> int:
        """Tokens of the prompt of a request with these messages, which may be longer than the context: edits are to
        shorten it."""
        limit = max(UNEDITED * self._facts.model.max_model_len, MOST_COUNTED)
        return len(self._chat_ids(replace(spec, messages=tuple(messages)), limit)[0].token_ids)

    def read_all(self, conversations: Conversations) -> list[Reading]:
        """Read each conversation as a request of its own; errors as `read_body`."""
        readings = []
        for number, spec in enumerate(parse_conversations(conversations.body)):
            with naming(number):
                readings.append(self.read(spec))
        return readings

    def read_body(self, route: str, body: bytes) -> Reading:
        """Read the request in an HTTP body. Raises RequestError as `read`, or naming the field at fault."""
        reading = self.answer((route, body))
        assert isinstance(reading, Reading)
        return reading

    def read(self, spec: GenerationSpec) -> Reading:
        """Tokenize a request; one that goes on from a stored response only with the messages of that response.

        Raises:
            ContextLengthError: a prompt and the answer do not fit into the context.
            RequestError: the prompt is not valid for the model.
        """
        # The messages of the response to go on from are elsewhere: the caller adds them, and the request is read again.
        if spec.is_unresolved:
            return Reading(spec)
        if spec.compaction is not None:
            # The request goes back as it came, too: a summary of its conversation is asked for in other words.
            return replace(self.read(replace(spec, compaction=None)), unread=spec)
        if spec.turn is not None and spec.turn.earlier:
            spec = resolved(spec)
        if spec.reasoning.effort is not None:
            # Only names of variables are looked for in a template.
            is_harmony = self._tokenizer.writes_harmony(spec.template)
            source = EFFORT if is_harmony else spec.template.source or self._tokenizer.chat_template
            spec = with_effort(spec, source, self._effort_tokens, has_reasoning=self._facts.has_reasoning)
        if spec.tools is not None:
            spec = self._with_calls(spec)
        shows_special_tokens = not (spec.form.skip_special_tokens or spec.form.spaces_between_special_tokens)
        if shows_special_tokens and self._tokenizer.spaces_special_tokens:
            raise RequestError(
                "'spaces_between_special_tokens' must be true: this model's tokenizer puts spaces between them.",
                param="spaces_between_special_tokens",
            )
        if spec.bad_words:
            spec = replace(spec, sampling=replace(spec.sampling, bad_words=self._bad_words(spec.bad_words)))
        if spec.kind == "chat":
            return self._read_chat(spec)
        prompts = tuple(self._encode(prompt, spec) for prompt in spec.prompts)
        # A truncated text is decoded again where it is echoed: its tokens are what counts.
        shows_texts = spec.form.echo and spec.truncation is None
        shown = tuple(prompt if shows_texts and isinstance(prompt, str) else () for prompt in spec.prompts)
        return Reading(replace(spec, prompts=shown), prompts)

    def _read_chat(self, spec: GenerationSpec) -> Reading:
        """Tokenize a chat; errors as `read`."""
        edits = None
        if spec.edits is not None:
            messages, edits = edited(spec.messages, spec.edits, partial(self._num_tokens, spec))
            spec = replace(spec, messages=messages)
        chat, ignored = self._encode_chat(spec)
        spec = replace(spec, ignored=(*spec.ignored, *ignored))
        if self._facts.tool_format.has_channels:
            spec = self._in_channels(spec, chat.text)
        elif self._facts.has_reasoning:
            spec = with_lead(spec, chat.text)
        if self._facts.has_reasoning:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            spec = with_limit(spec, chat.text, encode, self._tag_pieces, self._tags)
        if self._facts.has_reasoning and spec.turn is not None and spec.sampling.logprobs is not None:
            raise RequestError(
                "'include' of log-probabilities is not supported with a model that reasons.", param="include"
            )
        return Reading(
            spec,
            chat=chat,
            marked_tokens=self._marked_tokens(spec, chat),
            edits=edits,
            parts=parts_of(spec),
            prediction=self._prediction(spec),
        )

    def _prediction(self, spec: GenerationSpec) -> TokenIds:
        """Tokens of the guess of the answer, as many as an answer can have; none where no draft is made of them."""
        if not spec.prediction or not self._facts.uses_predictions or not spec.sampling.speculation:
            return array("I")
        limit = self._facts.model.max_model_len
        # Cut before it is tokenized: a guess may be as long as a body.
        text = spec.prediction[: max(TRUNCATED * limit, MIN_SLICE)]
        return array("I", self._tokenizer.encode(text, add_special_tokens=False)[:limit])

    def _with_calls(self, spec: GenerationSpec) -> GenerationSpec:
        """Prescribe the form of calls where the request asks for it. Raises RequestError naming the field at fault."""
        return with_calls(spec, self._facts.tool_format.form, self._special())

    def _special(self) -> Mapping[str, int]:
        """Ids by name of the tokens that belong to calls."""
        ids = {name: self._tokenizer.added_id(name) for name in self._facts.tool_format.markers}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def _in_channels(self, spec: GenerationSpec, prompt: str) -> GenerationSpec:
        """Have the grammar of an answer in channels, if there is one, bind its message for the user; a grammar of calls
        is one of the whole answer. Raises RequestError where the prompt leaves no room for either."""
        grammar, tools, param = spec.sampling.grammar, spec.tools, spec.grammar_param or ""
        if grammar is None:
            return spec
        if not spec.reasoning.is_separate:
            raise RequestError(
                f"'{param}' together with 'separate_reasoning' false is not supported: this model's answers have "
                "headers, which the text would have, too.",
                param=param,
            )
        # Wherever calls are possible at all, a form is prescribed together with theirs (`with_calls`).
        if tools is not None and tools.may_call:
            require_beginning(prompt, param)
            return spec
        framed = replace(grammar, frame=frame(prompt, self._special(), param))
        return replace(spec, sampling=replace(spec.sampling, grammar=framed))

    def tokenize(self, body: bytes, models: tuple[str, ...]) -> bytes:
        """Return the response to a body of `/tokenize`, of a tenant whose requests may name these `models`.

        Raises:
            ModelNotFoundError: the request names another model.
            ContextLengthError: the prompt has more tokens than are counted.
            RequestError: the prompt is not valid for the model; or as `parse_tokenize`.
        """
        spec = parse_tokenize(body)
        if spec.prompt.model is not None:
            require_model(spec.prompt.model, models)
        limit = max(self._facts.model.max_model_len, MOST_COUNTED)
        if spec.prompt.kind == "chat":
            token_ids = self._chat_ids(spec.prompt, limit)[0].token_ids
            if spec.add_special_tokens:
                token_ids = _with_special_tokens(self._tokenizer, token_ids)
        else:
            [text] = spec.prompt.prompts
            assert isinstance(text, str)
            self._lengths.require_short(text, spec.prompt, limit)
            token_ids = self._tokenizer.encode(text, add_special_tokens=spec.add_special_tokens)
        names = self._tokenizer.names(token_ids) if spec.return_token_strs else None
        return tokenize_body(token_ids, names, self._facts.model.max_model_len)

    def detokenize(self, body: bytes, models: tuple[str, ...]) -> bytes:
        """Return the response to a body of `/detokenize`; arguments as `tokenize`. Raises RequestError."""
        request = parse_detokenize(body)
        if request.model is not None:
            require_model(request.model, models)
        require_token_ids(request.tokens, self._facts.model.vocab_size, "tokens")
        return detokenize_body(
            self._tokenizer.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of words, each as it begins a text and as it stands behind a space."""
        sequences = [
            tuple(self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for word in words
            for space in ("", " ")
        ]
        # Each token of a word is compared at each step, so their number is limited, and not that of the words.
        if not all(sequences) or sum(map(len, sequences)) > MAX_BAD_TOKENS:
            raise RequestError(f"'bad_words' must have 1 to {MAX_BAD_TOKENS} tokens.", param="bad_words")
        return tuple(dict.fromkeys(sequences))

    def _encode_chat(self, spec: GenerationSpec) -> tuple[EncodedText, Sequence[str]]:
        """Encode the prompt of a chat; `raydix.engine.serving.chats` puts in answers that the client names by their
        ids. Also returns the fields of messages without effect."""
        ignored: Sequence[str] = ()
        if spec.given_prompt is None:
            chat, ignored = self._chat_ids(spec, self._facts.model.max_model_len)
        else:
            chat = self._given(spec.given_prompt, self._facts.model.max_model_len)
        if spec.truncation is not None:
            kept = spec.truncation.applied(chat.token_ids, spec, self._facts.model.max_model_len)
            chat = EncodedText(chat.text, kept, borders=())
        max_tokens_for(spec, len(chat.token_ids), self._facts.model.max_model_len)
        return replace(chat, token_ids=array("I", chat.token_ids)), ignored

    def _given(self, token_ids: Sequence[int], limit: int) -> EncodedText:
        """The prompt of a chat whose ids the client gives, with the text of its last `limit` tokens. Raises
        RequestError for ids outside the vocabulary."""
        require_token_ids(token_ids, self._facts.model.vocab_size, "input_ids")
        # Ids come unbounded, and what does not fit into the context is refused later; its end shows whether reasoning
        # is open.
        text = self._tokenizer.decode(token_ids[-limit:], skip_special_tokens=False)
        return EncodedText(text, token_ids, borders=())

    def _chat_ids(self, spec: GenerationSpec, limit: int) -> tuple[EncodedText, Sequence[str]]:
        """The prompt of a chat of at most `limit` tokens, unless it is truncated later, and the fields of messages
        without effect."""
        with self._limits(spec.template):
            rendered = render_chat(
                self._tokenizer,
                spec.messages,
                {answer.index for answer in spec.continued},
                tools=() if spec.tools is None else spec.tools.definitions,
                template=spec.template,
                end=spec.chat_end,
                special_tokens=self._facts.special_tokens_in_messages,
            )
        self._lengths.require_short(rendered.text, spec, limit)
        encoded = encode_chat(self._tokenizer, rendered)
        require_token_ids(encoded.token_ids, self._facts.model.vocab_size, spec.prompt_param)
        return encoded, rendered.ignored

    @contextmanager
    def _limits(self, template: ChatTemplate) -> Iterator[None]:
        """Limit a client's own template. Raises RequestError where it is not allowed, or needs too much."""
        if template.source is None:
            yield
            return
        if not self._facts.chat_templates_in_requests:
            raise RequestError(
                "'chat_template' is not allowed by this server's configuration (model.chat_templates_in_requests).",
                param="chat_template",
            )
        try:
            with self._confined():
                yield
        except (TimeoutError, MemoryError) as error:
            raise template_error() from error

    def _marked_tokens(self, spec: GenerationSpec, chat: EncodedText) -> tuple[int, ...]:
        """Tokens of a prompt before each of the request's marks."""
        if not spec.retention.marks:
            return ()
        with self._limits(spec.template):
            counts = tokens_before(
                self._tokenizer,
                spec.messages,
                chat,
                [(mark.index, mark.length) for mark in spec.retention.marks],
                tools=() if spec.tools is None else spec.tools.definitions,
                template=spec.template,
                end=spec.chat_end,
                special_tokens=self._facts.special_tokens_in_messages,
            )
        return tuple(counts)

    def _encode(self, prompt: Prompt, spec: GenerationSpec) -> TokenIds:
        if isinstance(prompt, str):
            if spec.suffix is not None:
                prompt = _filled_in(self._tokenizer, prompt, spec.suffix)
            self._lengths.require_short(prompt, spec, self._facts.model.max_model_len)
            prompt = tuple(self._tokenizer.encode(prompt, add_special_tokens=spec.add_special_tokens))
            if not prompt:
                raise RequestError(f"'{spec.prompt_param}' has no tokens.", param=spec.prompt_param)
        # A text may name a token that the model has no embedding for, such as the image token of a text-only Gemma 3.
        require_token_ids(prompt, self._facts.model.vocab_size, spec.prompt_param)
        if spec.truncation is not None:
            prompt = tuple(spec.truncation.applied(prompt, spec, self._facts.model.max_model_len))
        max_tokens_for(spec, len(prompt), self._facts.model.max_model_len)
        return array("I", prompt)


class TextLengths:
    """Refuses texts that are too long for one model, without tokenizing all of them."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def require_short(self, text: str, spec: GenerationSpec, limit: int) -> None:
        """Refuse a text of more than `limit` tokens before all of it is tokenized: that takes some hundred bytes for
        each byte of text. A text to be truncated may be longer.

        Raises ContextLengthError.
        """
        if spec.truncation is not None:
            is_too_long = len(text) > max(TRUNCATED * limit, MIN_SLICE)
            about = self._estimate(text) if is_too_long else None
        else:
            about = self._tokens_too_many(text, limit)
        if about is not None:
            about = max(about, limit + 1)  # an estimate may be less than what is certain
            is_context = limit == self._max_model_len
            most = "This model's maximum context length is" if is_context else "The limit is"
            raise ContextLengthError.of_prompt(
                f"{most} {limit} tokens, but your prompt has more, about {about}. "
                f"Please shorten '{spec.prompt_param}'.",
                param=spec.prompt_param,
                num_tokens=about,
                limit=limit,
            )

    def _tokens_too_many(self, text: str, limit: int) -> int | None:
        """An estimate of the tokens of a text that certainly has more than `limit`, by its length or by the tokens of
        its first slices; None for other texts."""
        # Certain by the length alone, so nothing but the beginning is tokenized, for the estimate.
        if self._tokenizer.fewest_tokens(text) > limit:
            return self._estimate(text)
        length = max(SURPLUS * limit, MIN_SLICE)
        counted = 0
        if len(text) > length:
            for start in range(0, len(text), length):
                # Cuts make a few tokens more than the whole text has, hence the surplus below.
                counted += len(self._tokenizer.encode(text[start : start + length], add_special_tokens=False))
                if counted > SURPLUS * limit:
                    return -(-counted * len(text) // min(start + length, len(text)))
        return None

    def _estimate(self, text: str) -> int:
        """The tokens of a text, if all of it is as its beginning."""
        beginning = text[:MIN_SLICE]
        return -(-len(self._tokenizer.encode(beginning, add_special_tokens=False)) * len(text) // len(beginning))


def _filled_in(tokenizer: Tokenizer, prompt: str, suffix: str) -> str:
    """Return the prompt for a text between prompt and suffix."""
    text = tokenizer.around(prompt, suffix)
    if text is None:
        raise RequestError(
            "'suffix' is not supported: this model's tokenizer has no tokens for filling in.", param="suffix"
        )
    return text


def _with_special_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the ids between the special tokens that the model wants before and after any text."""
    # Any text will do: what the tokenizer adds does not depend on what stands between.
    bare, whole = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    start = next(index for index in range(len(whole)) if whole[index : index + len(bare)] == bare)
    return [*whole[:start], *token_ids, *whole[start + len(bare) :]]
