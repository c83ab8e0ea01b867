"""The agents: how each is run, and the answers of its model, which call commands or the program's own tools, or edit
files in the program's form."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.agents.relay import Exchange
from tests.clients.programs.environment import ENVIRONMENTS, installed_version
from tests.clients.server import ROOT

NODE = ENVIRONMENTS / "agents-node"
PROMPTFOO = ENVIRONMENTS / "agents-promptfoo"
PYTHON = ENVIRONMENTS / "agents-python"
CREWAI = ENVIRONMENTS / "agents-crewai"
DSPY = ENVIRONMENTS / "agents-dspy"
AIDER = ENVIRONMENTS / "agents-aider"
SCRIPTS = Path(__file__).parent / "scripts"
EVALUATION = Path(__file__).parent / "promptfoo/evaluation.yaml"
NUM_STEPS = 10
TIMEOUT_S = 300
"""Of one agent's whole task."""
MODEL = "scripted"
CONTEXT = 131_072

Call = Mapping[str, object]
Line = dict[str, object]
"""A line of the model's script."""
Lines = Callable[["Agent"], list[Line]]


@dataclass(frozen=True, slots=True)
class Place:
    """An agent's surroundings: the server's address, and folders of its own."""

    url: str
    home: Path
    work: Path

    def write(self, path: str, content: object) -> None:
        """Write a file of settings, JSON but for a text, below the home folder."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))


@dataclass(frozen=True, slots=True)
class Agent:
    """One program. `command` also writes its settings."""

    name: str
    package: str
    command: Callable[[Place, str], list[str]]
    lines: Lines
    """The answers of the model."""
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    folder: Path = NODE
    """The environment of npm or of Python where the program is."""
    typed: tuple[str, ...] = ()
    """The user's messages, for a program that reads them from its standard input, one a line."""
    mark: str = ""
    """Text that requests of the program's own conversation have, where no tools tell them from others."""
    leaves: str = ""
    """File in the working folder with the results of the steps, where the program sends them to nobody."""
    rewrites_end: bool = False
    """The program writes the end of its prompt anew in each turn, so that only the rest can be found in the cache."""

    @property
    def version(self) -> str:
        """The installed version; empty where it is not installed."""
        path = self.folder / "node_modules" / self.package / "package.json"
        if path.exists():
            return str(json.loads(path.read_text())["version"])
        return installed_version(self.package, self.folder)

    @property
    def task(self) -> str:
        return f"do the ten steps of {self.name}"

    @property
    def end(self) -> str:
        """The last answer."""
        return f"All steps of {self.name} are done."

    def result(self, number: int) -> str:
        """The output of a step."""
        return f"{self.name}-step-{number}"

    def script(self) -> list[Line]:
        """The answers of the model to the agent."""
        return self.lines(self)

    def is_turn(self, exchange: Exchange) -> bool:
        """True for an answered request of the agent's own conversation; one for a title is none."""
        is_own = self.mark.encode() in exchange.request if self.mark else exchange.has_tools
        return is_own and exchange.status == 200 and exchange.usage[0] > 0

    def run(self, place: Place) -> str:
        """Run the task to its end; returns what the program printed. A program that ends with an error, or not in time,
        fails the test."""
        left_out = ("PYTHONPATH", "RAY_", "PYTEST_", "ANTHROPIC_", "OPENAI_", "VIRTUAL_ENV")
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        own |= {"HOME": str(place.home), "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{place.url}/v1", "CI": "1"}
        place.write("typed.txt", "".join(f"{message}\n" for message in self.typed))
        with (place.home / "typed.txt").open() as typed:
            done = subprocess.run(
                self.command(place, self.task),
                cwd=place.work,
                env={**own, "NO_PROXY": "127.0.0.1", **self.environment(place)},
                stdin=typed if self.typed else subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


def _bin(name: str, folder: Path = NODE) -> str:
    return str(folder / "node_modules/.bin" / name)


def _calls(call: Callable[[str, int], Call], *, final: str = "") -> Lines:
    """A call for each step, given the command that shows its number, and the number. `final` is the tool that takes the
    last answer, where the program has every answer be a call."""

    def lines(agent: Agent) -> list[Line]:
        made: list[Line] = []
        for number in range(1, NUM_STEPS + 1):
            after = agent.task if number == 1 else agent.result(number - 1)
            # The command does not have the text of its output, which the next line waits for.
            step = call(f"echo {agent.name}-step-$(({number - 1}+1))", number)
            made.append({"after": after, "answer": "" if final else f"Now step {number}.", "calls": [step]})
        end: Line = {"calls": [{"name": final, "arguments": {"answer": agent.end}}]} if final else {"answer": agent.end}
        return [*made, {"after": agent.result(NUM_STEPS), **end}]

    return lines


def _shell(tool: str, key: str = "command", **others: object) -> Lines:
    """Calls of a tool that runs a command."""
    return _calls(lambda command, number: {"name": tool, "arguments": {key: command, **others}})


def _own(tool: str, *, final: str = "") -> Lines:
    """Calls of a tool of the program's own, which takes the number of the step."""
    return _calls(lambda command, number: {"name": tool, "arguments": {"number": number}}, final=final)


def _script(name: str, folder: Path = PYTHON) -> Callable[[Place, str], list[str]]:
    return lambda place, task: [str(folder / "bin/python"), str(SCRIPTS / name), place.url, MODEL, task]


def _claude(place: Place, task: str) -> list[str]:
    return [_bin("claude"), "-p", task, "--allowedTools", "Bash", "--model", MODEL]


def _codex(place: Place, task: str) -> list[str]:
    place.write(
        ".codex/config.toml",
        f'model = "{MODEL}"\nmodel_provider = "raydix"\nmodel_context_window = {CONTEXT}\n'
        f'[model_providers.raydix]\nname = "raydix"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n',
    )
    return [_bin("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]


def _opencode(place: Place, task: str) -> list[str]:
    limits = {"context": CONTEXT, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "tool_call": True, "limit": limits}},
    }
    place.write(".config/opencode/opencode.json", {"provider": {"raydix": provider}, "permission": "allow"})
    return [_bin("opencode"), "run", "--model", f"raydix/{MODEL}", task]


def _qwen(place: Place, task: str) -> list[str]:
    flags = ["--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", f"{place.url}/v1"]
    return [_bin("qwen"), "--model", MODEL, *flags, "--yolo", "-p", task]


def _pi(place: Place, task: str) -> list[str]:
    model = {"id": MODEL, "contextWindow": CONTEXT, "maxTokens": 8192}
    provider = {"baseUrl": f"{place.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    place.write(".pi/agent/models.json", {"providers": {"raydix": provider}})
    return [_bin("pi"), "--provider", "raydix", "--model", MODEL, "-p", task]


def _llm(place: Place, task: str) -> list[str]:
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{place.url}/v1", "supports_tools": True}
    place.write("llm/extra-openai-models.yaml", [model])  # JSON is YAML, too
    tools = ["--functions", str(SCRIPTS / "llm_tools.py"), "--chain-limit", "20"]
    return [str(PYTHON / "bin/llm"), "--model", MODEL, "--system", "You make steps.", *tools, task]


def _asked(name: str) -> tuple[str, ...]:
    """The user's messages where there is one for each step, and a last one."""
    return (*(f"make step {number} of {name}" for number in range(1, NUM_STEPS + 1)), f"say what {name} has done")


def _aider(place: Place, task: str) -> list[str]:
    limits = {"max_input_tokens": CONTEXT, "max_output_tokens": 8192, "litellm_provider": "openai", "mode": "chat"}
    place.write(".aider.model.metadata.json", {f"openai/{MODEL}": limits})
    # Not streamed, since aider does not ask for the usage of streams. The last four keep it from the internet and from
    # the terminal.
    settings = {
        "model": f"openai/{MODEL}",
        "openai-api-base": f"{place.url}/v1",
        "openai-api-key": "none",
        "edit-format": "diff",
        "stream": False,
        "check-update": False,
        "analytics-disable": True,
        "fancy-input": False,
        "yes-always": True,
    }
    place.write(".aider.conf.yml", settings)
    return [str(AIDER / "bin/aider")]


def _edits(agent: Agent) -> list[Line]:
    """Edits of a file in aider's form, and the messages of the commits that aider makes of them."""
    made: list[Line] = []
    for number, asked in enumerate(agent.typed[:NUM_STEPS], 1):
        before = f"{agent.result(number - 1)}\n" if number > 1 else ""
        edit = f"<<<<<<< SEARCH\n{before}=======\n{before}{agent.result(number)}\n>>>>>>> REPLACE"
        made.append({"after": asked, "answer": f"Step {number}.\n\nsteps.txt\n```\n{edit}\n```\n"})
        made.append({"after": f"+{agent.result(number)}", "answer": f"docs: make step {number}"})
    return [*made, {"after": agent.typed[-1], "answer": agent.end}]


def _promptfoo(place: Place, task: str) -> list[str]:
    flags = ["--no-cache", "--no-share", "--no-table", "--output", "results.json"]
    return [_bin("promptfoo", PROMPTFOO), "eval", "--config", str(EVALUATION), *flags]


def _evaluations(agent: Agent) -> list[Line]:
    """A call for each question; promptfoo takes what the call returns for the answer."""
    steps: list[Line] = [
        {"after": asked, "calls": [{"name": "step", "arguments": {"number": number}}]}
        for number, asked in enumerate(_asked(agent.name)[:NUM_STEPS], 1)
    ]
    return [*steps, {"after": _asked(agent.name)[-1], "answer": agent.end}]


AGENTS = (
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code",
        _claude,
        _shell("Bash", description="Shows the step."),
        lambda place: {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    Agent("codex", "@openai/codex", _codex, _shell("exec_command", "cmd")),
    Agent("opencode", "opencode-ai", _opencode, _shell("bash", description="Shows the step.")),
    Agent("qwen-code", "@qwen-code/qwen-code", _qwen, _shell("run_shell_command", is_background=False)),
    Agent("pi", "@mariozechner/pi-coding-agent", _pi, _shell("bash")),
    Agent(
        "aider",
        "aider-chat",
        _aider,
        _edits,
        lambda place: {"LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        folder=AIDER,
        typed=_asked("aider"),
        mark="SEARCH/REPLACE",
        leaves="steps.txt",
        rewrites_end=True,
    ),
    Agent("openai-agents", "openai-agents", _script("openai_agents.py"), _own("step"), folder=PYTHON),
    Agent("autogen", "autogen-agentchat", _script("autogen.py"), _own("step"), folder=PYTHON),
    Agent(
        "smolagents",
        "smolagents",
        _script("smolagents_tools.py"),
        _own("step", final="final_answer"),
        folder=PYTHON,
    ),
    Agent("deepagents", "deepagents", _script("deep_agent.py"), _own("step"), folder=PYTHON),
    Agent(
        "crewai",
        "crewai",
        _script("crewai_crew.py", CREWAI),
        _own("step"),
        lambda place: {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"},
        folder=CREWAI,
    ),
    Agent(
        "dspy",
        "dspy",
        _script("dspy_react.py", DSPY),
        _own("step", final="submit"),
        lambda place: {"LITELLM_LOCAL_MODEL_COST_MAP": "true"},
        folder=DSPY,
        rewrites_end=True,
    ),
    Agent("haystack", "haystack-ai", _script("haystack_agent.py"), _own("step"), folder=PYTHON),
    Agent(
        "semantic-kernel",
        "semantic-kernel",
        _script("semantic_kernel_agent.py"),
        _own("Steps-step"),
        folder=PYTHON,
    ),
    Agent("inspect", "inspect-ai", _script("inspect_task.py"), _own("step"), folder=PYTHON),
    Agent(
        "promptfoo",
        "promptfoo",
        _promptfoo,
        _evaluations,
        lambda place: {
            "PROMPTFOO_CONFIG_DIR": str(place.home / "promptfoo"),
            "PROMPTFOO_DISABLE_TELEMETRY": "1",
            "PROMPTFOO_DISABLE_UPDATE": "1",
            "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
        },
        folder=PROMPTFOO,
        leaves="results.json",
    ),
    Agent(
        "llm",
        "llm",
        _llm,
        _own("step"),
        lambda place: {"LLM_USER_PATH": str(place.home / "llm")},
        folder=PYTHON,
    ),
)
"""`make test-agents` installs these."""

assert ROOT in SCRIPTS.parents
