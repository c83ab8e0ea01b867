"""The workers and the manager of a cluster, as one ingress replica knows them.

| state of a worker | from | until |
|---|---|---|
| registered | the manager's list | the manager drops the worker and the token stream ends, or the worker is not found |
| followed | an answer under the worker's name | the end of the token stream |
| leaving | the manager's list | the manager drops the worker |
| silent | no token and no answer to a ping for some time | the next sign of life |
| doubted | the token stream has ended, and nobody says that the worker is dead | some time, or a later incarnation |
| dead | the error at the end of the token stream | for good: a successor has a higher epoch |
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from raydix.engine.core.hashing import preferred, root_hash
from raydix.engine.core.signs_of_life import SignsOfLife
from raydix.engine.core.types import Admission, AdmitRequest, BlockHash, Membership, Role, WorkerInfo

MAX_LOST = 1000  # dead incarnations of workers that are remembered


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Durations in seconds."""

    retry_s: float = 0.1
    """Between two admissions of a request that no worker could take."""
    pause_s: float = 0.25
    """Between two questions of a request whose session's turn is the next one; as much more for each session before."""
    longest_pause_s: float = 2.0
    """Limit of that, far below the time after which the manager takes the request for gone (`turns.SILENT_S`)."""
    dispatch_s: float = 30.0
    """Longest wait of a request for a worker, since the last sign that one may come."""
    worker_silent_s: float = 3.0
    """A worker that has sent no token and answered no ping for so long, which is three pings, is silent: its requests
    go to others, if there are others."""
    worker_doubted_s: float = 5.0
    """A worker whose token stream has ended is avoided for so long. By then the manager has either heard the worker or
    forgotten it."""
    manager_missed_s: float = 4.0
    """A manager that has not answered for so long is being replaced; workers may register with its successor."""
    manager_gone_s: float = 180.0
    """A manager that has not answered for so long is not coming back."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model as the workers must have it."""

    fingerprint: str
    """Beginning of the workers' fingerprints; the rest names the arithmetic that computes their KV."""
    block_size: int
    await_timeout_s: float
    names_blocks: bool = True
    """True if the manager or a decode worker looks for blocks by their names."""
    names_answers: bool = False
    """True if the manager keeps answers for the drafts of later ones."""


@dataclass(slots=True)
class FollowedWorker:
    """A worker whose token stream is read."""

    epoch: int
    is_silent: bool = False
    named: frozenset[str] = frozenset()
    """Requests that the worker's last words name, as long as nothing is heard of the worker."""


