"""Makes the answers of a request that has been read: what each of its choices generates, and what reads its text."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from raydix.engine.api.assembler import ChoiceAssembler
from raydix.engine.api.resuming import Origin
from raydix.engine.api.spec import GenerationSpec, sampling_params
from raydix.engine.core.answers.prompt_form import ChatEnd
from raydix.engine.core.ingress.detokenizer import Detokenizer
from raydix.engine.core.ingress.generation import Generation
from raydix.engine.core.ingress.parsers import HERMES, LLAMA3, ToolFormat
from raydix.engine.core.ingress.parsers.answer import AnswerParser, AssembledMessage
from raydix.engine.core.ingress.parsers.bare import BareCalls
from raydix.engine.core.ingress.parsers.custom import CustomCalls
from raydix.engine.core.ingress.parsers.events import CallParser
from raydix.engine.core.ingress.parsers.harmony import HarmonyMessages, opening
from raydix.engine.core.ingress.parsers.reasoning import REASONING_TAGS, ReasoningParser, begins_inside
from raydix.engine.core.tenants import Tenant, num_public_tokens, salt_of
from raydix.engine.core.types import Adapter, CacheHints, CacheMark, Pooling, Salt
from raydix.engine.serving.chats import Chat, Chats
from raydix.engine.serving.job import Answer
from raydix.engine.serving.output import Vocabulary
from raydix.engine.serving.reader_work import Reading
from raydix.engine.serving.served_model import ServedModel

MARKED_PRIORITY = 1  # `cache_priority` of the KV before a mark, unless the request has a higher one


@dataclass(frozen=True, slots=True)
class PreparationFacts:
    """Facts of the model and the configuration that preparation needs."""

    model: ServedModel
    eos_token_ids: tuple[int, ...]
    block_size: int
    public_prefixes: tuple[tuple[int, ...], ...] = ()
    """Token ids of beginnings of prompts that all tenants share."""
    prefix_caching: bool = True
    tool_format: ToolFormat = HERMES
    """Format in which the model writes calls."""
    has_reasoning: bool = False
    """True if the model writes reasoning between tags."""
    pooling: Pooling = Pooling.MEAN
    """Pooling of prompts that are embedded."""


class Choices:
    """Makes an answer, with its generation and the parsers of its text, for each choice of a request."""

    def __init__(self, facts: PreparationFacts, chats: Chats, vocabulary: Vocabulary) -> None:
        self._facts = facts
        self._chats = chats
        self._vocabulary = vocabulary

    async def begin(
        self, reading: Reading, tenant: Tenant, origin: Origin, unique_id: str, adapter: Adapter | None
    ) -> list[Answer]:
        """Make an answer for each choice of each prompt."""
        spec = reading.spec
        chat: Chat | None = None
        token_ids: Sequence[Sequence[int]] = reading.prompts
        if reading.chat is not None:
            # Ids of earlier answers are kept under the salt, so that nobody else's reference finds them.
            private_salt = salt_of(tenant.name, spec.retention.salt).private
            chat = await self._chats.begin(reading, reading.chat, private_salt, tenant.name)
            token_ids = [chat.prompt.token_ids]

        hints, prediction = self._hints(reading, tenant), tuple(reading.prediction)
        reasoning_turn = self._reasoning_turn(chat)
        answers = []
        for number, prompt in enumerate(map(tuple, token_ids)):
            # Looked for once for all choices: a prompt may be long.
            begins_at = None if adapter is None else adapter.begins_at(prompt)
            for index in range(number * spec.num_samples, (number + 1) * spec.num_samples):
                generation = self._generation(
                    spec,
                    tenant,
                    prompt,
                    hints=hints,
                    request_id=f"{unique_id}-{index}",
                    index=index,
                    default_seed=origin.seed,
                    prediction=prediction,
                    # Without its invocation in the prompt an adapter computes nothing, and the model answers alone.
                    adapter=None if begins_at is None else adapter,
                    begins_at=begins_at or 0,
                )
                generation.reasoning_turn = reasoning_turn
                answers.append(self._answer(spec, generation, index, chat, origin))
            await asyncio.sleep(0)  # others' tokens pass between prompts

        return answers

    def _generation(
        self,
        spec: GenerationSpec,
        tenant: Tenant,
        prompt: tuple[int, ...],
        *,
        hints: CacheHints,
        request_id: str,
        index: int,
        default_seed: int,
        prediction: tuple[int, ...],
        adapter: Adapter | None,
        begins_at: int,
    ) -> Generation:
        sampling = sampling_params(
            spec,
            prompt_len=len(prompt),
            max_model_len=self._facts.model.max_model_len,
            eos_token_ids=self._facts.eos_token_ids,
            vocab_size=self._facts.model.vocab_size,
            default_seed=default_seed,
            choice=index,
        )
        return Generation(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling if spec.embedding is None else replace(sampling, pooling=self._facts.pooling),
            salt=self._salt(spec, tenant, request_id, prompt, adapter, begins_at),
            cache=hints,
            adapter=adapter,
            session=spec.service.session_id or spec.service.user,
            priority=spec.service.priority,
            objectives=spec.service.objectives,
            prediction=prediction,
        )

    def _hints(self, reading: Reading, tenant: Tenant) -> CacheHints:
        """Retention of the request's KV."""
        spec, block_size = reading.spec, self._facts.block_size
        marks = zip(spec.retention.marks, reading.marked_tokens, strict=True)
        # Formats without a marker write calls as any text, of which no token says that it is a call.
        call = self._facts.tool_format.form.marker if spec.tools is not None and spec.tools.may_call else None
        return CacheHints(
            tenant.name,
            spec.retention.priority,
            spec.retention.ttl_s,
            tuple(CacheMark(-(-num_tokens // block_size), MARKED_PRIORITY, mark.ttl_s) for mark, num_tokens in marks),
            call_token=self._vocabulary.added_id(call) if call else None,
        )

    def _salt(
        self,
        spec: GenerationSpec,
        tenant: Tenant,
        request_id: str,
        prompt: tuple[int, ...],
        adapter: Adapter | None,
        num_plain: int,
    ) -> Salt:
        """The sharing domain of a request's KV; without prefix caching the request's own."""
        digest = b"" if adapter is None else adapter.digest
        if not self._facts.prefix_caching:
            # The request's own id is a salt that nobody else has, so nothing is shared without another switch in the
            # workers.
            return salt_of(tenant.name, request_id, adapter=digest, num_plain_tokens=num_plain)
        num_public = num_public_tokens(prompt, self._facts.public_prefixes)
        return salt_of(tenant.name, spec.retention.salt, num_public, adapter=digest, num_plain_tokens=num_plain)

    def _answer(
        self, spec: GenerationSpec, generation: Generation, index: int, chat: Chat | None, origin: Origin
    ) -> Answer:
        # Only a token that the client named is told as what stopped the answer; the model's own end is not.
        own_stops = () if spec.ignore_eos else self._facts.eos_token_ids
        parser = self._parser(spec, chat)
        assembler = ChoiceAssembler(
            self._detokenizer(spec, parser),
            spec.stop,
            include_stop=spec.form.include_stop,
            min_tokens=generation.sampling.min_tokens,
            stop_token_ids=set(spec.sampling.stop_token_ids).difference(own_stops),
            parser=parser,
        )
        echo = self._echo(spec, index, generation.prompt) if spec.form.echo else ""
        call_ids = map(self._call_id, map(partial(origin.call_id, index), count()))
        custom = () if spec.tools is None else spec.tools.inputs
        message = None if parser is None else AssembledMessage(partial(next, call_ids), echo, custom)
        return Answer(generation, assembler, index, echo, chat=chat, message=message)

    def _detokenizer(self, spec: GenerationSpec, parser: AnswerParser | None) -> Detokenizer:
        """A detokenizer of an answer, which shows the special tokens that the parser looks for."""
        kind = self._facts.tool_format
        # The parts of an answer in channels cannot be told apart without their special tokens.
        if parser is None or not (spec.form.skip_special_tokens or kind.has_channels):
            return self._vocabulary.detokenizer(skip_special_tokens=spec.form.skip_special_tokens)
        names = kind.markers if kind.has_channels else (*kind.markers, *REASONING_TAGS)
        return self._vocabulary.showing({name: kind.shown(name) for name in names})

    def _parser(self, spec: GenerationSpec, chat: Chat | None) -> AnswerParser | None:
        """A parser of an answer to a chat; None if there is nothing to find in it but text."""
        if chat is not None and self._facts.tool_format.has_channels:
            return self._channels(spec, chat)
        tools, calls, reasoning = spec.tools, None, None
        if tools is not None and tools.may_call:
            kind = self._facts.tool_format
            # Under a grammar calls have the one form that it prescribes; without, whatever the model makes of it.
            new_parser = kind.parser if spec.sampling.grammar is None else kind.form_parser or kind.parser
            calls = new_parser(tools.schemas)
            # Of Llama's format a call is a bare object anyway; a prescribed call has its tags.
            if kind is not LLAMA3 and not tools.required:
                calls = BareCalls(calls, tools.schemas)
            if tools.inputs:
                calls = CustomCalls(calls, tools.inputs)
        if chat is not None and self._facts.has_reasoning and spec.reasoning.is_separate:
            reasoning = ReasoningParser(is_inside=begins_inside(chat.prompt.text))
        if calls is None and reasoning is None:
            return None
        return AnswerParser(
            calls,
            reasoning,
            is_single=tools is not None and tools.is_single,
            has_only_calls=tools is not None and bool(tools.required),
            shows_reasoning=spec.reasoning.is_shown,
        )

    def _channels(self, spec: GenerationSpec, chat: Chat) -> AnswerParser:
        """A parser of an answer in channels."""
        tools = spec.tools
        messages = HarmonyMessages(
            () if tools is None else tools.schemas,
            may_call=tools is not None and tools.may_call,
            is_separate=self._facts.has_reasoning and spec.reasoning.is_separate,
            begun=opening(chat.prompt.text),
        )
        calls: CallParser = messages if tools is None or not tools.inputs else CustomCalls(messages, tools.inputs)
        return AnswerParser(
            calls,
            messages=messages,
            is_single=tools is not None and tools.is_single,
            has_only_calls=tools is not None and bool(tools.required),
            shows_reasoning=spec.reasoning.is_shown,
        )

    def _reasoning_turn(self, chat: Chat | None) -> int | None:
        """Number of earlier answers in a chat with a model that writes reasoning."""
        if chat is None or not self._facts.has_reasoning:
            return None
        return sum(message["role"] == "assistant" for message in chat.messages)

    def _call_id(self, unique: str) -> str:
        return unique[:9] if self._facts.tool_format.has_short_ids else f"call_{unique}"

    def _echo(self, spec: GenerationSpec, index: int, token_ids: tuple[int, ...]) -> str:
        """Text before the answer of a choice."""
        if spec.kind == "chat":
            last = spec.messages[-1]
            is_same_role = spec.chat_end is not ChatEnd.ANSWER or last["role"] == "assistant"
            return str(last["content"]) if is_same_role else ""
        prompt = spec.prompts[index // spec.num_samples]
        return prompt if isinstance(prompt, str) else self._vocabulary.text_of(token_ids)
