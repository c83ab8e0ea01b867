"""Makes text of generations: follows the tokens of a job's choices, and sees to the end of each."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from raydix.engine.api.assembler import Piece
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.types import FinishReason, TokenEvent
from raydix.engine.serving.chats import Chats
from raydix.engine.serving.job import Answer, Job


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
