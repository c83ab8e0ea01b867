"""Makes text of generations: follows the tokens of a job's choices, and sees to the end of each."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from raydix.engine.api.assembler import Piece
from raydix.engine.core.ingress.detokenizer import ByteDetokenizer, Detokenizer, PrefixDetokenizer, ShowingDetokenizer
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.types import FinishReason, TokenEvent
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.chats import Chats
from raydix.engine.serving.job import Answer, Job


class Vocabulary:
    """The text of token ids. Tables of bytes are used where the tokenizer has any."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown_bytes = tokenizer.token_bytes()
        self._named_bytes = tokenizer.token_bytes(skip_special_tokens=False)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one answer, which shows special tokens by their names or not at all."""
        table = self._shown_bytes if skip_special_tokens else self._named_bytes
        if table is not None:
            return ByteDetokenizer(table)
        return PrefixDetokenizer(partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens))

    def showing(self, texts: Mapping[str, str]) -> Detokenizer:
        """A detokenizer for one answer, which shows the special tokens of these names as texts."""
        ids = ((self._tokenizer.special_id(name), text) for name, text in texts.items())
        shown = {token_id: text for token_id, text in ids if token_id is not None}
        return ShowingDetokenizer(self.detokenizer(), shown) if shown else self.detokenizer()

    def added_id(self, name: str) -> int | None:
        """The id of a token beyond the vocabulary's texts, special or not; None if there is none of this name."""
        return self._tokenizer.added_id(name)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens by their names; none of an id that only pads the vocabulary."""
        if self._named_bytes is not None:
            return self._named_bytes[token_id] if token_id < len(self._named_bytes) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt, special tokens by their names."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class OutputProcessor:
    """Runs choices. `generate` yields the tokens of a generation, and `stopped` ends it early (`Dispatcher`)."""

    def __init__(
        self,
        generate: Callable[[Generation], AsyncGenerator[list[TokenEvent]]],
        stopped: Callable[[Generation], None],
        chats: Chats,
        *,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generate = generate
        self._stopped = stopped
        self._chats = chats
        self._prefix_caching = prefix_caching
        self._clock = clock

    async def pieces(self, answer: Answer) -> AsyncGenerator[Piece]:
        """The choice's pieces; ends the generation when a stop string has ended the choice.

        Raises:
            ServiceError: the generation failed.
        """
        with answer.running() as over:
            async with aclosing(self._generate(answer.generation)) as batches:
                async for events in batches:
                    if answer.first_token_at is None:
                        answer.first_token_at = self._clock()

                    for part in answer.parts(events):
                        piece = answer.assembler.push(part)
                        answer.take(piece)
                        if piece.finish is not None:
                            answer.generation.stop = piece.finish
                        # A stop string or the end of a call is seen here only: the workers would go on.
                        if piece.finish in (FinishReason.STOP, FinishReason.TOOL_CALLS):
                            self._stopped(answer.generation)
                        if piece.finish is not None and answer.chat is not None and answer.is_stored:
                            answer.message_id = await self._chats.keep(
                                answer.chat, answer.token_ids, answer.text, answer.generation.tenant
                            )

                        # Before the client has the last piece: its next request may come at once.
                        if piece.finish is not None:
                            over()
                        yield piece
                        if piece.finish is not None:
                            self._ended(answer)
                            return

    def _ended(self, answer: Answer) -> None:
        """Prepare for the next turn of a chat."""
        if self._prefix_caching and answer.chat is not None and answer.chat.may_be_resent:
            self._chats.ended(answer.chat, answer.generation, answer.as_message())

    async def collect(self, job: Job) -> None:
        """Run all choices to their ends. The first to fail ends the others; errors as `pieces`."""
        await self.collect_all([job])

    async def collect_all(self, jobs: Sequence[Job]) -> None:
        """Run all choices of several jobs to their ends, as `collect`."""
        answers = [answer for job in jobs for answer in job.answers if answer.permit is not None]
        try:
            async with asyncio.TaskGroup() as group:
                for answer in answers:
                    group.create_task(self._collect(answer))
                    await asyncio.sleep(0)  # others' tokens pass while many begin
        except ExceptionGroup as errors:  # the first to fail has ended the others
            raise errors.exceptions[0] from None

    async def _collect(self, answer: Answer) -> None:
        """Run a choice, then one after the other those that wait for its permit."""
        running: Answer | None = answer
        while running is not None:
            async with aclosing(self.pieces(running)) as pieces:
                async for piece in pieces:
                    running.logprobs += piece.logprobs
            # The permit passes on: an input of the same request runs next in its place.
            running = running.successor
