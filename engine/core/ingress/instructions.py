"""Instructions of `raydix.engine.core.ingress.dispatch.Dispatch` to the actor that carries them out."""

from typing import NamedTuple, TypeAlias

from raydix.engine.core.types import AdmitRequest, Assignment, AttemptName, Ended, FirstToken, TokenEvent


class Admit(NamedTuple):
    """Ask the manager to place a request."""

    request: AdmitRequest


class AskAgain(NamedTuple):
    """Ask the manager whether the session of a paused request has its turn."""

    request_id: str


class Follow(NamedTuple):
    """Find a worker incarnation."""

    worker_id: str
    epoch: int


class Read(NamedTuple):
    """Read the token stream of an incarnation that was found."""

    worker_id: str
    epoch: int


class Submit(NamedTuple):
    """Send assignments to a worker."""

    worker_id: str
    assignments: list[Assignment]


class Abort(NamedTuple):
    """Have a worker forget an attempt of a request; `has_ended`: the request has got all its tokens."""

    worker_id: str
    request_id: str
    attempt: int
    has_ended: bool = False


class StopAwaiting(NamedTuple):
    """Have a decode worker compute what its prefill worker did not send."""

    worker_id: str
    request_id: str


class DeliverTokens(NamedTuple):
    """Hand tokens to the reader of a request; without tokens, the request has failed."""

    request_id: str
    events: list[TokenEvent]


class Settle(NamedTuple):
    """Tell the manager of first tokens and of ended requests."""

    first_tokens: list[FirstToken]
    ended: list[Ended]


class AskWorkers(NamedTuple):
    """Ask the manager for the registered workers; a silent manager only if `is_probe`."""

    is_probe: bool = False


class StartWorker(NamedTuple):
    """Have the first worker started: there is none, and a request waits."""


class Ping(NamedTuple):
    """Tell a worker that this replica is alive, and name the attempts that may be there."""

    worker_id: str
    taken: list[AttemptName]
    """Attempts taken on by the worker."""
    sent: list[AttemptName]
    """Attempts on their way there."""
    awaiting: list[str]
    """Requests that wait there for the KV of a worker that is alive, too."""


class WorkerLost(NamedTuple):
    """Line of the log: an incarnation's token stream has ended."""

    worker_id: str
    epoch: int
    reason: str
    num_requests: int
    was_leaving: bool = False
    """True if the worker was about to stop."""


class WorkerSilent(NamedTuple):
    """Line of the log: a worker answers nothing, and its requests go on elsewhere."""

    worker_id: str
    num_requests: int


class AttemptLost(NamedTuple):
    """Line of the log: a worker lives and an attempt there is over, but some of its events did not arrive."""

    worker_id: str
    request_id: str
    attempt: int


class NamedByLastWords(NamedTuple):
    """Line of the log: the last words of a worker that died or fell silent name a request."""

    worker_id: str
    request_id: str
    num_named: int
    """Requests that they name."""
    num_stopped: int
    """Workers whose last words have named this request."""
    is_refused: bool
    """True if no other worker gets the request."""


class FailedOver(NamedTuple):
    """Line of the log: a request goes on elsewhere."""

    request_id: str
    attempt: int
    left: list[str]
    """Workers of the attempt before."""
    num_tokens: int
    """Tokens delivered before."""


class MovedOn(NamedTuple):
    """Line of the log: a request goes on elsewhere, because its worker is about to stop."""

    request_id: str
    attempt: int
    left: list[str]
    """Workers of the attempt before."""
    num_tokens: int
    """Tokens delivered before."""


class ModelDiffers(NamedTuple):
    """Line of the log: the workers have another model than this replica."""

    theirs: str
    ours: str


Instruction: TypeAlias = (
    Admit
    | AskAgain
    | Follow
    | Read
    | Submit
    | Abort
    | StopAwaiting
    | DeliverTokens
    | Settle
    | AskWorkers
    | StartWorker
    | Ping
    | WorkerLost
    | WorkerSilent
    | AttemptLost
    | NamedByLastWords
    | FailedOver
    | MovedOn
    | ModelDiffers
)
