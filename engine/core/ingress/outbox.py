"""Messages of the data plane to be sent together: one call for each receiver."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from raydix.engine.core.answers.continuations import BegunAnswer
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.instructions import Instruction, Settle, Submit
from raydix.engine.core.types import Assignment, Ended, FirstToken, Outcome


@dataclass(slots=True)
class Outbox:
    """Assignments for workers, and reports for the manager."""

    assignments: dict[str, list[Assignment]] = field(default_factory=dict)
    """Assignments by worker."""
    first_tokens: list[FirstToken] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.assignments or self.first_tokens or self.ended)

    def submit(self, worker_id: str, assignment: Assignment) -> None:
        self.assignments.setdefault(worker_id, []).append(assignment)

    def release(self, generation: Generation, answer: BegunAnswer | None = None) -> None:
        """Report the end of an admission, and how the request has ended. `answer`: with a request's last end."""
        how = Outcome.ABORTED
        if generation.has_ended:
            how = Outcome.FINISHED
        elif generation.failure is not None:
            how = Outcome.FAILED
        self.ended.append(
            Ended(
                generation.request_id,
                generation.attempt,
                how,
                num_preemptions=generation.num_preemptions,
                drafts=tuple(generation.drafts.values()),
                answer=answer,
                handover_s=generation.handover_s,
                stop=generation.stop,
            )
        )

    def not_settled(self, ended: Iterable[Ended]) -> None:
        """Report ends again that the manager has not confirmed. Answers are left out: an answer that the manager did
        hear would be counted twice."""
        self.ended += [replace(each, answer=None) if each.answer is not None else each for each in ended]

    def take_submits(self, followed: Container[str], is_current: Callable[[Assignment], bool]) -> list[Instruction]:
        """The assignments for `followed` workers, without attempts known to be over; none are left.

        A finished attempt has been aborted already, and the submission must not overtake the abort.
        """
        instructions: list[Instruction] = []
        assignments, self.assignments = self.assignments, {}
        for worker_id, batch in assignments.items():
            current = [each for each in batch if is_current(each)]
            # A worker that is followed no more has been left by these requests already.
            if current and worker_id in followed:
                instructions.append(Submit(worker_id, current))
        return instructions

    def take_reports(self) -> list[Instruction]:
        """The reports for the manager; none are left."""
        if not (self.first_tokens or self.ended):
            return []
        reports = Settle(self.first_tokens, self.ended)
        self.first_tokens, self.ended = [], []
        return [reports]
