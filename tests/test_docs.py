"""The README and the documentation: snippets run, figures compared with the program, pages named by messages exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
import yaml

from simplan.cli.app import app
from simplan.documentation import DOCUMENTATION_URL
from simplan.plan.compression import CompressionKind
from simplan.plan.replication import OuterDtype, ReplicationKind
from simplan.predict import predict
from simplan.program.schedules import StageTimes
from simplan.program.tables.check import check_table
from simplan.program.tables.plan_table import plan_table
from simplan.report.text import prediction_text
from simplan.scenario import load_scenario
from tests.program.tables.tables import bubble_rate
from tests.support.pages import (
    APART,
    BEGINNINGS,
    BOOK,
    DOCS,
    README,
    ROOT,
    hand_written,
    has_code,
    run_page,
    shown_part,
    snippets,
)
from tests.support.sources import docstrings, nodes, python_files

SLOW = (
    "../README.md",
    *(f"book/{chapter}.md" for chapter in BOOK if chapter not in ("index", "memory", "pipelines")),
    "explanation/figures.md", "how-to/calibrate.md", "how-to/choose-a-way.md", "how-to/ci.md",
    "how-to/frameworks/bridge.md", "how-to/frameworks/index.md", "how-to/frameworks/megatron.md",
    "how-to/frameworks/torchtitan.md", "how-to/network.md", "how-to/one-line.md", "how-to/placement.md",
    "how-to/read-a-prediction.md", "how-to/record-your-loop.md", "how-to/rehearse.md", "how-to/search.md",
    "how-to/troubleshooting.md", "how-to/whole-run.md", "how-to/your-own-model.md", "reference/agents.md",
    "tutorials/first-search.md", "tutorials/run-and-compare.md",
)  # fmt: skip
"""Pages whose commands take longest: they calibrate, run, or search whole spaces."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def pages_with_code() -> list[Any]:
    pages = [page for page in hand_written() if page not in APART and any(map(has_code, snippets(page)))]
    return [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in pages]


def test_every_block_of_code_has_a_language() -> None:
    """Then none escapes the tests below."""
    languages = {(page, snippet.language) for page in hand_written() for snippet in snippets(page)}
    assert {language for _, language in languages} <= {"sh", "python", "yaml", "text", "toml"}, languages


@pytest.mark.parametrize("page", pages_with_code())
@pytest.mark.timeout(600)
def test_snippets_of_a_page_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader would: files are written, then commands and Python run, and outputs equal those that are shown."""
    for snippet, printed in run_page(page, tmp_path, monkeypatch):
        assert snippet.text.splitlines() == shown_part(snippet, printed).splitlines()
        if snippet.note in BEGINNINGS:
            assert snippet.text.count("\n") > 3


@pytest.mark.parametrize("page", hand_written())
def test_commands_and_options_that_are_written_exist(page: str) -> None:
    """Those that are only mentioned, too."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = (DOCS / page).read_text().replace("\\\n", " ")
    written = [" ".join(command.split()) for command in re.findall(r"`(simplan [a-z][^`]*)`", text)]
    written += [line for snippet in snippets(page) if snippet.language == "sh" for line in snippet.text.splitlines()]
    for line in written:
        for name, rest in re.findall(r"\bsimplan ([a-z]+)([^|;&]*)", line):
            assert name in commands, line
            known = {option for param in commands[name].params for option in (*param.opts, *param.secondary_opts)}
            options = {option.partition("=")[0] for option in re.findall(r"(?<=\s)--?[a-z][\w=-]*", rest)}
            assert options <= known | {"--help", "-h"}, line


@pytest.mark.parametrize("kinds", [ReplicationKind, CompressionKind, OuterDtype])
def test_support_matrix_has_a_row_for_every_way_to_train(kinds: Any) -> None:
    """A row says of four things how far they go; what is not run matches and records nothing."""
    rows = [row for row in rows_of("reference/support.md") if len(row) == 5]
    for kind in set(get_args(kinds)) - {"fp32"}:  # no other way than whole pseudo-gradients
        of_kind = [row for row in rows if f"`{kind}`" in row[0]]
        assert of_kind, kind
        for name, predicted, executed, *proofs in of_kind:
            assert predicted.startswith("yes"), name
            assert all(proofs) or executed == "not supported", name


def test_targets_of_make_that_are_written_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in hand_written():
        text = (DOCS / page).read_text()
        written = {*re.findall(r"`make ([a-z-]+)`", text), *re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)}
        assert written <= targets, page


