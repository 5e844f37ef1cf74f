"""Coding agents run without a terminal, in a home of their own, against an address of this machine."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.e2e.installs import CODEX, MINI_SWE_AGENT, OPENCODE, QWEN_CODE, Client
from tests.e2e.recorded import MODEL

SCRIPTS = Path(__file__).parent / "agents"
ANSWER = (SCRIPTS / "bird.py.txt").read_text()
RUN_S = 55
# what agents bear that can be told; they take five minutes by themselves
SILENCE_S = 3
KEY = "any-key"


@dataclasses.dataclass(frozen=True)
class Agent:
    """How an agent is started.

    path      the API that it uses
    command   of its project's directory, the address, and the task
    settings  files that it needs, by their path below its home
    """

    name: str
    client: Client
    script: str
    path: str
    command: Callable[[Path, str, str], list[str]]
    settings: Callable[[str], dict[str, object]] = lambda url: {}
    environment: tuple[tuple[str, str], ...] = ()

    def project(self, work: Path) -> Path:
        return work / self.name

    def prepare(self, work: Path) -> list[dict]:
        """Makes its project; returns its lines of the script."""
        project = self.project(work)
        project.mkdir()
        (project / "notes.txt").write_text(f"{self.name}: a heron, for bird.py\n")
        # in a JSON string, so the answer is spelled as one
        answer = json.dumps(ANSWER, ensure_ascii=False)[1:-1]
        text = (SCRIPTS / self.script).read_text()
        for name, value in {"@NAME@": self.name, "@HOME@": str(project), "@ANSWER@": answer}.items():
            text = text.replace(name, value)
        lines = [json.loads(line) for line in text.splitlines()]
        reads, writes = (line["output"] for line in lines[:2])
        both = reads + "\n" + writes.partition("</think>\n\n")[2]
        return [{"when": f"Both of {self.name}:", "output": both}, *lines]

    def run(self, work: Path, url: str, task: str | None = None) -> subprocess.CompletedProcess:
        """Returns when it has ended; what it left running is ended too."""
        project, home = self.project(work), work / f"{self.name}-home"
        for file, value in self.settings(url).items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(value if isinstance(value, str) else json.dumps(value))
        home.mkdir(exist_ok=True)
        command = self.command(project, url, task or f"Task of {self.name}: read notes.txt, then write bird.py.")
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **dict(self.environment)}
        return _run(command, project, environment)


def _run(command: list[str], directory: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _qwen(project: Path, url: str, task: str) -> list[str]:
    flags = ("--auth-type", "openai", "--openai-base-url", f"{url}/v1", "--openai-api-key", KEY, "-m", MODEL)
    return [QWEN_CODE.program("qwen"), *flags, "--approval-mode", "yolo", "-o", "json", task]


def _opencode(project: Path, url: str, task: str) -> list[str]:
    return [OPENCODE.program("opencode"), "run", "-m", f"longlane/{MODEL}", "--format", "json", task]


def _opencode_settings(package: str, model: dict[str, object]) -> Callable[[str], dict[str, object]]:
    def settings(url: str) -> dict[str, object]:
        model_settings = {"name": MODEL, "limit": {"context": 262_144, "output": 32_768}, **model}
        options = {"baseURL": f"{url}/v1", "apiKey": KEY, "chunkTimeout": 1000 * SILENCE_S}
        provider = {"npm": package, "name": "Longlane", "options": options}
        return {
            ".config/opencode/opencode.json": {"provider": {"longlane": provider | {"models": {MODEL: model_settings}}}}
        }

    return settings


OPENCODE_ENVIRONMENT = (
    ("OPENCODE_DISABLE_MODELS_FETCH", "1"),
    ("OPENCODE_DISABLE_AUTOUPDATE", "1"),
    ("OPENCODE_DISABLE_LSP_DOWNLOAD", "1"),
)


def _mini(project: Path, url: str, task: str) -> list[str]:
    flags = ("-y", "--exit-immediately", "-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={url}/v1")
    trajectory = str(project / "trajectory.json")
    return [MINI_SWE_AGENT.program("mini"), "-m", f"openai/{MODEL}", "-t", task, *flags, "-o", trajectory]


MINI_ENVIRONMENT = (
    ("OPENAI_API_KEY", KEY),
    ("MSWEA_CONFIGURED", "true"),
    ("MSWEA_COST_TRACKING", "ignore_errors"),
    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
)


def _codex(project: Path, url: str, task: str) -> list[str]:
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--strict-config", "--json")
    return [CODEX.program("codex"), "exec", *flags, task]


def _codex_settings(url: str) -> dict[str, object]:
    return {
        ".codex/config.toml": f"""
model = "{MODEL}"
model_provider = "longlane"
model_context_window = 262144

[model_providers.longlane]
name = "Longlane"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LONGLANE_KEY"
stream_idle_timeout_ms = {1000 * SILENCE_S}
"""
    }


def patching_codex(work: Path) -> "Agent":
    """Codex that edits with a tool of free text, as it does for models whose entry in its catalogue says so."""
    shown = subprocess.run([CODEX.program("codex"), "debug", "models"], capture_output=True, check=True, timeout=RUN_S)
    models = json.loads(shown.stdout)["models"]
    model = next(one for one in models if one["apply_patch_tool_type"] == "freeform" and not one.get("tool_mode"))
    catalog = work / "catalog.json"
    catalog.write_text(json.dumps({"models": [model | {"slug": MODEL}]}))

    def settings(url: str) -> dict[str, object]:
        ((file, text),) = _codex_settings(url).items()
        return {file: f"model_catalog_json = {json.dumps(str(catalog))}\n{text}"}

    return dataclasses.replace(CODEX_EXEC, settings=settings)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
THINKING = {"options": {"thinking": {"type": "enabled", "budgetTokens": 4000}}}
MINI = Agent("mini-swe-agent", MINI_SWE_AGENT, "mini.jsonl", CHAT, _mini, environment=MINI_ENVIRONMENT)
QWEN = Agent(
    "qwen-code",
    QWEN_CODE,
    "qwen.jsonl",
    CHAT,
    _qwen,
    lambda url: {".qwen/settings.json": {"privacy": {"usageStatisticsEnabled": False}}},
)
OPENCODE_CHAT = Agent(
    "opencode-chat",
    OPENCODE,
    "opencode.jsonl",
    CHAT,
    _opencode,
    _opencode_settings("@ai-sdk/openai-compatible", {}),
    OPENCODE_ENVIRONMENT,
)
OPENCODE_MESSAGES = Agent(
    "opencode-messages",
    OPENCODE,
    "opencode.jsonl",
    MESSAGES,
    _opencode,
    _opencode_settings("@ai-sdk/anthropic", THINKING),
    OPENCODE_ENVIRONMENT,
)
CODEX_EXEC = Agent("codex", CODEX, "codex.jsonl", RESPONSES, _codex, _codex_settings, (("LONGLANE_KEY", KEY),))
AGENTS = (MINI, QWEN, OPENCODE_CHAT, OPENCODE_MESSAGES, CODEX_EXEC)
