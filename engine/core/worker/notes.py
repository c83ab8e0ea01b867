"""Notes of the scheduler's stimuli (`engine.core.stimuli`): no tokens, and no hashes of less than a block.

Decisions depend on which sequences share a beginning: through the hashes of full blocks, which are noted as they are,
and, where a block is copied for its first tokens, through the tokens themselves. So the note of a token is a number,
equal for equal tokens behind equal beginnings: a hash, under a secret key, of the block up to and including the token.
A partial block, of a token perhaps, has a name under the same key.

Such tokens do not hash to the names of their blocks. Instead the note of a block's last token brings the name, and a
replaying scheduler names blocks by a `RecordedChain`.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from engine.core.costs import WorkerCosts
from engine.core.hashing import DIGEST_BYTES, BlockChain, hash_beginnings
from engine.core.settings import SchedulerLimits
from engine.core.stimuli import Notes, as_it_is
from engine.core.tenants import Tenant
from engine.core.types import (
    Assignment,
    BlockHash,
    CacheHints,
    DraftSource,
    Handover,
    Pooling,
    Salt,
    SamplingParams,
    SegmentHeader,
    Stage,
    TokenLogprobs,
)
from engine.core.worker.drafts.draft import Draft
from engine.core.worker.moves import Move
from engine.core.worker.replaying import NamedToken, RecordedGrammar
from engine.core.worker.request import Request
from engine.core.worker.scheduler import Scheduler
from engine.core.worker.step import ExportedBlocks, RunnerOutput, SampledToken, ScheduledChunk, SchedulerOutput
from engine.core.worker.transfers import IncomingBlocks

END = -1
"""Note of the last token of an answer."""
UNKNOWN = 0
"""Note of a token whose sequence is not known, or has no names for its blocks."""
NO_LOGPROBS = TokenLogprobs(0.0, (), ())


class TokenNote(NamedTuple):
    """One token; the last one of a block with the name of the block."""

    value: int
    name: BlockHash | None = None

    def token(self) -> int:
        return NamedToken.of(self.value, self.name)


class AssignmentNote(NamedTuple):
    """An assignment without its tokens."""

    request_id: str
    attempt: int
    stage: Stage
    tokens: bytes
    """Four bytes for each token."""
    names: tuple[BlockHash, ...]
    """Of all full blocks, and of the partial last one."""
    num_prompt_tokens: int
    max_tokens: int
    min_tokens: int
    prompt_logprobs: int | None
    pooling: Pooling | None
    salt: Salt
    awaited: tuple[BlockHash, ...]
    await_timeout_s: float
    num_scored: int
    cache: CacheHints
    priority: int
    is_idle: bool
    grammar: bytes | None
    """The digest of the grammar."""
    block_size: int
    handed_over: TokenNote | None
    """The token of an early handover."""

    def recall(self, machine: Scheduler) -> Assignment:
        if self.handed_over is not None:
            token = self.handed_over.token()
            machine.early.correct(Handover(self.request_id, self.attempt, token, None))
        return Assignment(
            request_id=self.request_id,
            attempt=self.attempt,
            stage=self.stage,
            token_ids=self._token_ids(),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=SamplingParams(
                self.max_tokens,
                stop_token_ids=(END,),
                min_tokens=self.min_tokens,
                prompt_logprobs=self.prompt_logprobs,
                pooling=self.pooling,
                grammar=None if self.grammar is None else RecordedGrammar.of(self.grammar),
            ),
            reply_to="",
            salt=self.salt,
            awaited=self.awaited,
            await_timeout_s=self.await_timeout_s,
            num_scored=self.num_scored,
            cache=self.cache,
            priority=self.priority,
            is_idle=self.is_idle,
        )

    def _token_ids(self) -> tuple[int, ...]:
        tokens = [int.from_bytes(self.tokens[start : start + 4]) for start in range(0, len(self.tokens), 4)]
        for index, name in enumerate(self.names):
            last = min((index + 1) * self.block_size, len(tokens)) - 1
            tokens[last] = NamedToken.of(tokens[last], name)
        return tuple(tokens)


class HandoverNote(NamedTuple):
    """A handover without its token."""

    request_id: str
    attempt: int
    token: TokenNote
    tail: BlockHash | None

    def recall(self, machine: object) -> Handover:
        return Handover(self.request_id, self.attempt, self.token.token(), self.tail)


class ChunkNote(NamedTuple):
    """A chunk, with its request as one of the scheduler's."""

    request_id: str
    arrival: int
    start: int
    num_tokens: int
    store_from: int
    samples: bool
    scored: tuple[int, int]
    pooled: tuple[int, int]
    num_drafted: int
    draft_source: DraftSource | None


