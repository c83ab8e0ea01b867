"""The parts of an ingress replica, put together as its configuration says."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raydix.actors.ingress.adapters import AdapterLimits, AdapterOperations
from raydix.actors.ingress.batches import ROUTES, Batches, BatchSettings
from raydix.actors.ingress.cache_control import CacheOperations
from raydix.actors.ingress.cluster_metrics import ClusterMetrics, ReplicaMetrics
from raydix.actors.ingress.cluster_trace import ClusterTrace
from raydix.actors.ingress.dispatcher import Deliveries, Dispatcher
from raydix.actors.ingress.frontend import Frontend, FrontendParts, ReplicaLimits
from raydix.actors.ingress.manager_link import ManagerAnswers, ManagerLink
from raydix.actors.ingress.queue_watch import QueueWatch
from raydix.actors.ingress.telemetry import telemetry_of
from raydix.actors.instruments import families_of
from raydix.actors.metric_values import MetricFamily
from raydix.actors.metrics import HoldMetrics, IngressMetrics
from raydix.actors.process_metrics import ProcessMetrics
from raydix.actors.runtime import Runtime
from raydix.actors.tracing import Recorder
from raydix.configs.schema import Config
from raydix.configs.sections import INGRESS
from raydix.configs.settings import tenants
from raydix.engine.api.batches import LineLimits
from raydix.engine.api.validation import BodyRules
from raydix.engine.batches.file_store import StoreLimits
from raydix.engine.core.errors import RequestError, StartupError
from raydix.engine.core.hashing import root_hash
from raydix.engine.core.ingress.answer_room import AnswerRoom
from raydix.engine.core.ingress.cluster_view import ModelFacts
from raydix.engine.core.ingress.parsers import TOOL_FORMATS, ToolFormat
from raydix.engine.core.ingress.room import Room
from raydix.engine.core.settings import GIB
from raydix.engine.core.types import Adapter, DraftSource, Pooling
from raydix.engine.model.adapters import identify_adapter, identify_adapters
from raydix.engine.model.chats import chat_beginning, reasoning_format, tool_format
from raydix.engine.model.identity import ModelIdentity, identify
from raydix.engine.model.sources import cache_folder, model_name
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.serving.accounting import Accounting, Refusals
from raydix.engine.serving.answer_rendering import renderers
from raydix.engine.serving.chats import Chats
from raydix.engine.serving.choices import PreparationFacts
from raydix.engine.serving.kept_conversations import KeptConversations
from raydix.engine.serving.output import OutputProcessor, Vocabulary
from raydix.engine.serving.preparation import Preparation
from raydix.engine.serving.prompt_records import PromptRecords
from raydix.engine.serving.reader_pool import RequestReader
from raydix.engine.serving.reader_work import ReadingFacts
from raydix.engine.serving.rendering import Rendering, RenderThread
from raydix.engine.serving.request_table import RequestTable
from raydix.engine.serving.served_model import ServedModel, ServedModels
from raydix.engine.serving.stored_responses import StoredResponses
from raydix.engine.serving.tokenization import Tokenization
from raydix.engine.serving.transcripts import Transcripts

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class _Model:
    """The model, as a replica without its weights knows it."""

    identity: ModelIdentity
    served: ServedModel
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    tool_format: ToolFormat
    has_reasoning: bool


def build_frontend(config: Config, runtime: Runtime, replica_id: str, holds: HoldMetrics) -> Frontend:
    """Build the frontend of one replica, whose process' `holds` are counted elsewhere; it is not started.

    Raises:
        StartupError: the model or a public prefix cannot be used.
    """
    model = _model(config)
    reader = _reader(config, model)
    all_tenants = tenants(config)
    models = ServedModels(model.served, _adapters(config, model), all_tenants)
    metrics = IngressMetrics(
        all_tenants.names, replica_id, ROUTES, runtime.request_metrics(), adapters=config.model.adapters
    )
    manager = ManagerLink(runtime)
    room = Room(replica_limits(config).max_requests, all_tenants)
    # One process has one name: workers and the manager never take a new process for one that they follow.
    ingress_id = f"{replica_id}-{secrets.token_hex(4)}"
    recorder = Recorder(replica_id, INGRESS)
    deliveries = Deliveries(metrics, recorder)
    dispatcher = _dispatcher(
        config, model.identity, manager, metrics, models, deliveries, name=ingress_id, runtime=runtime
    )

    # All names of kept answers hash the model, so that ids of another model's tokens are never found.
    answers, root = ManagerAnswers(manager), root_hash(model.identity.fingerprint)
    chats = _chats(model, Transcripts(answers, root, metrics.looked_up), reader=reader, dispatcher=dispatcher)
    responses = StoredResponses(answers, root, chats.shown)
    conversations = KeptConversations(answers, root, chats.shown)
    records = PromptRecords(partial(model.tokenizer.decode, skip_special_tokens=False))
    output = OutputProcessor(dispatcher.generate, dispatcher.stopped, chats, prefix_caching=config.cache.prefix_caching)
    rendering = Rendering(output.pieces, model.vocabulary.bytes_of, RenderThread())
    requests, process = RequestTable(), ProcessMetrics(replica_id)
    queues = QueueWatch(metrics, requests, room, reader)

    def families() -> Sequence[MetricFamily]:
        queues.look()
        return (*families_of(metrics), *families_of(holds), *process.families())

    parts = FrontendParts(
        models=models,
        tenants=all_tenants,
        cache=CacheOperations(manager, model.tokenizer.decode, records),
        adapters=AdapterOperations(
            manager,
            models,
            AdapterLimits(config.model.adapter_folders, config.model.max_loaded_adapters),
            partial(identify_adapter, config=model.identity.config),
        ),
        tokenization=Tokenization(reader, room, models, _description(model) if config.http.tokenizer_info else None),
        room=room,
        reader=reader,
        dispatcher=dispatcher,
        preparation=Preparation(
            _preparation_facts(config, model),
            reader=reader,
            room=room,
            chats=chats,
            responses=responses,
            conversations=conversations,
            vocabulary=model.vocabulary,
            # Asked anew each time: the root is known once workers have registered, and changes with their arithmetic.
            root=lambda: dispatcher.root,
            records=records,
            models=models,
        ),
        output=output,
        responses=responses,
        conversations=conversations,
        rendering=rendering,
        answer_room=AnswerRoom(replica_limits(config).answer_bytes),
        renderers=renderers(rendering, output.pieces, responses, conversations),
        accounting=Accounting(metrics, Refusals()),
        requests=requests,
        queues=queues,
        trace=ClusterTrace(recorder, lambda: dispatcher.workers, runtime.find_worker, manager),
        metrics=ClusterMetrics(
            ReplicaMetrics(replica_id, families, model.served.name, _about(model)),
            manager,
            workers=lambda: dispatcher.workers,
            find=runtime.find_worker,
        ),
        telemetry=telemetry_of(config.observability, replica_id),
    )
    return Frontend(parts)


def build_batches(config: Config, frontend: Frontend) -> Batches | None:
    """Build files and batches of one replica, not started; None where the configuration turns them off."""
    if not config.batches.gib:
        return None
    return Batches(batch_settings(config), frontend, frontend.tenants)


def batch_settings(config: Config) -> BatchSettings:
    """Facts of a configuration for files and batches."""
    section = config.batches
    return BatchSettings(
        # Without a folder in the configuration batches outlive a restart on this machine, in the user's own cache.
        folder=cache_folder() / "batches" if section.folder is None else Path(section.folder).expanduser(),
        stored=StoreLimits(
            file_bytes=section.max_file_mib << 20,
            tenant_bytes=int(section.tenant_gib * GIB),
            total_bytes=int(section.gib * GIB),
            tenant_files=section.max_files,
            keep_s=section.keep_days * DAY_S,
        ),
        lines=LineLimits(section.max_lines, config.ingress.max_body_bytes),
        concurrency=section.concurrency,
        model_name=config.model.name or model_name(config.model.source),
    )


def replica_limits(config: Config) -> ReplicaLimits:
    section = config.ingress
    return ReplicaLimits(
        section.max_queued_requests, section.max_waiting_mib << 20, section.answer_mib << 20, section.reader_processes
    )


def identity_of(config: Config) -> ModelIdentity:
    """The served model, without its weights. Raises StartupError if it cannot be used."""
    model = config.model
    return identify(
        model.source,
        dtype=model.dtype,
        block_size=config.cache.block_size,
        max_model_len=model.max_model_len,
        quantization=model.quantization,
        kv_dtype=config.cache.kv_dtype,
        deterministic=model.deterministic,
    )


def _dispatcher(
    config: Config,
    identity: ModelIdentity,
    manager: ManagerLink,
    metrics: IngressMetrics,
    models: ServedModels,
    deliveries: Deliveries,
    *,
    name: str,
    runtime: Runtime,
) -> Dispatcher:
    return Dispatcher(
        ingress_id=name,
        runtime=runtime,
        manager=manager,
        model=_model_facts(config, identity),
        on_failover=metrics.failed_over,
        on_delivery=deliveries.took,
        adapters=models,
    )


def _model(config: Config) -> _Model:
    """Read the model's folder. Parsers are the configured ones, or those of the model's family."""
    identity = identity_of(config)
    tokenizer = Tokenizer(identity.folder)
    name = config.model.name or model_name(config.model.source)
    # The template shows whether the model writes reasoning; a configuration may know better.
    reasoning = config.model.reasoning_parser or reasoning_format(tokenizer)
    return _Model(
        identity=identity,
        served=ServedModel(name, identity.max_model_len, identity.vocab_size, identity.config.hidden_size),
        tokenizer=tokenizer,
        vocabulary=Vocabulary(tokenizer),
        tool_format=_tool_format(config, tokenizer),
        has_reasoning=reasoning != "none",
    )


def _tool_format(config: Config, tokenizer: Tokenizer) -> ToolFormat:
    """The configured format of calls, or the model's. Raises StartupError for one that the model cannot write."""
    found = TOOL_FORMATS[tool_format(tokenizer, config.model.tool_parser)]
    missing = [name for name in found.markers if tokenizer.special_id(name) is None]
    if found.has_channels and missing:
        raise StartupError(
            f"model.tool_parser: this model's tokenizer has no token {missing[0]}, which {found.name} has"
        )
    return found


