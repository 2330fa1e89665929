"""The release, tried as a stranger has it: sdist and wheel are built, installed in clean environments, and used there.

    python -m tests.release.check [ENVIRONMENT ...]

(``make release-check``). An ENVIRONMENT is ``PYTHON:EXTRAS[:lowest]``, such as ``3.11:app,executor`` or
``3.11:app:lowest``, which installs the lowest versions that pyproject.toml allows. Commands run in an empty folder. The
action and the hook run on a sample repository. One line per check; the last one counts them, and the exit code is 1 if
one failed. Without ENVIRONMENT, those below whose Python is found; the others are named.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement

from tests.release.steps import ROOT, run_action, sample_repository
from tests.support.pages import BEGINNINGS, shown_part, snippets

TOOLS = ("build>=1.2", "cffconvert>=2.0", "pre-commit>=4.0", "twine>=6.0")
"""In an environment of their own: cffconvert needs an older jsonschema than the tests."""
ENVIRONMENTS = ("3.11:app,executor,transformers", "3.11:app:lowest", "3.12:app", "3.13:app", "3.14:app")
_TWO_RANKS = """
name: two-ranks
model: {family: gpt, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 256, seq_len: 32}
cluster: {preset: this-machine, num_devices: 2}
training: {global_batch_size: 8, precision: fp32}
plan: {pp: 2, schedule: gpipe}
"""
_CAPTURED = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

def batch(number):
    return (torch.zeros(number, 8),)
"""
_CONFIG = """{"model_type": "phi", "architectures": ["PhiForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
 "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128}"""
_START_S = 120.0
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel, and an empty folder to run commands in."""

    text: str
    folder: Path

    @property
    def python(self) -> str:
        return f"python{self.text.split(':')[0]}"

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(name for name in self.text.split(":")[1].split(",") if name)

    @property
    def lowest(self) -> bool:
        return self.text.endswith(":lowest")

    @property
    def bin(self) -> Path:
        return self.folder / "venv" / "bin"

    @property
    def variables(self) -> dict[str, str]:
        """Nothing of the repository, and caches of its own."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return kept | {"PATH": path, "XDG_CACHE_HOME": str(self.folder / "cache"), "PYTHONWARNINGS": "default"}

    def run(self, line: str, *, limit_s: float = 600.0, folder: str = "empty") -> str:
        """Output of a line of shell.

        Raises:
            AssertionError: It failed, warned, or reported a bug.
        """
        where = self.folder / folder
        where.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "-ec", line],
            cwd=where,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{line}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        ours = [said for said in done.stderr.splitlines() if "Warning" in said and "/simplan/" in said]
        assert not ours, ours
        return done.stdout


@dataclass
class Checks:
    """Checks that passed and failed so far."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], object]) -> bool:
        """Runs one check and prints a line about it, and the reason below it if it failed."""
        begin = time.monotonic()
        try:
            check()
        except (AssertionError, OSError, subprocess.SubprocessError, KeyError) as error:
            self.failed.append(name)
            print(f"FAILED  {name}\n{error}", flush=True)
            return False
        self.passed += 1
        print(f"passed  {name}  ({time.monotonic() - begin:.0f} s)", flush=True)
        return True


def tools(folder: Path) -> Path:
    """Folder of the commands that build and inspect a release."""
    _call(sys.executable, "-m", "venv", str(folder))
    _call(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *TOOLS)
    return folder / "bin"


def build(folder: Path, tools: Path) -> Path:
    """The wheel, built from the sdist; its metadata and those of the citation are valid.

    Raises:
        AssertionError: A tool failed, or a tracked file of a package is not in the wheel, or another folder is.
    """
    _call(f"{tools}/pyproject-build", "--outdir", str(folder), str(ROOT))
    _call(f"{tools}/twine", "check", "--strict", *map(str, folder.iterdir()))
    _call(f"{tools}/cffconvert", "--validate", cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    packages = ("simplan", "executor", "app")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = _call("git", "ls-files", *packages, cwd=ROOT).splitlines()
    assert held == set(tracked), f"wheel and repository differ: {sorted(held ^ set(tracked))}"
    return wheel


def install(environment: Environment, wheel: Path) -> None:
    """Makes the virtual environment, with the newest or the lowest versions that pip finds."""
    environment.folder.mkdir()
    _call(environment.python, "-m", "venv", str(environment.folder / "venv"))
    limits: list[str] = []
    if environment.lowest:
        file = environment.folder / "lowest.txt"
        file.write_text("".join(f"{line}\n" for line in lowest(environment.extras)))
        limits = ["-c", str(file)]
    wanted = f"{wheel}[{','.join(environment.extras)}]"
    _call(str(environment.bin / "python"), "-m", "pip", "install", "--quiet", *limits, wanted, cwd=environment.folder)
    _call(str(environment.bin / "python"), "-m", "pip", "check", cwd=environment.folder)


def lowest(extras: tuple[str, ...]) -> Iterator[str]:
    """Lower bounds of pyproject.toml as constraints of pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in [*project["dependencies"], *(required for extra in extras for required in optional[extra])]:
        requirement = Requirement(text)
        [version] = [specifier.version for specifier in requirement.specifier if specifier.operator == ">="]
        yield f"{requirement.name}=={version}"


def readme(environment: Environment) -> None:
    """Commands and Python of the README, whose outputs are those that it shows."""
    folder, printed, compared = environment.folder / "readme", "", 0
    folder.mkdir()
    for snippet in snippets("../README.md"):
        if snippet.note.startswith("file: "):
            (folder / snippet.note.removeprefix("file: ")).write_text(snippet.text)
        elif snippet.language == "sh":
            for line in snippet.text.splitlines():
                if line.startswith("simplan "):
                    printed = environment.run(line, folder="readme")
        elif snippet.language == "python":
            (folder / "snippet.py").write_text(snippet.text)
            assert "step_time_s" in environment.run("python snippet.py", folder="readme")
        elif snippet.note in BEGINNINGS:
            shown = shown_part(snippet, printed)
            assert snippet.text == shown, f"the README shows\n{snippet.text}\nand this was printed\n{shown}"
            compared += 1
    assert compared >= 4, f"{compared} outputs were compared"