def test_python_files_that_are_written_exist() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [f"/{file}" for file in tracked.splitlines()]
    for page in [*hand_written(), "../CONTRIBUTING.md"]:
        for written in re.findall(r"`([\w./-]+\.py)`", (DOCS / page).read_text()):
            assert any(file.endswith(f"/{written}") for file in files), f"{page}: {written}"


def test_names_that_python_blocks_import_exist() -> None:
    """Most pages with Python run in `make test-all` alone; a renamed class is found here."""
    blocks = [snippet.text for page in hand_written() for snippet in snippets(page) if snippet.language == "python"]
    imports = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    named = {(node.module, alias.name) for node in imports for alias in node.names}
    ours = sorted((module, name) for module, name in named if module and module.partition(".")[0] == "simplan")
    assert len(ours) > 10
    assert [pair for pair in ours if not hasattr(importlib.import_module(pair[0]), pair[1])] == []


def test_names_that_programs_in_strings_import_exist() -> None:
    """Programs that other processes are started with; most start in slow tests and benchmarks alone."""
    folders = ("simplan", "executor", "app", "benchmarks", "tests")
    trees = (ast.parse(file.read_text()) for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    texts = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    imported = {pair for text in texts if isinstance(text, str) for pair in IMPORTED.findall(text)}
    named = {(module, name) for module, names in imported for name in names.split(", ")}
    named.remove(("simplan.search", "best"))  # of a test that looks for forbidden imports
    assert len(named) > 15
    missing = [(module, name) for module, name in sorted(named) if not hasattr(importlib.import_module(module), name)]
    assert [pair for pair in missing if importlib.util.find_spec(".".join(pair)) is None] == []


def test_the_devices_of_the_docs_are_predicted(tmp_path: Path) -> None:
    texts = blocks((DOCS / "how-to" / "devices.md").read_text(), "yaml")
    assert len(texts) == 2
    for number, text in enumerate(texts):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        scenario = load_scenario(file)
        prediction = predict(scenario.job, name=scenario.name)
        assert prediction.fits, "an example of a plan that works"
        assert prediction.mfu is not None
        assert 0.1 < prediction.mfu < 0.7
        assert ("cluster      8 x rtx-5090, 1 node" in prediction_text(prediction)) == (number == 0)


def test_the_schedule_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed as its pyproject.toml says: without communication cost as fast as 1F1B; 2(p-1)+1 microbatches held."""
    text = (DOCS / "how-to" / "custom-schedule.md").read_text()
    [code], [entry_points], [scenario] = (blocks(text, language) for language in ("python", "toml", "yaml"))
    module = re.search(r"# (\w+\.py)", code)
    assert module is not None
    (tmp_path / module.group(1)).write_text(code)
    info = tmp_path / "eager-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eager\nVersion: 1.0\n")
    ((name, target),) = tomllib.loads(entry_points)["project"]["entry-points"]["simplan.schedules"].items()
    (info / "entry_points.txt").write_text(f"[simplan.schedules]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "eager.yaml"
    file.write_text(scenario)
    assert yaml.safe_load(scenario)["plan"]["schedule"] == name
    plan = load_scenario(file).job.plan
    for p, m in ((2, 4), (3, 7), (4, 3)):
        table = plan_table(plan.model_copy(update={"pp": p}), m)
        check_table(table, p, m)
        compute = tuple(tuple(action for action in row if action.kind.is_compute) for row in table)
        one_f_one_b = plan_table(plan.model_copy(update={"pp": p, "schedule": "1f1b"}), m)
        wanted = tuple(tuple(action for action in row if action.kind.is_compute) for row in one_f_one_b)
        times = StageTimes.equal(p)
        assert bubble_rate(compute, times) == pytest.approx(bubble_rate(wanted, times))
        first = [str(action) for action in compute[0]]
        assert first.index("0B0") == min(2 * (p - 1) + 1, m)


def test_the_readme_is_short() -> None:
    """At most 170 lines, 1,300 words and 15 words a sentence; output before line 30, a picture before line 45."""
    text = README.read_text()
    lines = text.splitlines()
    assert len(lines) <= 175
    assert len(text.split()) <= 1300
    assert lines.index("<!-- search-output -->") < 30
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("![")) < 45
    prose = re.sub(r"```.*?```|<!--.*?-->|^[|#].*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    sentences = [
        sentence.split() for sentence in re.split(r"(?<=[.!?:])\s+|\n\n|\n- ", re.sub(r"\]\([^)]*\)", "]", prose))
    ]
    sentences = [words for words in sentences if len(words) > 1]
    assert sum(map(len, sentences)) / len(sentences) <= 15
    assert max(map(len, sentences)) <= 25


@pytest.mark.parametrize("page", ["../README.md", "tutorials/run-and-compare.md"])
def test_rows_of_the_demo_agree_with_themselves(page: str) -> None:
    """A machine of its own measured them, so that they cannot be printed again."""
    text = (DOCS / page).read_text()
    rows = re.findall(r"^  demo-\w+ .*$", text, re.MULTILINE)
    assert len(rows) == 5

    def ms(number: str, unit: str) -> float:
        return float(number) * (1000 if unit == "s" else 1)

    for row in rows:
        times = [ms(*match) for match in re.findall(r"([\d.]+) (ms|s)\b", row)]
        predicted, low, high, measured = times
        assert ("yes" in row.split()) == (low <= measured <= high)
        error = float(re.findall(r"([+-][\d.]+) %  ", row)[0])
        assert 100 * (predicted / measured - 1) == pytest.approx(error, abs=0.1)


def rows_of(page: str) -> list[list[str]]:
    """Cells of all rows of tables."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def tables(page: str) -> list[list[str]]:
    """Cells of rows whose third and further cells are numbers."""
    return [row for row in rows_of(page) if len(row) == 7 and row[1].isdigit()]


IMPORTED = re.compile(r"\bfrom ((?:simplan|executor|app|benchmarks)[\w.]*) import (\w+(?:, \w+)*)(?=[;\n]|$)")
"""Import of our names in a program that is a string: module and names."""
FITTED = ("published/[!s]*.yaml", "published/simumax*.yaml")
HELD_OUT = ("heldout/[!fst]*.yaml", "heldout/fms*.yaml")
FINE_TUNING = ("heldout/finetuning_*.yaml",)
SMALL = ("heldout/small_models_*.yaml",)
THREADS = ("heldout/threads_*.yaml",)
"""Files of runs below ``scenarios``; small models, fine-tuning and threads have rows of their own."""


@cache
def accuracy(*patterns: str) -> dict[str, Any]:
    files = [str(file) for pattern in patterns for file in sorted((ROOT / "scenarios").glob(pattern))]
    command = [sys.executable, "-m", "simplan", "accuracy", *files, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def shown(figures: dict[str, Any]) -> list[str]:
    """Figures as the tables have them."""
    times, floor = figures["step_time"], figures["constant_mfu"]
    cells = [str(times["num"]), *(f"{100 * times[name]:.1f}" for name in ("mape", "median_ape"))]
    cells.append(f"{100 * times['interval_coverage']:.0f}")
    return cells + [f"{100 * floor[name]:.1f}" for name in ("mape", "median_ape")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["../README.md", "explanation/accuracy.md"])
def test_accuracy_is_what_the_commands_print(page: str) -> None:
    published, held_out = accuracy(*FITTED), accuracy(*HELD_OUT)
    commands = {
        "fit set, in-sample": published["overall"],
        "held out, frameworks in the catalog": held_out["by_framework"]["frameworks in the catalog"],
        "held out, other frameworks": held_out["by_framework"]["other frameworks"],
        "held out, all": held_out["overall"],
        "small models, held out": accuracy(*SMALL)["overall"],
        "fine-tuning, held out": accuracy(*FINE_TUNING)["overall"],
        "public threads, held out": accuracy(*THREADS)["overall"],
    }
    rows = {row[0]: row[1:] for row in tables(page)}
    if "validation: experts under Megatron Bridge" in rows:
        commands["validation: experts under Megatron Bridge"] = accuracy("validation")["overall"]
    compared = {name: shown(figures) for name, figures in commands.items() if name in rows}
    assert len(compared) == len(rows) - (1 if page == "../README.md" else 2)
    assert {name: rows[name] for name in compared} == compared


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prose_of_the_accuracy_page_is_what_the_commands_print() -> None:
    text = " ".join((DOCS / "explanation" / "accuracy.md").read_text().split())
    published, held_out = accuracy(*FITTED), accuracy(*HELD_OUT)

    def percent(fraction: float) -> str:
        return f"{100 * fraction:.1f} %"

    chosen, other = published["overall"]["choosing"], held_out["overall"]["choosing"]
    by_name = {Path(file).stem: figures for file, figures in held_out["by_file"].items()}
    errors = {run["id"]: run["step_time_error"] for run in published["runs"]}
    held_errors = {run["id"]: run["step_time_error"] for run in held_out["runs"]}
    oom, held_oom = published["overall"]["oom"], held_out["overall"]["oom"]
    verdicts = ("fit", "oom", "false_alarms", "missed")
    assert (chosen["median_regret"], oom["missed"], held_oom["missed"]) == (0, 1, 0)
    assert by_name["nanotron_h100"]["step_time"]["bias"] < 0 > by_name["nemo_h100_experts"]["step_time"]["bias"]
    for sentence in (
        f"On {chosen['num_groups']} groups of the fit set, the plan predicted to be best is the best one in the "
        f"median. It is {percent(chosen['mean_regret'])} slower on average. "
        f"Kendall's tau is {chosen['kendall_tau']:.2f}.",
        f"On {other['num_groups']} held-out groups the choice is {percent(other['median_regret'])} slower in the "
        f"median and {percent(other['mean_regret'])} on average, with a tau of {other['kendall_tau']:.2f}.",
        f"{published['overall']['peak_memory']['num']} in-sample peaks have a mean error of "
        f"{percent(published['overall']['peak_memory']['mape'])}.",
        f"The 90% interval contains {100 * published['overall']['peak_memory']['interval_coverage']:.0f} % of them",
        f"are right on {oom['fit'] + oom['oom']} of {sum(oom[name] for name in verdicts)} runs",
        f"are right on {held_oom['fit'] + held_oom['oom']} of {held_out['overall']['num_runs']}, without a missed one; "
        f"{by_name['nanotron_h100']['peak_memory']['num']} peaks of nanotron have a mean error of "
        f"{percent(by_name['nanotron_h100']['peak_memory']['mape'])}.",
        f"**nanotron** is {percent(by_name['nanotron_h100']['step_time']['mape'])} too fast.",
        f"over 1,024 ranks (InternLM): {-100 * held_errors['internlm-08']:.1f} % too fast.",
        f"(`nemo_h100_experts`): {percent(by_name['nemo_h100_experts']['step_time']['mape'])} too fast on average.",
        f"(`nemo_h100_finetuning`): {percent(by_name['nemo_h100_finetuning']['step_time']['mape'])}, and "
        f"{100 * by_name['nemo_h100_finetuning']['step_time']['interval_coverage']:.0f} % in the interval.",
        f"are {-100 * errors['mosaic-080']:.1f} and {-100 * errors['mosaic-021']:.1f} % too fast.",
    ):
        assert sentence in text
    times = held_out["overall"]["step_time"]
    head = f"mean absolute error of step times {percent(times['mape'])}, median {percent(times['median_ape'])}"
    assert head in (DOCS / "explanation" / "accuracy.svg").read_text(), "the picture is of today"


@pytest.mark.parametrize("page", ["../README.md", "explanation/accuracy.md"])
def test_errors_of_the_fit_are_what_it_printed(page: str) -> None:
    """``make fit`` takes ten minutes: its last output is kept."""
    [printed] = blocks((DOCS / "notebooks" / "2026-11-25-fit.md").read_text(), "text")
    row = re.findall(r"[\d.]+", re.findall(r"^all .*$", printed, re.MULTILINE)[0])
    number, means, medians = row[0], row[1::3], row[2::3]  # textbook, fitted, five-fold, single runs, source left out
    inside = re.findall(r"(?:five-fold|source left out) (\d+) %", printed)
    rows = {cells[0]: cells[1:5] for cells in tables(page)}
    assert rows["fit set, grouped five-fold"] == [number, means[2], medians[2], inside[0]]
    if page != "../README.md":
        assert rows["fit set, leave one source out"] == [number, means[4], medians[4], inside[1]]


def navigation() -> set[str]:
    """Pages of the site, as messages name them."""

    class Loader(yaml.SafeLoader):
        """Reads the tags of mkdocs as plain values."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)

    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for item in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(item)

    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert config["site_url"].rstrip("/") == DOCUMENTATION_URL
    return {page.removesuffix(".md") for page in leaves(config["nav"])}


def test_pages_that_messages_name_exist() -> None:
    """And no message names a file that an installed package does not have."""
    named = []
    for path in python_files("simplan", "app", "executor"):
        source = path.read_text()
        documented = {id(docstring) for _, docstring in docstrings(source)}
        for node in nodes(source):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "documentation":
                named += [ast.literal_eval(argument) for argument in node.args]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                assert not re.search(r"\bdocs/[\w-]+\.md|README\.md", node.value) or " at " in node.value, path
    assert len(named) >= 4
    assert set(named) <= navigation()


def test_the_address_of_the_documentation_is_that_of_the_metadata() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["urls"]["Documentation"] == DOCUMENTATION_URL


def test_versions_agree() -> None:
    import simplan

    version = simplan.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"**Status:** {version}, unreleased." in README.read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version  # type: ignore[index]