def _adapters(config: Config, model: _Model) -> tuple[Adapter, ...]:
    """The configured adapters. Raises StartupError for one that cannot be used, or has the model's name."""
    if model.served.name in config.model.adapters:
        raise StartupError(f"model.adapters: {model.served.name} is the name of the model itself")
    return identify_adapters(config.model.adapters, model.identity.config)


def _about(model: _Model) -> Mapping[str, str]:
    """The model as the labels of a metric."""
    return {
        "context_tokens": str(model.served.max_model_len),
        "vocabulary": str(model.served.vocab_size),
        "fingerprint": model.identity.fingerprint,
    }


def _description(model: _Model) -> Mapping[str, object]:
    """The tokenizer as `/tokenizer_info` describes it."""
    return {**model.tokenizer.describe(), "model_max_length": model.served.max_model_len}


def _reader(config: Config, model: _Model) -> RequestReader:
    facts = ReadingFacts(
        model=model.served,
        folder=model.identity.folder,
        special_tokens_in_messages=config.model.special_tokens_in_messages,
        tool_format=model.tool_format,
        has_reasoning=model.has_reasoning,
        effort_tokens={str(effort): tokens for effort, tokens in config.model.effort_tokens.items()},
        chat_templates_in_requests=config.model.chat_templates_in_requests,
        rules=BodyRules(
            takes_unknown=config.http.unknown_fields == "ignore", volatile_lines=config.model.volatile_lines
        ),
        uses_predictions=config.speculation.uses(DraftSource.PREDICTION),
    )
    limits = replica_limits(config)
    return RequestReader(facts, model.tokenizer, limits.max_waiting_bytes, limits.reader_processes)


