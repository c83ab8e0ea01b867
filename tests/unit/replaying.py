"""Replays the recording of a state machine of the core into a fresh one, and compares the results."""

from collections.abc import Callable
from dataclasses import replace

from engine.core.ingress.dispatch import Dispatch
from engine.core.manager.block_index import Segment
from engine.core.manager.directory import Directory
from engine.core.stimuli import Notes, Record, Recorder, Stimulus, events_of, replay
from engine.core.types import AdmitRequest, Ended, PromptEvent, Salt, SamplingParams, TokenEvent, TokenLogprobs
from engine.core.worker.block_pool import BlockPool
from engine.core.worker.notes import SchedulerNotes
from engine.core.worker.request import Request
from engine.core.worker.scheduler import Scheduler
from engine.core.worker.step import ExportedBlocks, SchedulerOutput, StepOutcome
from engine.core.worker.transfers import IncomingBlocks

OF_TOKENS = frozenset({"answer_name", "continuations"})
"""Fields that no decision depends on, and no recording has."""


class Recording:
    """The stimuli of a machine, and the machine's results."""

    def __init__(self, machine: object, notes: Notes) -> None:
        self._notes = notes
        self._dumped = [Stimulus(type(machine).__name__, (), {}).dump()]
        self.results: list[object] = []
        self._is_within = False
        Recorder(machine, notes, self._keep)
        for name, owner in events_of(machine).items():
            method = name.rpartition(".")[2]
            setattr(owner, method, self._telling(getattr(owner, method)))

    @property
    def stimuli(self) -> tuple[Stimulus, ...]:
        """As they come back from a file."""
        return Record.load(b"".join(self._dumped)).stimuli

    def replay(self, fresh: object) -> list[object]:
        """The results of another machine that is told the same, which records the same."""
        again = Recording(fresh, self._notes)
        results = replay(self.stimuli, fresh)
        assert again.stimuli == self.stimuli, "the recording of a replay is the same"
        return results

    def _keep(self, stimulus: Stimulus) -> bool:
        self._dumped.append(stimulus.dump())
        return True

    def _telling(self, method: Callable[..., object]) -> Callable[..., object]:
        def told(*args: object, **kwargs: object) -> object:
            if self._is_within:
                return method(*args, **kwargs)
            self._is_within = True
            try:
                result = method(*args, **kwargs)
            except Exception as error:
                self.results.append(error)
                raise
            finally:
                self._is_within = False
            self.results.append(result)
            return result

        return told


def check_directory(recording: Recording, directory: Directory, fresh: Directory) -> None:
    """Assert that the recording of `directory` brings `fresh` into its state by the same instructions."""
    replayed = recording.replay(fresh)
    fresh.check_integrity()
    assert [spelled(each) for each in replayed] == [spelled(each) for each in recording.results]
    assert state_of(fresh) == state_of(directory)


def check_dispatch(recording: Recording, dispatch: Dispatch, fresh: Dispatch) -> None:
    """Assert that the recording of `dispatch` brings `fresh` into its state by the same instructions, except that
    tokens are zeros and blocks have other names."""
    replayed = recording.replay(fresh)
    fresh.check_integrity()
    assert [without_tokens(each) for each in replayed] == [without_tokens(each) for each in recording.results]
    assert without_tokens(vars_of(fresh)) == without_tokens(vars_of(dispatch))


def check_scheduler(recording: Recording, notes: SchedulerNotes, scheduler: Scheduler, fresh: Scheduler) -> None:
    """Assert that the recording of `scheduler` brings `fresh` into its state by the same decisions, except that tokens
    are others."""
    replayed = replay(recording.stimuli, fresh)
    assert [decided(each) for each in replayed] == [decided(each) for each in recording.results]
    assert requests_of(fresh) == requests_of(scheduler)
    assert blocks_of(fresh.pool) == blocks_of(scheduler.pool)
    names = {name: notes.partial_name(name) for name in scheduler.pool.hashes()}
    for name, known in zip(fresh.pool.hashes(), names, strict=True):
        assert name in (known, names[known]), "a block has another name"


