"""Token ids of chats: the ids of a prompt, and the ids that an answer leaves behind for the next turn.

A prompt's ids are a function of the request's body: its text is tokenized, except for messages whose ids the client
names (`raydix.engine.core.answers.transcripts`). An answer's text may tokenize to other ids than the model generated;
then the KV of the next turn's ids is computed at idle priority on the worker that has the answer's KV.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raydix.engine.api.context_edits import Edit
from raydix.engine.api.spec import ChatMessage, ContinuedAnswer, GenerationSpec, require_token_ids
from raydix.engine.background import Background
from raydix.engine.core.answers.prompt_form import ChatEnd, ChatTemplate
from raydix.engine.core.answers.transcripts import EncodedText, first_difference, num_shown, with_answers
from raydix.engine.core.errors import AnswerNotFoundError, ContextLengthError, RequestError, ServiceError
from raydix.engine.core.ingress.detokenizer import Detokenizer
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.reader_pool import RequestReader, size_of
from raydix.engine.serving.reader_work import NextTurn, Reading
from raydix.engine.serving.transcripts import Transcripts

MANY_IDS = 4096  # number of named ids above which the check of their text runs beside the event loop


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat up to the beginning of its answer."""

    messages: tuple[ChatMessage, ...]
    template: ChatTemplate
    prompt: EncodedText
    private_salt: bytes
    size: int
    """Approximate bytes of the messages as the client sent them, which the next turn is read from."""
    is_stored: bool
    """True if the answer is to be kept under a reference."""
    may_be_resent: bool
    """True if the next turn is likely to have the answer's text alone."""
    tools: tuple[Mapping[str, object], ...] = ()
    """Functions that the answer may call."""
    edits: tuple[Edit, ...] = ()
    """Edits of `original`, the chat as the client sent it, that made `messages`."""
    original: tuple[ChatMessage, ...] = ()