def _model_facts(config: Config, identity: ModelIdentity) -> ModelFacts:
    cache = config.cache
    return ModelFacts(
        identity.fingerprint,
        cache.block_size,
        cache.await_timeout_s,
        # Hand-overs find blocks by their hashes, also where nothing is kept for later requests.
        names_blocks=cache.prefix_caching or config.workers.hands_over,
        names_answers=cache.prefix_caching and config.speculation.uses(DraftSource.CLUSTER),
    )


def _chats(model: _Model, transcripts: Transcripts, *, reader: RequestReader, dispatcher: Dispatcher) -> Chats:
    return Chats(
        tokenizer=model.tokenizer,
        vocab_size=model.served.vocab_size,
        max_model_len=model.served.max_model_len,
        new_detokenizer=model.vocabulary.detokenizer,
        transcripts=transcripts,
        reader=reader,
        prepare=dispatcher.prepare,
    )


def _preparation_facts(config: Config, model: _Model) -> PreparationFacts:
    return PreparationFacts(
        model=model.served,
        eos_token_ids=tuple(model.tokenizer.eos_token_ids),
        block_size=config.cache.block_size,
        public_prefixes=_public_prefixes(model.tokenizer, config),
        prefix_caching=config.cache.prefix_caching,
        pooling=Pooling(config.model.pooling),
        tool_format=model.tool_format,
        has_reasoning=model.has_reasoning,
    )


def _public_prefixes(tokenizer: Tokenizer, config: Config) -> tuple[tuple[int, ...], ...]:
    special_tokens = config.model.special_tokens_in_messages
    texts = config.cache.public_prefixes
    try:
        return tuple(chat_beginning(tokenizer, text, special_tokens=special_tokens) for text in texts)
    except RequestError as error:
        raise StartupError(f"cache.public_prefixes: {error}") from None