class ClusterView:
    """Registered, followed and lost workers, and the last signs of life."""

    def __init__(self, fingerprint: str, now: float, timeouts: Timeouts) -> None:
        """`fingerprint`: the beginning of the fingerprint that the workers must have."""
        self._fingerprint = fingerprint
        self._timeouts = timeouts
        self.root: BlockHash | None = None
        """The root of the registered workers' block hashes; None before any worker was known."""
        self.refused_fingerprint: str | None = None
        """The fingerprint of workers with another model than this replica; None while the model is the same."""

        self._registered: dict[str, WorkerInfo] = {}  # workers that can be expected to live
        self._followed: dict[str, FollowedWorker] = {}
        self._signs = SignsOfLife()  # signs of life of followed workers
        # Epoch of each worker that is doubted, and the end of the doubt.
        self._doubted: dict[str, tuple[int, float]] = {}
        self._membership = Membership((), num_starting=0)  # the manager's last list
        self._searched: set[tuple[str, int]] = set()  # incarnations that are being looked for
        self._lost: dict[str, int] = {}  # epoch of the last incarnation of each worker that was found dead
        self._manager_answered_at = now
        self._sign_at = now  # last sign that a worker may come

    # The manager

    def manager_answered(self, now: float) -> None:
        self._manager_answered_at = now

    def update(self, membership: Membership, now: float) -> None:
        """Take over the manager's list of workers."""
        self._manager_answered_at = now
        self._membership = membership
        registered = {worker.worker_id: worker for worker in membership.workers if not self._is_dead(worker)}
        if membership.fingerprint is not None:
            self._check(membership.fingerprint)
            registered = {} if self.refused_fingerprint is not None else registered

        # A manager that has just started does not know every worker yet.
        followed = {each: self._registered[each] for each in self._followed.keys() & self._registered.keys()}
        self._registered = followed | registered
        for worker in membership.workers:
            self._trust(worker.worker_id, worker.epoch)

    def no_update(self) -> None:
        """The manager did not list the workers: the workers of its last list are expected to live."""
        self._membership = replace(self._membership, num_starting=0)

    def last_sign_at(self, now: float) -> float:
        """The last time at which a worker was known to be on its way: a host was starting one or would start one on
        demand, or the manager, with which a worker would register, was itself being replaced."""
        silent_s = now - self._manager_answered_at
        is_expected = self._membership.num_starting or self._membership.starts_on_demand
        if is_expected or self._timeouts.manager_missed_s < silent_s < self._timeouts.manager_gone_s:
            self._sign_at = now
        return self._sign_at

    # Workers

    @property
    def can_serve(self) -> bool:
        """True if some worker can be expected to take a request."""
        return bool(self._registered) or self._membership.starts_on_demand

    @property
    def lacks_first(self) -> bool:
        """True if no worker is there or on its way, and one starts on demand."""
        return self._membership.starts_on_demand and not self._registered and not self._membership.num_starting

    @property
    def registered(self) -> Sequence[WorkerInfo]:
        """The workers expected to live."""
        return tuple(self._registered.values())

    @property
    def followed(self) -> Mapping[str, FollowedWorker]:
        """The workers whose token streams are read."""
        return self._followed

    def preferred(self, session: str) -> WorkerInfo | None:
        """The worker for a whole request without the manager: of those that decode, if there are any, the one that the
        session prefers. None without a worker."""
        avoided = self.avoided
        heard = [each for each in self._registered.values() if each.worker_id not in avoided]
        heard = [each for each in heard if each.worker_id not in self._membership.leaving] or heard
        able = [each.worker_id for each in heard if each.role is not Role.PREFILL]
        worker_ids = able or [each.worker_id for each in heard] or [*self._registered]
        return self._registered[preferred(session, worker_ids)] if worker_ids else None

    def alone(self, request: AdmitRequest) -> Admission | None:
        """A placement without the manager: whole, on the worker that the session prefers. None without a worker."""
        worker = self.preferred(request.session or request.request_id)
        if worker is None:
            return None
        return Admission(
            request.request_id,
            request.attempt,
            prefill=worker.worker_id,
            decode=worker.worker_id,
            prefill_epoch=worker.epoch,
            decode_epoch=worker.epoch,
            prefill_awaited=(),
            decode_awaited=(),
        )

    def absent(self, admission: Admission) -> dict[str, int]:
        """The epochs of the admitted workers that are not followed."""
        incarnations = {admission.prefill: admission.prefill_epoch, admission.decode: admission.decode_epoch}
        return {each: epoch for each, epoch in incarnations.items() if self._followed_epoch(each) != epoch}

    def is_gone(self, worker_id: str, epoch: int) -> bool:
        """True if an incarnation that is not followed is dead, or older than the one that is followed."""
        return epoch <= max(self._lost.get(worker_id, 0), self._followed_epoch(worker_id))

    def search(self, incarnations: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Note that incarnations are looked for; returns the incarnations that were not looked for yet."""
        new = [each for each in incarnations if each not in self._searched]
        self._searched.update(new)
        return new

    def is_searched(self, worker_id: str, epoch: int) -> bool:
        return (worker_id, epoch) in self._searched

    def found(self, worker_id: str, epoch: int) -> bool:
        """The search for an incarnation has found it; returns True if a newer one is not followed already."""
        self._searched.discard((worker_id, epoch))
        return self._followed_epoch(worker_id) < epoch

    def not_found(self, worker_id: str, epoch: int) -> None:
        self._searched.discard((worker_id, epoch))

    def follow(self, worker_id: str, epoch: int, now: float) -> None:
        self._followed[worker_id] = FollowedWorker(epoch)
        self._signs.heard(worker_id, now)
        self._trust(worker_id, epoch)

    def leave(self, worker_id: str, now: float, *, is_dead: bool) -> int:
        """Follow a worker no longer; returns the epoch of the incarnation."""
        epoch = self._followed.pop(worker_id).epoch
        self._signs.forget(worker_id)
        self._doubted.pop(worker_id, None)
        if is_dead:
            self._note_dead(worker_id, epoch)
        else:
            self._doubted[worker_id] = epoch, now + self._timeouts.worker_doubted_s
        return epoch

    def forget(self, worker_id: str, epoch: int) -> None:
        """Do not expect an incarnation to live, until the manager lists it again."""
        registered = self._registered.get(worker_id)
        if registered is not None and registered.epoch <= epoch:
            del self._registered[worker_id]

    # Signs of life

    def heard(self, worker_id: str, now: float) -> None:
        """A worker has sent tokens, or has answered a ping."""
        worker = self._followed.get(worker_id)
        if worker is not None:
            self._signs.heard(worker_id, now)
            worker.is_silent, worker.named = False, frozenset()
            self._doubted.pop(worker_id, None)

    def quiet(self, now: float, silence_s: float) -> Sequence[WorkerInfo]:
        """The followed workers that have sent nothing for longer than `silence_s`, as far as the manager lists them."""
        quiet = self._signs.quiet(now, silence_s)
        return [self._registered[each] for each in quiet if each in self._registered]

    def computes(self, worker_id: str, now: float) -> None:
        """A worker that answers nothing computes, so it is not silent."""
        self._signs.computes(worker_id, now)

    def last_words(self, worker_id: str, request_ids: Iterable[str]) -> None:
        """A followed worker that has died, or answers nothing, computed for these requests."""
        if worker_id in self._followed:
            self._followed[worker_id].named = frozenset(request_ids)

    def stood_still(self, late_s: float) -> None:
        """Extend all deadlines by `late_s`, for which this process itself was stopped and received nothing."""
        self._signs.stood_still(late_s)
        self._doubted = {name: (epoch, until + late_s) for name, (epoch, until) in self._doubted.items()}

    @property
    def avoided(self) -> Set[str]:
        """Workers that are silent or doubted; none if no other worker could take their requests."""
        avoided = {name for name, worker in self._followed.items() if worker.is_silent} | self._doubted.keys()
        return avoided if self._registered.keys() - avoided else set()

    def newly_silent(self, now: float) -> Set[str]:
        """Bring silence and doubts up to date; returns the workers that were not silent before. Nobody is silent while
        no other worker could take the requests."""
        self._doubted = {name: doubt for name, doubt in self._doubted.items() if now < doubt[1]}
        silent = set(self._signs.silent(now, self._timeouts.worker_silent_s))
        others = self._registered.keys() - silent - self._doubted.keys()
        new = set()
        for name, worker in self._followed.items():
            was_silent, worker.is_silent = worker.is_silent, bool(others) and name in silent
            if worker.is_silent and not was_silent:
                new.add(name)
        return new

    def is_leaving(self, worker_id: str) -> bool:
        """True if the manager's last list said that a worker is about to stop."""
        return worker_id in self._membership.leaving

    @property
    def to_be_left(self) -> Sequence[str]:
        """Followed workers that are about to stop, if another worker that is heard could take their requests."""
        listed, leaving = {worker.worker_id for worker in self._membership.workers}, self._membership.leaving
        others = self._registered.keys() & listed - leaving - self.avoided
        return sorted(leaving & self._followed.keys()) if others else ()

    # Inside

    def _followed_epoch(self, worker_id: str) -> int:
        """Epoch of the incarnation that is followed; 0 for none."""
        worker = self._followed.get(worker_id)
        return 0 if worker is None else worker.epoch

    def _trust(self, worker_id: str, epoch: int) -> None:
        """End a doubt about an earlier incarnation."""
        doubted, _ = self._doubted.get(worker_id, (epoch, 0.0))
        if doubted < epoch:
            del self._doubted[worker_id]

    def _check(self, fingerprint: str) -> None:
        """Name blocks as the workers do, unless the workers have another model than this replica."""
        if fingerprint.startswith(f"{self._fingerprint}/"):
            self.root, self.refused_fingerprint = root_hash(fingerprint), None
        else:
            self.refused_fingerprint = fingerprint

    def _is_dead(self, worker: WorkerInfo) -> bool:
        return worker.epoch <= self._lost.get(worker.worker_id, 0)

    def _note_dead(self, worker_id: str, epoch: int) -> None:
        self.forget(worker_id, epoch)
        self._lost.pop(worker_id, None)
        self._lost[worker_id] = epoch
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