def decided(result: object) -> object:
    """A result of a scheduler in values that compare, without tokens."""
    match result:
        case SchedulerOutput(chunks, preempted, moves):
            ids = [chunk.request.request_id for chunk in chunks]
            facts = [
                (each.start, each.num_tokens, each.store_from, each.samples, each.scored, each.pooled)
                for each in chunks
            ]
            return ids, facts, [len(each.draft) for each in chunks], preempted, moves
        case StepOutcome(scores, events, exports, finished):
            parts = ([decided(each) for each in part] for part in (scores, events, exports))
            return *parts, [request.request_id for request in finished]
        case PromptEvent(request_id, attempt, position, logprobs):
            return request_id, attempt, position, len(logprobs)
        case TokenEvent():
            return result._replace(token_id=result.token_id and 0, logprobs=None, pooled=result.pooled and b"")
        case ExportedBlocks(request_id, hashes, blocks, handover, retention):
            num_full = len(hashes) - (handover is not None and handover.tail is not None)
            return request_id, hashes[:num_full], blocks, handover and handover[:2], retention
        case [Request(), *_]:
            return [request.request_id for request in result if isinstance(request, Request)]
        case IncomingBlocks(indexes, _, blocks, _):
            return indexes, blocks
    return spelled(result)


def requests_of(scheduler: Scheduler) -> object:
    """The queues of a scheduler, with all facts about each request behind decisions."""
    queues = scheduler.waiting, scheduler.preempted, scheduler.running.values(), scheduler.idle
    return [[facts_of(request) for request in queue] for queue in queues], scheduler.idle.counts


def facts_of(request: Request) -> object:
    progress = request.num_computed, request.num_shared, request.num_sealed, request.num_scored, request.num_reported
    waiting = request.awaited, request.awaits_handover, request.await_deadline, request.held, len(request.protected)
    counts = len(request.token_ids), request.num_cached_tokens, request.num_preemptions, request.num_to_score
    return (
        request.request_id,
        request.arrival,
        request.blocks,
        progress,
        waiting,
        counts,
        request.swapped,
        request.awaits_grammar,
        (request.num_pooled, len(request.pooled_sum)),
    )


def blocks_of(pool: BlockPool) -> object:
    """The state of each block of a pool, and the evictable blocks in their order of arrival."""
    return pool._ref_counts, pool._free, [pool._by_hash[name] for name in pool._queue]


def vars_of(dispatch: Dispatch) -> dict[str, object]:
    """Everything that decisions depend on."""
    fields = {name: value for name, value in vars(dispatch).items() if not callable(value)}
    return fields | {"_view": vars(dispatch._view)}


def without_tokens(value: object) -> object:
    """A value of the data plane in values that compare: numbers in place of tokens and of hashes."""
    if isinstance(value, dict):
        return [(key, without_tokens(each)) for key, each in value.items()]
    if isinstance(value, AdmitRequest):
        value = replace(value, hashes=(b"",) * len(value.hashes))
    if isinstance(value, SamplingParams):
        return value.max_tokens
    if isinstance(value, Salt | TokenLogprobs | Exception):
        return type(value).__name__
    if isinstance(value, TokenEvent):
        value = value._replace(
            token_id=value.token_id and 0, logprobs=None, detail=None, num_accepted=0, num_rejected=0, draft_source=None
        )
    if isinstance(value, Ended):
        value = replace(value, drafts=(), answer=None)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple) and set(map(type, value)) == {int}:
        return len(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [without_tokens(each) for each in value]
    if slots := getattr(value, "__slots__", ()):
        names = [name for name in slots if name not in OF_TOKENS]
        return type(value).__name__, [without_tokens(getattr(value, name)) for name in names]
    return repr(value)


def spelled(value: object) -> object:
    """A result in values that compare: segments are objects of one directory."""
    if isinstance(value, Segment):
        return value.segment_id, value.copy, value.header.hashes
    if isinstance(value, list | tuple):
        return [spelled(each) for each in value]
    if slots := getattr(value, "__slots__", ()):
        return type(value).__name__, [spelled(getattr(value, name)) for name in slots]
    return repr(value)


def state_of(directory: Directory) -> object:
    """Everything that decisions depend on."""
    blocks = {
        block_hash: (record.workers, spelled(record.segment), record.producer, record.awaited_by)
        for block_hash, record in directory._blocks.items()
    }
    loads = {worker_id: (worker.epoch, worker.load, worker.blocks) for worker_id, worker in directory.workers.items()}
    segments = [
        (spelled(each), each.leases, each.is_in_store, each.file, each.requested_by, each.node)
        for each in directory.segments._segments.values()
    ]
    nodes = dict(directory.segments.node_bytes), directory.links.known()
    return blocks, loads, list(directory._reservations), segments, nodes, directory._blocks.events_since(0)
