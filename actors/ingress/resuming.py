"""Streams with ids of events: from a request's header to the ids of its answer (`raydix.engine.api.resuming`)."""

from dataclasses import dataclass
from typing import Self

from raydix.actors.ingress.job import Job
from raydix.engine.api.reconnecting import BEGINNING, HEADER
from raydix.engine.api.resuming import MAX_CHOICES, EventId, EventIds, Origin, seal_of
from raydix.engine.api.spec import GenerationSpec
from raydix.engine.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A client's wish for a stream with ids: behind the event `last`, or from the beginning."""

    last: EventId | None = None

    @classmethod
    def read(cls, header: str) -> Self:
        """Parse the header's value. Raises RequestError for a value that is no id."""
        return cls(None if header == BEGINNING else EventId.read(header))

    def check(self, spec: GenerationSpec) -> None:
        """Raise RequestError for a request whose answer has no events, or too many choices."""
        if not spec.stream:
            raise RequestError(f"'{HEADER}' is for streams: set 'stream' to true, or leave it out.", param=HEADER)
        if spec.num_choices > MAX_CHOICES:
            raise RequestError(
                f"A stream with '{HEADER}' has at most {MAX_CHOICES} choices, got {spec.num_choices}.", param=HEADER
            )

    def origin(self, new: Origin) -> Origin:
        """The origin of the stream to go on with, or a `new` one. Raises AnswerChangedError if the stream is of another
        model."""
        if self.last is None:
            return new
        self.last.require_model(new.fingerprint)
        return self.last.origin

    def give_ids(self, job: Job, origin: Origin) -> None:
        """Have the events of a job of this origin get ids. Raises RequestError if `last` is of another request."""
        prompts = [answer.generation.prompt for answer in job.answers[:: job.spec.num_samples]]
        seal = seal_of(origin, job.spec, job.tenant.name, prompts)
        if self.last is not None:
            self.last.require(seal, len(job.answers))
        job.event_ids = EventIds(origin, seal, len(job.answers), self.last)
        for answer in job.answers:
            answer.is_by_token = True
