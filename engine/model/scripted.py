"""A model that answers from a script: a folder with a configuration, a tokenizer and `script.jsonl`, without weights.

    {"after": "what is here?", "answer": "Let me look.", "calls": [{"name": "list", "arguments": {"path": "."}}]}
    {"after": "a.txt", "answer": "One file."}
    {"after": "", "answer": "I have no words for this."}

A prompt is answered by the line whose `after` stands last in it; of several that end at the same place by the one with
the longest `after`, then with the longest `if`, a text that the prompt must have, too. So an agent that gets calls,
makes them and sends the results back can be run to its end. All but the model is real: blocks of KV and hits on them,
grammars, stop tokens, streams.

An answer is a function of the prompt alone, and its tokens are those of its text, so another worker goes on with it as
with any model's. A token that the request's grammar forbids ends the request with an error.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from raydix.engine.core.errors import StartupError
from raydix.engine.core.worker.drafts.rows import Row, rows_of, sampled_by_request
from raydix.engine.core.worker.step import RunnerOutput, SampledToken, SchedulerOutput
from raydix.engine.model.grammars import Grammars, StepMasks
from raydix.engine.model.runner import CERTAIN, NullRunner
from raydix.engine.model.tokenizer import Tokenizer
from raydix.engine.model.tool_texts import call_text

SCRIPT = "script.jsonl"
WINDOW = 16_384  # tokens at a prompt's end in which the texts of a script are looked for
MAX_KEPT = 1024  # answers of requests that are kept between steps; others are made again


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """One line of a script."""

    after: str
    answer: str
    """The whole text, calls included."""
    condition: str = ""
    """Text that the prompt must have anywhere."""


class Script:
    """The answers of a model by the end of the prompt."""

    def __init__(self, lines: tuple[ScriptLine, ...]) -> None:
        self.lines = lines

    def answer(self, prompt: str) -> str:
        """Return the answer to a prompt; the empty text if no line is for it."""
        found = ((_end_of(line, prompt), len(line.after), len(line.condition), line.answer) for line in self.lines)
        best = max(found, key=lambda each: each[:3], default=None)
        return best[3] if best is not None and best[0] >= 0 else ""


def _end_of(line: ScriptLine, prompt: str) -> int:
    """Return where a line's text ends the last time in a prompt; -1 for a line that is not for the prompt. A line
    without a text is for all prompts that no other line is for."""
    if line.condition not in prompt:
        return -1
    if not line.after:
        return 0
    start = prompt.rfind(line.after)
    return -1 if start < 0 else start + len(line.after)


def read_script(folder: Path) -> Script:
    """Read the script in a model's folder. Raises StartupError naming the line at fault."""
    path = folder / SCRIPT
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    return Script(tuple(_line(text, f"{path}:{number}") for number, text in enumerate(texts, 1) if text.strip()))


def _line(text: str, place: str) -> ScriptLine:
    try:
        fields = json.loads(text)
        calls = [call_text(call["name"], json.dumps(call["arguments"])) for call in fields.get("calls", ())]
        answer = "\n".join([*([fields["answer"]] if fields.get("answer") else []), *calls])
        line = ScriptLine(fields["after"], answer, fields.get("if", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{place} is no line of a script: {error!r}") from None
    if not all(isinstance(each, str) for each in (line.after, line.answer, line.condition)):
        raise StartupError(f"{place} is no line of a script: 'after', 'answer' and 'if' are texts")
    return line


class ScriptedRunner(NullRunner):
    """Samples the tokens of a script's answers, as far as grammars allow them."""

    def __init__(self, tokenizer: Tokenizer, script: Script, grammars: Grammars, hidden_size: int = 1) -> None:
        super().__init__(hidden_size)
        self._tokenizer = tokenizer
        self._script = script
        self._grammars = grammars
        self._end = tokenizer.eos_token_ids[0]
        self._answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # tokens of answers by request

    def run(self, output: SchedulerOutput) -> RunnerOutput:
        """Return the next token of its answer for each row, and all else as the null model has it."""
        rows = rows_of(output.chunks)
        masking = self._grammars.begin(rows)
        masks = None if masking is None else masking.result()
        made_up = super().run(output)

        refused = {} if masks is None else {rows[at].request_id: why for at, why in masks.dead_ends.items()}
        tokens = []
        for at, row in enumerate(rows):
            token_id = self._next(row)
            if row.request_id not in refused and not _is_allowed(masks, at, token_id):
                refused[row.request_id] = "the grammar does not allow the script's answer"
            logprobs = None if row.assignment.sampling.logprobs is None else CERTAIN
            tokens.append(SampledToken(token_id, logprobs))
        ended = frozenset[int]() if masks is None else masks.ended
        sampled = sampled_by_request(output.chunks, tokens, ended)
        return RunnerOutput(sampled, made_up.scores, refused, sums=made_up.sums, pooled=made_up.pooled)

    def _next(self, row: Row) -> int:
        """Return a row's token: the next one of the answer, and behind it the end of the sequence."""
        answer = self._answers.get(row.request_id)
        if answer is None or not row.num_output:  # a request that has ended may have had the same name
            prompt = row.token_ids[: row.assignment.num_prompt_tokens][-WINDOW:]
            text = self._script.answer(self._tokenizer.decode(prompt, skip_special_tokens=False))
            answer = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            self._answers[row.request_id] = answer
            while len(self._answers) > MAX_KEPT:
                self._answers.popitem(last=False)
        return answer[row.num_output] if row.num_output < len(answer) else self._end


def _is_allowed(masks: StepMasks | None, row: int, token_id: int) -> bool:
    if masks is None or masks.rows[row] < 0:
        return True
    return bool(masks.bits[masks.rows[row]][token_id // 32] >> (token_id % 32) & 1)