class Chats:
    """Makes prompts of chats, and sees to their answers. `prepare` has a worker compute ids at idle priority."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        new_detokenizer: Callable[[], Detokenizer],
        transcripts: Transcripts,
        reader: RequestReader,
        prepare: Callable[[Generation, Sequence[int]], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._new_detokenizer = new_detokenizer
        self._transcripts = transcripts
        self._reader = reader
        self._prepare = prepare
        self._background = Background()

    async def begin(self, reading: Reading, prompt: EncodedText, private_salt: bytes, tenant: str = "") -> Chat:
        """Set up the chat of a tenant's request whose prompt was read as `prompt`.

        Raises:
            AnswerNotFoundError: a message's reference is unknown, and the request does not allow its text instead.
            RequestError: no prompt can be made of the messages.
        """
        spec = reading.spec
        if spec.continued:
            found = await self._find(spec, private_salt)
            # Some answers stand as text now, which makes another prompt: it is read anew, with these left out.
            if len(found) < len(spec.continued):
                rest = replace(spec, continued=tuple(answer for answer, _ in found))
                again = (await self._reader.read(rest, size_of(rest), tenant)).chat
                assert again is not None
                prompt = again
            work = partial(self._with_answers, prompt, found)
            # In a thread where it takes long: the event loop passes the tokens of all streams on.
            is_long = sum(len(token_ids) for _, token_ids in found) > MANY_IDS
            prompt = await asyncio.to_thread(work) if is_long else work()
        goes_on_by_ids = spec.retention.store or (spec.turn is not None and spec.turn.is_stored)
        # Only then is the text of this answer likely to stand behind this prompt again, in the next turn.
        is_plain = spec.chat_end is ChatEnd.ANSWER and not (
            goes_on_by_ids
            or spec.continued
            or spec.given_prompt
            or spec.truncation
            or spec.template.source
            or spec.embedding
        )
        original = spec.messages if reading.edits is None else reading.edits.original or spec.messages
        return Chat(
            messages=spec.messages,
            template=spec.template,
            prompt=prompt,
            private_salt=private_salt,
            size=size_of(replace(spec, messages=original)),
            is_stored=spec.retention.store,
            may_be_resent=spec.num_samples == 1 and is_plain,
            tools=() if spec.tools is None else spec.tools.definitions,
            edits=spec.edits or (),
            original=original,
        )

    async def keep(self, chat: Chat, token_ids: Sequence[int], text: str, tenant: str) -> str | None:
        """Keep an answer for its tenant; returns its new reference, or None if the answer is not kept."""
        shown = self.shown(token_ids, text)
        return None if shown is None else await self._transcripts.keep(shown, chat.private_salt, tenant)

    def ended(self, chat: Chat, generation: Generation, answer: ChatMessage) -> None:
        """Have the blocks of the next turn's prompt computed at idle priority, where the text of the ended answer has
        other ids than were generated. Returns at once."""
        self._background.start(self._prepare_next_turn(chat, generation, answer))

    async def _prepare_next_turn(self, chat: Chat, generation: Generation, answer: ChatMessage) -> None:
        turn = NextTurn(chat.original, chat.prompt, answer, tools=chat.tools, template=chat.template, edits=chat.edits)
        try:
            token_ids = await self._reader.next_turn(turn, chat.size + len(str(answer)))
        except (ServiceError, RequestError):
            # There is more to read than can be read, or the client's template takes too long this time: the next turn
            # computes what it lacks.
            return
        if first_difference(token_ids, generation.token_ids) is not None:
            self._prepare(generation, token_ids)

    async def _find(self, spec: GenerationSpec, private_salt: bytes) -> list[tuple[ContinuedAnswer, Sequence[int]]]:
        """Return the messages that stand in the prompt as token ids, with their ids: all messages, or only the known
        ones if the request allows text for the others."""
        given: list[tuple[ContinuedAnswer, Sequence[int]]] = []
        for each in spec.continued:
            if each.token_ids is not None:
                require_token_ids(each.token_ids, self._vocab_size, each.param)
                given.append((each, each.token_ids))

        named = [each for each in spec.continued if each.reference is not None]
        references = list(dict.fromkeys(str(each.reference) for each in named))

        try:
            known = await self._transcripts.find(references, private_salt) if references else {}
        except ServiceError:
            if not spec.text_if_missing:
                raise
            known = {}

        for each in named:
            token_ids = known.get(str(each.reference))
            if token_ids is not None:
                given.append((each, token_ids))
            # Without the ids another answer might be generated: only a client that allows its text gets that.
            elif each.content is None or not spec.text_if_missing:
                raise _not_found(each)

        num_tokens = sum(len(token_ids) for _, token_ids in given)
        if num_tokens > self._max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self._max_model_len} tokens, but the answers that the chat "
                f"goes on from by their ids have {num_tokens}.",
                param=spec.prompt_param,
            )

        return given

    def _with_answers(self, chat: EncodedText, found: Iterable[tuple[ContinuedAnswer, Sequence[int]]]) -> EncodedText:
        return with_answers(chat, {answer.index: self._answer_ids(answer, token_ids) for answer, token_ids in found})

    def _answer_ids(self, answer: ContinuedAnswer, token_ids: Sequence[int]) -> Sequence[int]:
        """Check a message's ids against its text; returns the ids for the prompt. Raises RequestError if the text
        differs."""
        shown = self.shown(token_ids, self._text_of(token_ids) if answer.content is None else answer.content)
        if shown is None:
            raise RequestError(
                f"'{answer.param}' stands for another text than 'messages[{answer.index}].content' has: leave out "
                "'content' to go on from the ids, or the ids to have the text tokenized.",
                param=answer.param,
            )
        return shown

    def shown(self, token_ids: Sequence[int], text: str) -> list[int] | None:
        """Return the ids wholly inside an answer's text, then the ids of the text's remainder; None if the text is no
        beginning of the ids' text."""
        num_whole = num_shown(token_ids, text, self._text_of)
        if num_whole is None:
            return None
        # A stop string may have cut the answer within a token: the part that is shown is tokenized by itself.
        rest = text[len(self._text_of(token_ids[:num_whole])) :]
        return [*token_ids[:num_whole], *self._tokenizer.encode(rest, add_special_tokens=False)]

    def _text_of(self, token_ids: Sequence[int]) -> str:
        detokenizer = self._new_detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()


def _not_found(answer: ContinuedAnswer) -> AnswerNotFoundError:
    return AnswerNotFoundError(
        f"'{answer.param}' names no answer that is kept for you: it may be gone, or be of another 'cache_salt' or "
        "another server. Leave out the 'id' to have the message's text tokenized, send its 'token_ids' instead, or set "
        "'continue_from_missing' to \"text\" for this case.",
        param=answer.param,
    )