def dashboard(environment: Environment) -> None:
    """The dashboard starts, answers, and ends with the command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(environment.bin / "simplan"), "dashboard", "--no-browser", "--port", str(port)]
    with subprocess.Popen(
        command, cwd=environment.folder, env=environment.variables, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert _answer(server, f"http://127.0.0.1:{port}/_stcore/health") == "ok"
            assert "<title>" in _answer(server, f"http://127.0.0.1:{port}/")
        finally:
            server.terminate()
        assert server.wait(60) == 143, server.returncode


def _answer(server: subprocess.Popen[bytes], address: str) -> str:
    end = time.monotonic() + _START_S
    while True:
        assert server.poll() is None, f"the dashboard ended with exit code {server.returncode}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            assert time.monotonic() < end, f"{address} did not answer in {_START_S:.0f} s"
            time.sleep(0.5)


def two_ranks(environment: Environment) -> None:
    """Two processes calibrate, train and are compared with their prediction."""
    environment.run(f"cat > two.yaml <<'END'\n{_TWO_RANKS}\nEND")
    environment.run("simplan calibrate two.yaml --budget 20 --calibration calibration.json")
    environment.run("simplan run two.yaml --calibration calibration.json --steps 5 -o out")
    assert (environment.folder / "empty" / "out" / "measurement.json").is_file()


def captures(environment: Environment) -> None:
    """A torch module, and a model of transformers if that is installed, are captured and predicted."""
    environment.run(f"cat > own.py <<'END'\n{_CAPTURED}\nEND")
    environment.run("simplan capture own:build --inputs own:batch -o own.json")
    environment.run("simplan predict own.json --gpus 2 --global-batch-size 8")
    if "transformers" in environment.extras:
        environment.run(f"cat > config.json <<'END'\n{_CONFIG}\nEND")
        environment.run("simplan capture config.json --seq-len 64 -o hf.json")
        environment.run("simplan predict hf.json --gpus 2 --global-batch-size 8")


def try_environment(checks: Checks, environment: Environment, wheel: Path) -> None:
    """All checks of one environment."""
    name = environment.text
    if not checks.run(f"{name}: installs", lambda: install(environment, wheel)):
        return
    commands = ("simplan --version", "simplan show schema", "simplan show devices", "simplan init llama3-8b")
    checks.run(f"{name}: small commands", lambda: [environment.run(line) for line in commands])
    if "app" in environment.extras:  # the README has a table of pandas
        checks.run(f"{name}: README", lambda: readme(environment))
        checks.run(f"{name}: dashboard", lambda: dashboard(environment))
    if "executor" in environment.extras:
        checks.run(f"{name}: run on two ranks", lambda: two_ranks(environment))
        checks.run(f"{name}: captures", lambda: captures(environment))


def action(folder: Path) -> None:
    """The action installs simplan and checks scenarios of a repository, with the exit codes of the documentation."""
    sample_repository(folder / "repository")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for paths, code in (("plans", 0), ("slow", 1), ("plans\nwrong", 2)):
        done = run_action(folder / "repository", folder, environment, paths=paths)
        assert done.exit_code == code, f"{paths}: exit code {done.exit_code} and not {code}\n{done.log}"
        assert done.summary, "no job summary"


def hook(folder: Path, tools: Path) -> None:
    """pre-commit installs the hook from the repository, takes a commit with good scenarios and refuses another one."""
    repository = folder / "hooked"
    sample_repository(repository)
    _call("git", "init", "--quiet", cwd=repository)
    _call("git", "add", "--all", cwd=repository)
    begin = (f"{tools}/pre-commit", "try-repo", str(ROOT), "simplan-check", "--files")
    cache = {"PRE_COMMIT_HOME": str(folder / "pre-commit")}
    good = _call(*begin, "plans/good.yaml", "plans/with space/small.yaml", cwd=repository, variables=cache)
    assert "Passed" in good, good
    assert "no files to check" in _call(*begin, ".github/workflows/test.yml", cwd=repository, variables=cache)
    (repository / "plans" / "good.yaml").write_text((repository / "slow" / "late.yaml").read_text())
    assert "deadline of the project" in _call(*begin, "plans/good.yaml", cwd=repository, code=1, variables=cache)


def _call(
    *command: str, cwd: Path | None = None, code: int = 0, variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Output of a command that ends with an exit code; it does not see the repository's packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == code, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def _is_there(python: str) -> bool:
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-m", "venv", "--help"], capture_output=True).returncode == 0


def main(asked: list[str]) -> int:
    """Runs all checks; returns 1 if one failed."""
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        wheels: list[Path] = []
        commands = tools(folder / "tools")
        if checks.run("sdist and wheel", lambda: wheels.append(build(folder / "dist", commands))):
            for number, text in enumerate(asked or ENVIRONMENTS):
                environment = Environment(text, folder / f"environment-{number}")
                if not asked and not _is_there(environment.python):
                    print(f"not tried  {text}: no {environment.python} here", flush=True)
                    continue
                try_environment(checks, environment, wheels[0])
                shutil.rmtree(environment.folder, ignore_errors=True)
        checks.run("action", lambda: action(folder))
        checks.run("pre-commit hook", lambda: hook(folder, commands))
    print(f"{checks.passed} passed, {len(checks.failed)} failed")
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
