"""Questions for an engine, made of bodies as a server makes them: parsed, rendered by the chat template, tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.drafting.workloads import Body, Workload, encoded
from raydix.engine.api.requests import parse_chat
from raydix.engine.api.spec import GenerationSpec, sampling_params
from raydix.engine.api.tools import with_calls
from raydix.engine.core.ingress.parsers import HERMES
from raydix.engine.core.types import Assignment, Salt, Sampling, Stage
from raydix.engine.model.chats import encode_chat, render_chat
from raydix.engine.model.grammar_source import canonical
from raydix.engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Question:
    """One request before it has a name."""

    workload: str
    prompt: tuple[int, ...]
    sampling: Sampling
    prediction: tuple[int, ...] = ()

    def assignment(self, request_id: str, client: bytes = b"") -> Assignment:
        """The question of a client. KV of prompts is shared among clients, nothing else is."""
        return Assignment(
            request_id=request_id,
            attempt=0,
            stage=Stage.WHOLE,
            token_ids=self.prompt,
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            reply_to="",
            salt=Salt(client, len(self.prompt)),
            prediction=self.prediction,
        )


class QuestionReader:
    """Reads bodies for one model."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        self.tokenizer = Tokenizer(folder)
        self._max_model_len = max_model_len

    def questions(self, workload: Workload) -> list[Question]:
        """The requests of a workload. Raises RequestError for a body that no server would take."""
        return [self.read(workload.name, body) for body in workload.bodies()]

    def read(self, workload: str, body: Body) -> Question:
        """The question of a body. Raises RequestError for one that no server would take."""
        spec = self._with_calls(parse_chat(encoded(body)))
        tools = () if spec.tools is None else spec.tools.definitions
        chat = encode_chat(self.tokenizer, render_chat(self.tokenizer, spec.messages, tools=tools))
        sampling = sampling_params(
            spec,
            prompt_len=len(chat.token_ids),
            max_model_len=self._max_model_len,
            eos_token_ids=self.tokenizer.eos_token_ids,
            vocab_size=self.tokenizer.vocab_size,
            default_seed=0,
        )
        if sampling.grammar is not None:
            sampling = replace(sampling, grammar=canonical(sampling.grammar))
        return Question(workload, tuple(chat.token_ids), sampling, tuple(self._encoded(spec.prediction or "")))

    def _with_calls(self, spec: GenerationSpec) -> GenerationSpec:
        """The request with the form of the calls that it asks for."""
        ids = {name: self.tokenizer.added_id(name) for name in HERMES.markers}
        special = {name: token_id for name, token_id in ids.items() if token_id is not None}
        return with_calls(spec, HERMES.form, special)

    def _encoded(self, text: str) -> Sequence[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