class OutputNote(NamedTuple):
    """A step as the scheduler chose it."""

    chunks: tuple[ChunkNote, ...]
    preempted: tuple[str, ...]
    moves: tuple[Move, ...]

    def recall(self, machine: Scheduler) -> SchedulerOutput:
        """The same step of another scheduler, without the requests that are gone there, too."""
        chunks = []
        for note in self.chunks:
            request = machine.get(note.request_id)
            if request is not None and request.arrival == note.arrival:
                chunks.append(
                    ScheduledChunk(
                        request,
                        start=note.start,
                        num_tokens=note.num_tokens,
                        store_from=note.store_from,
                        samples=note.samples,
                        scored=range(*note.scored),
                        pooled=range(*note.pooled),
                        draft=(UNKNOWN,) * note.num_drafted,
                        draft_source=note.draft_source,
                    )
                )
        return SchedulerOutput(tuple(chunks), self.preempted, self.moves)


class ComputedNote(NamedTuple):
    """The runner's answer without tokens, log-probabilities and hidden states."""

    sampled: tuple[tuple[str, tuple[TokenNote, ...]], ...]
    num_scores: tuple[tuple[str, int], ...]
    refused: tuple[str, ...]
    """Requests, without the reasons, which may quote a grammar."""
    sums: tuple[tuple[str, int, int], ...]
    """The number of a request's sums, and the bytes of each."""
    pooled: tuple[str, ...]

    def recall(self, machine: object) -> RunnerOutput:
        return RunnerOutput(
            {
                request_id: [SampledToken(note.token(), is_last=note.value == END) for note in notes]
                for request_id, notes in self.sampled
            },
            {request_id: (NO_LOGPROBS,) * count for request_id, count in self.num_scores},
            dict.fromkeys(self.refused, ""),
            sums={request_id: (bytes(size),) * count for request_id, count, size in self.sums},
            pooled=dict.fromkeys(self.pooled, b""),
        )


class BlocksNote(NamedTuple):
    """Exported blocks."""

    blocks: tuple[int, ...]

    def recall(self, machine: object) -> ExportedBlocks:
        return ExportedBlocks("", (), self.blocks)


