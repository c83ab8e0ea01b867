"""The agents: how each is run, and the call by which its model runs a command or the program's own tool."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.clients.programs.environment import ENVIRONMENTS, installed_version
from tests.clients.server import ROOT

NODE = ENVIRONMENTS / "agents-node"
PYTHON = ENVIRONMENTS / "agents-python"
SCRIPTS = Path(__file__).parent / "scripts"
NUM_STEPS = 10
TIMEOUT_S = 300
"""Of one agent's whole task."""
MODEL = "scripted"

Call = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Place:
    """An agent's surroundings: the server's address, and folders of its own."""

    url: str
    home: Path
    work: Path

    def write(self, path: str, content: object) -> None:
        """Write a file of settings below the home folder."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))


@dataclass(frozen=True, slots=True)
class Agent:
    """One program. `command` also writes its settings."""

    name: str
    package: str
    command: Callable[[Place, str], list[str]]
    call: Callable[[str, int], Call]
    """The call of the next step, given the command that shows its number, and the number."""
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    is_python: bool = False
    must_call: bool = False
    """The program has every answer be a call, the last one of `final_answer`."""

    @property
    def version(self) -> str:
        """The installed version; empty where it is not installed."""
        if self.is_python:
            return installed_version(self.package, PYTHON)
        path = NODE / "node_modules" / self.package / "package.json"
        return str(json.loads(path.read_text())["version"]) if path.exists() else ""

    @property
    def task(self) -> str:
        return f"do the ten steps of {self.name}"

    def result(self, number: int) -> str:
        """The output of a step."""
        return f"{self.name}-step-{number}"

    def script(self) -> list[dict[str, object]]:
        """The answers of the model to the agent."""
        lines: list[dict[str, object]] = []
        for number in range(1, NUM_STEPS + 1):
            after = self.task if number == 1 else self.result(number - 1)
            # The command does not have the text of its output, which the next line waits for.
            call = self.call(f"echo {self.name}-step-$(({number - 1}+1))", number)
            lines.append({"after": after, "answer": "" if self.must_call else f"Now step {number}.", "calls": [call]})
        end = {"name": "final_answer", "arguments": {"answer": self.end}}
        last: dict[str, object] = {"calls": [end]} if self.must_call else {"answer": self.end}
        return [*lines, {"after": self.result(NUM_STEPS), **last}]

    @property
    def end(self) -> str:
        """The last answer."""
        return f"All steps of {self.name} are done."

    def run(self, place: Place) -> str:
        """Run the task to its end; returns what the program printed. A program that ends with an error, or not in time,
        fails the test."""
        left_out = ("PYTHONPATH", "RAY_", "PYTEST_", "ANTHROPIC_", "OPENAI_", "VIRTUAL_ENV")
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        own |= {"HOME": str(place.home), "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{place.url}/v1", "CI": "1"}
        done = subprocess.run(
            self.command(place, self.task),
            cwd=place.work,
            env={**own, "NO_PROXY": "127.0.0.1", **self.environment(place)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr


def _bin(name: str) -> str:
    return str(NODE / "node_modules/.bin" / name)


def _shell(tool: str, key: str = "command", **others: object) -> Callable[[str, int], Call]:
    """A tool that runs a command."""
    return lambda command, number: {"name": tool, "arguments": {key: command, **others}}


def _own(tool: str) -> Callable[[str, int], Call]:
    """A tool of the program's own, which takes the number of the step."""
    return lambda command, number: {"name": tool, "arguments": {"number": number}}


def _script(name: str) -> Callable[[Place, str], list[str]]:
    return lambda place, task: [str(PYTHON / "bin/python"), str(SCRIPTS / name), place.url, MODEL, task]


def _claude(place: Place, task: str) -> list[str]:
    return [_bin("claude"), "-p", task, "--allowedTools", "Bash", "--model", MODEL]


def _codex(place: Place, task: str) -> list[str]:
    place.write(
        ".codex/config.toml",
        f'model = "{MODEL}"\nmodel_provider = "raydix"\nmodel_context_window = 131072\n'
        f'[model_providers.raydix]\nname = "raydix"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n',
    )
    return [_bin("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]


def _opencode(place: Place, task: str) -> list[str]:
    limits = {"context": 131_072, "output": 8192}
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
    model = {"id": MODEL, "contextWindow": 131_072, "maxTokens": 8192}
    provider = {"baseUrl": f"{place.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    place.write(".pi/agent/models.json", {"providers": {"raydix": provider}})
    return [_bin("pi"), "--provider", "raydix", "--model", MODEL, "-p", task]


def _llm(place: Place, task: str) -> list[str]:
    model = {"model_id": MODEL, "model_name": MODEL, "api_base": f"{place.url}/v1", "supports_tools": True}
    place.write("llm/extra-openai-models.yaml", [model])  # JSON is YAML, too
    tools = ["--functions", str(SCRIPTS / "llm_tools.py"), "--chain-limit", "20"]
    return [str(PYTHON / "bin/llm"), "--model", MODEL, "--system", "You make steps.", *tools, task]


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
    Agent("openai-agents", "openai-agents", _script("openai_agents.py"), _own("step"), is_python=True),
    Agent("autogen", "autogen-agentchat", _script("autogen.py"), _own("step"), is_python=True),
    Agent("smolagents", "smolagents", _script("smolagents_tools.py"), _own("step"), is_python=True, must_call=True),
    Agent("deepagents", "deepagents", _script("deep_agent.py"), _own("step"), is_python=True),
    Agent("haystack", "haystack-ai", _script("haystack_agent.py"), _own("step"), is_python=True),
    Agent(
        "semantic-kernel",
        "semantic-kernel",
        _script("semantic_kernel_agent.py"),
        _own("Steps-step"),
        is_python=True,
    ),
    Agent("inspect", "inspect-ai", _script("inspect_task.py"), _own("step"), is_python=True),
    Agent(
        "llm",
        "llm",
        _llm,
        _own("step"),
        lambda place: {"LLM_USER_PATH": str(place.home / "llm")},
        is_python=True,
    ),
)
"""`make test-agents` installs these."""

assert ROOT in SCRIPTS.parents
