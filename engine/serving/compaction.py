"""Runs compactions: a conversation is summarised, and begins anew with its summary."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace

from raydix.engine.api.compaction import (
    BY_ROUTE,
    SUMMARY_TOKENS,
    Summary,
    asked_about,
    asking,
    begun_anew,
    compacted,
    user_texts,
)
from raydix.engine.api.openai_responses.answers import compact_body
from raydix.engine.api.openai_responses.compaction import item
from raydix.engine.api.responses import name_in
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.background import Background
from raydix.engine.core.errors import RequestError, ServiceError
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.tenants import Tenant
from raydix.engine.core.types import FinishReason
from raydix.engine.serving.job import Job
from raydix.engine.serving.output import OutputProcessor
from raydix.engine.serving.preparation import NO_HEADERS, Preparation, RequestHeaders
from raydix.engine.serving.reader_pool import RequestReader, size_of


class Compaction:
    """Summarises conversations. `accounted` shows a job and accounts for it (`Frontend.accounted`), `prepare` has a
    worker compute ids at idle priority (`Dispatcher.prepare`)."""

    def __init__(
        self,
        preparation: Preparation,
        output: OutputProcessor,
        accounted: Callable[[Job], AbstractContextManager[None]],
        reader: RequestReader,
        prepare: Callable[[Generation, Sequence[int]], None],
    ) -> None:
        self._preparation = preparation
        self._output = output
        self._accounted = accounted
        self._reader = reader
        self._prepare = prepare
        self._background = Background()

    async def begin_anew(self, job: Job, headers: RequestHeaders = NO_HEADERS, *, is_line: bool = False) -> Job:
        """Have the conversation of a request summarised, and return the job that goes on: one behind the summary, or
        one of the conversation as it is where the model has written no summary. The new job has the request's id, and
        the caller closes it; the job that was given is closed here, and its place in the room goes to the summary and
        then to the new job. `is_line`: the request is a line of a batch.

        Raises:
            RequestError: there is no room for a summary in the context.
            ServiceError: the summary failed.
        """
        with closing(job):
            return await self._begin_anew(job, headers, is_line=is_line)

    async def _begin_anew(self, job: Job, headers: RequestHeaders, *, is_line: bool) -> Job:
        """As `begin_anew`, but leaves the given job open."""
        unread, seen = job.unread, job.conversation
        assert unread is not None and unread.compaction is not None
        use = unread.compaction
        # The summary is a request of its own, without the client's name for the one that waits.
        about = await self._preparation.of_spec(
            asking(seen, use, leaves_question=True),
            job.tenant,
            replace(headers, name=None),
            is_line=is_line,
            part_of=job,
        )
        # Behind the summary the place is the request's again, before another one can have it.
        about.answers[0].lender = job.answers[0]
        await self._run(about)
        spec, text = replace(unread, compaction=None), None
        # A model that reasons may have no tokens left for the summary, and one that is cut lacks what came last, the
        # next steps among it: the conversation is not given up for either.
        if not _is_cut(about) and (written := _text(about)):
            text = begun_anew(seen.messages, written, use)
            spec = compacted(unread, text)
        # Without a summary there is nothing to pause for, and a client that goes on as long as an answer pauses would
        # never get another. A summary that was asked for alone is the whole answer in any case.
        ends_answer = use.ends_answer and (text is not None or use.threshold == 0)
        if ends_answer:
            # No token is generated, but the prompt is computed that the client's next request begins with.
            spec = replace(spec, max_tokens=0, sampling=replace(spec.sampling, min_tokens=0))
        origin = None if job.run is None else job.run.origin  # a response in the background has an id already
        # The client may have been told the id of its request already, as a stream begins before the summary is there.
        named = replace(headers, name=job.request_id)
        anew = await self._preparation.of_spec(spec, job.tenant, named, origin=origin, is_line=is_line, part_of=job)
        marks = tuple(zip(about.spec.retention.marks, about.marked_tokens, strict=True))
        anew.summary = Summary(
            unique=name_in(about.head.id), text=text, usage=about.usage(), marks=marks, ends_answer=ends_answer
        )
        return anew

    async def of_body(self, body: bytes, tenant: Tenant, headers: RequestHeaders = NO_HEADERS) -> Job:
        """Return the finished job of a summary in an HTTP body of `/v1/responses/compact`, and have the KV of the
        shortened conversation computed at idle priority. Raises RequestError and ServiceError as
        `Preparation.of_body`, RequestError for a summary that the client's own limit has cut, and ServiceError if it
        fails, or if the model has written none to its end."""
        job = await self._preparation.of_body("compact", body, tenant, headers)
        await self._run(job)
        if _is_cut(job):
            limit = job.answers[0].generation.sampling.max_tokens
            if limit < SUMMARY_TOKENS:
                raise RequestError(f"The summary was cut at {limit} tokens: allow more.", param="max_output_tokens")
            raise ServiceError(f"the summary was cut at {limit} tokens")
        if not _text(job):
            raise ServiceError("the model wrote no summary: its answer has no text but reasoning")
        self._background.start(self._prepare_beginning(job))
        return job

    def body(self, job: Job) -> bytes:
        """The response of `/v1/responses/compact` of a finished job of a summary."""
        messages = asked_about(job.spec.messages)
        compaction = item(name_in(job.head.id), begun_anew(messages, _text(job), BY_ROUTE))
        return compact_body(job.head, user_texts(messages), compaction, job.usage())

    async def _run(self, job: Job) -> None:
        with self._accounted(job):
            await self._output.collect(job)

    async def _prepare_beginning(self, job: Job) -> None:
        """Have the blocks of the shortened conversation computed, which the next request begins with."""
        spec, [answer] = job.spec, job.answers
        text = begun_anew(asked_about(spec.messages), _text(job), BY_ROUTE)
        system = [message for message in spec.messages if message["role"] == "system"]
        beginning = GenerationSpec(
            kind="chat",
            messages=(*system, {"role": "user", "content": text}),
            tools=None if spec.tools is None else replace(spec.tools, may_call=False, required=(), strict=()),
            template=spec.template,
            max_tokens=0,
        )
        try:
            reading = await self._reader.read(beginning, size_of(beginning), job.tenant.name)
        except (ServiceError, RequestError):
            return  # There is too much to read: the next request computes what it lacks.
        if reading.chat is not None:
            self._prepare(answer.generation, reading.chat.token_ids)


def _is_cut(job: Job) -> bool:
    """True if the answer of a finished job has ended at a limit."""
    return job.answers[0].finish is FinishReason.LENGTH


def _text(job: Job) -> str:
    """The text of the answer of a finished job, without reasoning and white space around it."""
    [answer] = job.answers
    return (answer.text if answer.message is None else answer.message.content).strip()
