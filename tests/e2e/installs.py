"""Clients that people use, in pinned versions, each installed once below `.cache/agents`.

python -m tests.e2e.installs        installs all that are missing (1.6 GB, a few minutes)
"""

import dataclasses
import functools
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HOME = Path(__file__).parents[2] / ".cache" / "agents"
INSTALL_TIMEOUT_S = 400
# a registry that is away is asked twice, not for minutes
NPM_FLAGS = (
    "--no-audit",
    "--no-fund",
    "--no-update-notifier",
    "--fetch-retries=1",
    "--fetch-retry-mintimeout=1000",
    "--fetch-retry-maxtimeout=2000",
)


class InstallError(Exception):
    """A client cannot be installed here; the text says why."""


class UnreachableError(InstallError):
    """Its registry does not answer."""


@dataclasses.dataclass(frozen=True)
class Client:
    """packages  pinned; the first one is the client, the others what its users install beside it"""

    name: str
    packages: tuple[str, ...]

    @property
    def home(self) -> Path:
        return HOME / "-".join((self.name, *(package.rpartition(self.separator)[2] for package in self.packages)))

    @property
    def package(self) -> str:
        """The client's own, without its version."""
        return self.packages[0].rpartition(self.separator)[0]

    @property
    def ready(self) -> Path:
        return self.home / ".ready"

    def install(self) -> Path:
        """Its directory. raises InstallError"""
        if not self.ready.exists():
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir(parents=True)
            done = self.fetch()
            if done.returncode:
                self.ask_registry()
                raise InstallError(f"{self.name}: {(done.stdout + done.stderr)[-2000:]}")
            self.ready.touch()
        return self.home

    def ask_registry(self) -> None:
        """raises UnreachableError"""
        asked = self.look_up()
        if asked.returncode:
            raise UnreachableError(f"no registry answers for {self.package}: {asked.stderr[-300:]}")


@dataclasses.dataclass(frozen=True)
class NodeClient(Client):
    separator = "@"

    def fetch(self) -> subprocess.CompletedProcess:
        return _run("npm", "install", *NPM_FLAGS, "--prefix", str(self.home), *self.packages)

    def look_up(self) -> subprocess.CompletedProcess:
        return _run("npm", "view", *NPM_FLAGS, self.package, "version")

    def program(self, name: str) -> str:
        return str(self.install() / "node_modules" / ".bin" / name)


@dataclasses.dataclass(frozen=True)
class PythonClient(Client):
    separator = "=="

    def fetch(self) -> subprocess.CompletedProcess:
        venv.create(self.home, with_pip=True)
        return _run(self.pip, "install", "-q", "--disable-pip-version-check", *self.packages)

    def look_up(self) -> subprocess.CompletedProcess:
        return _run(self.pip, "index", "versions", self.package)

    @property
    def pip(self) -> str:
        return str(self.home / "bin" / "pip")

    def program(self, name: str) -> str:
        return str(self.install() / "bin" / name)


# the newest versions that Node 20 runs
OPENAI_NODE = NodeClient("openai-node", ("openai@6.30.1", "zod@4.6.7"))
QWEN_CODE = NodeClient("qwen-code", ("@qwen-code/qwen-code@0.15.10",))
OPENCODE = NodeClient("opencode", ("opencode-ai@1.18.33",))
CODEX = NodeClient("codex", ("@openai/codex@0.171.0",))
MINI_SWE_AGENT = PythonClient("mini-swe-agent", ("mini-swe-agent==2.4.6",))
ALL = (OPENAI_NODE, QWEN_CODE, OPENCODE, CODEX, MINI_SWE_AGENT)


@functools.cache
def problem(client: Client) -> InstallError | None:
    """None when the client is there; asked once, since a registry that is away takes long to say nothing."""
    try:
        client.install()
    except InstallError as error:
        return error
    return None


def _run(*command: str) -> subprocess.CompletedProcess:
    if shutil.which(command[0]) is None:
        raise InstallError(f"{command[0]} is not here: apt install nodejs npm (Node 20 or newer)")
    return subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)


def main() -> int:
    problems = [error for client in ALL if (error := problem(client)) is not None]
    for error in problems:
        print(error, file=sys.stderr)
    # tests that need a registry which is away say so themselves
    return any(not isinstance(error, UnreachableError) for error in problems)


if __name__ == "__main__":
    sys.exit(main())