class SchedulerNotes:
    """Makes the notes of one scheduler's stimuli, before the scheduler reacts."""

    def __init__(self, scheduler: Scheduler, root: BlockHash, key: bytes) -> None:
        """`root`: the root of all chains; `key`: known to nobody else, and nowhere kept."""
        self._scheduler = scheduler
        self._root = root
        self._key = key

    def notes(self) -> Notes:
        """All of them, for a recorder."""
        return Notes(
            {
                Assignment: self._note_of_assignment,
                Draft: _note_of_draft,
                ExportedBlocks: lambda export: BlocksNote(export.blocks),
                Handover: self._note_of_handover,
                IncomingBlocks: self._note_of_incoming,
                RunnerOutput: self._note_of_computed,
                SchedulerLimits: as_it_is,
                SchedulerOutput: _note_of_output,
                SegmentHeader: self._note_of_header,
                Tenant: as_it_is,
                WorkerCosts: as_it_is,
            }
        )

    def partial_name(self, name: BlockHash) -> BlockHash:
        """The name of a partial block in the recording."""
        return blake2b(name, key=self._key, digest_size=DIGEST_BYTES).digest()

    def _note_of_assignment(self, assignment: Assignment) -> AssignmentNote:
        block_size = self._scheduler.pool.block_size
        chain = BlockChain(self._root, assignment.salt, block_size)
        names = chain.hashes(assignment.token_ids)
        tokens = self._tokens_of(chain, names, assignment.token_ids)

        # The token of an early handover, behind the names of full blocks; then the partial block.
        handed_over, early = None, self._scheduler.early.handover_of(assignment.request_id, assignment.attempt)
        if early is not None:
            handed_over = self._note_behind(chain, names, assignment.token_ids, early.token_id)
        if len(assignment.token_ids) % block_size:
            partial = assignment.token_ids[len(names) * block_size :]
            names.append(self.partial_name(chain.partial(names, len(names), partial)))

        sampling = assignment.sampling
        return AssignmentNote(
            request_id=assignment.request_id,
            attempt=assignment.attempt,
            stage=assignment.stage,
            tokens=tokens,
            names=tuple(names),
            num_prompt_tokens=assignment.num_prompt_tokens,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            prompt_logprobs=sampling.prompt_logprobs,
            pooling=sampling.pooling,
            salt=replace(assignment.salt, private=self.partial_name(assignment.salt.private)),
            awaited=assignment.awaited,
            await_timeout_s=assignment.await_timeout_s,
            num_scored=assignment.num_scored,
            cache=assignment.cache,
            priority=assignment.priority,
            is_idle=assignment.is_idle,
            grammar=None if sampling.grammar is None else sampling.grammar.digest,
            block_size=block_size,
            handed_over=handed_over,
        )

    def _tokens_of(self, chain: BlockChain, names: Sequence[BlockHash], token_ids: Sequence[int]) -> bytes:
        """The notes of a sequence, four bytes for each token."""
        tokens = bytearray()
        for start in range(0, len(token_ids), chain.block_size):
            parent = chain.parent(names, start // chain.block_size)
            for name in hash_beginnings(parent, token_ids[start : start + chain.block_size]):
                tokens += self._bytes_of(name)
        return bytes(tokens)

    def _note_of_handover(self, handover: Handover) -> HandoverNote:
        """If the request is not here yet, its assignment will bring the token (`AssignmentNote.handed_over`)."""
        request, token = self._scheduler.get(handover.request_id), TokenNote(UNKNOWN)
        if request is not None and request.assignment.attempt == handover.attempt and request.awaits_handover:
            token = self._note_of_next(request, handover.token_id)
        tail = None if handover.tail is None else self.partial_name(handover.tail)
        return HandoverNote(handover.request_id, handover.attempt, token, tail)

    def _note_of_header(self, header: SegmentHeader) -> SegmentHeader:
        """The header with another name for the partial block, and without the token."""
        handover, hashes = header.handover, header.hashes
        if handover is None:
            return header
        if handover.tail is not None:
            hashes = (*header.full_hashes, self.partial_name(handover.tail))
            handover = handover._replace(tail=hashes[-1])
        return replace(header, hashes=hashes, checksum=0, handover=handover._replace(token_id=UNKNOWN))

    def _note_of_incoming(self, incoming: IncomingBlocks) -> IncomingBlocks:
        """The blocks with another name for the partial one."""
        tail = incoming.tail
        names = [self.partial_name(name) if name == tail else name for name in incoming.hashes]
        return replace(incoming, hashes=tuple(names), tail=None)

    def _note_of_computed(self, computed: RunnerOutput) -> ComputedNote:
        sampled = []
        for request_id, tokens in computed.sampled.items():
            request = self._scheduler.get(request_id)
            notes = (TokenNote(UNKNOWN),) * len(tokens) if request is None else self._notes_of_sampled(request, tokens)
            sampled.append((request_id, notes))
        num_scores = [(request_id, len(scores)) for request_id, scores in computed.scores.items()]
        sums = [(request_id, len(each), len(each[0])) for request_id, each in computed.sums.items()]
        return ComputedNote(
            tuple(sampled),
            tuple(num_scores),
            refused=tuple(computed.refused),
            sums=tuple(sums),
            pooled=tuple(computed.pooled),
        )

    def _notes_of_sampled(self, request: Request, sampled: Sequence[SampledToken]) -> tuple[TokenNote, ...]:
        """The notes of the next tokens of a request, up to one that ends the answer."""
        sampling, notes = request.assignment.sampling, list[TokenNote]()
        token_ids, names = list(request.token_ids), list(request.full_hashes())
        for token_id, is_last in [(token.token_id, token.is_last) for token in sampled]:
            num_output = len(token_ids) - request.assignment.num_prompt_tokens
            if is_last or (token_id in sampling.stop_token_ids and num_output >= sampling.min_tokens):
                return *notes, TokenNote(END)
            note = TokenNote(UNKNOWN)
            if request.is_named:
                note = self._note_behind(request.chain, names, token_ids, token_id)
            notes.append(note)
            token_ids.append(token_id)
            names += [] if note.name is None else [note.name]
        return tuple(notes)

    def _note_of_next(self, request: Request, token_id: int) -> TokenNote:
        """The note of the token behind all tokens of a request."""
        if not request.is_named:
            return TokenNote(UNKNOWN)
        return self._note_behind(request.chain, request.full_hashes(), request.token_ids, token_id)

    def _note_behind(
        self, chain: BlockChain, names: Sequence[BlockHash], token_ids: Sequence[int], token_id: int
    ) -> TokenNote:
        index = len(token_ids) // chain.block_size
        block = [*token_ids[index * chain.block_size :], token_id]
        name = chain.partial(names, index, block)
        value = int.from_bytes(self._bytes_of(name))
        return TokenNote(value, name if len(block) == chain.block_size else None)

    def _bytes_of(self, name: BlockHash) -> bytes:
        return blake2b(name, key=self._key, digest_size=4).digest()


def _note_of_draft(draft: Draft) -> Draft:
    return draft._replace(token_ids=(UNKNOWN,) * len(draft.token_ids))


def _note_of_output(output: SchedulerOutput) -> OutputNote:
    return OutputNote(tuple([_note_of_chunk(chunk) for chunk in output.chunks]), output.preempted, output.moves)


def _note_of_chunk(chunk: ScheduledChunk) -> ChunkNote:
    return ChunkNote(
        chunk.request.request_id,
        arrival=chunk.request.arrival,
        start=chunk.start,
        num_tokens=chunk.num_tokens,
        store_from=chunk.store_from,
        samples=chunk.samples,
        scored=(chunk.scored.start, chunk.scored.stop),
        pooled=(chunk.pooled.start, chunk.pooled.stop),
        num_drafted=len(chunk.draft),
        draft_source=chunk.draft_source,
    )
