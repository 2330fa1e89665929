"""Pages that the program writes when the site is built: nothing that ``simplan show`` or ``--help`` says is checked in.

mkdocs runs this file as a hook (``mkdocs.yml``). ``pages()`` returns the text of every such page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main

import simplan
from simplan import catalog
from simplan.cli.app import app
from simplan.cli.listing import listing
from simplan.cli.terminal.definitions import MINIMAL_SCENARIO

ROOT = Path(__file__).resolve().parents[1]
_GENERATED = "*This page is written by the program when the site is built"
_SECTIONS = {
    "model": "The model: a preset, a Hugging Face config, or its own sizes; further keys replace those of a preset.",
    "cluster": "Devices, nodes and the links that join them.",
    "topology": "Keys of `cluster.topology`, which says how nodes are joined.",
    "training": "Batch, precision, optimizer and task.",
    "plan": "One parallel plan. A scenario has `plan:` or `search:`.",
    "search-space": "The keys of `search:`. A key that is left out has its default range.",
    "run": "Sections of a whole run: one that is left out means that nothing of its kind happens.",
    "expect": "Keys of an entry of `expect:`, a list of [expectations](../how-to/ci.md), and the metrics.",
    "measured": "What a run of the scenario took, for [`simplan accuracy`](published-runs.md). With it, `software` may "
    "set any field of a profile.",
}
_FIRST_SCREEN = "<!-- first screen of the README -->"
_PLACES = {
    "docs/": "",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "benchmarks.md",
    "scenarios/published/README.md": "reference/published-runs.md",
}
"""Site pages of files of the repository."""


def pages() -> dict[str, str]:
    """Text of every generated page, by its path in the documentation folder."""
    return {
        "reference/cli.md": _command_line(),
        "reference/scenario.md": _scenario(),
        "reference/catalog.md": _catalog(),
        "reference/frameworks.md": _frameworks(),
        "reference/schedules.md": _schedules(),
        "reference/optimizers.md": _optimizers(),
        "reference/metrics.md": _metrics(),
        "reference/published-runs.md": _of_repository("scenarios/published/README.md"),
        "contributing.md": _of_repository("CONTRIBUTING.md"),
        "changelog.md": _of_repository("CHANGELOG.md"),
        "benchmarks.md": _of_repository("benchmarks/RESULTS.md"),
    }


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to the site; mkdocs calls it."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Inserts the README's first screen on the home page, and keeps notebooks out of the search; mkdocs calls it."""
    if page.file.src_uri.startswith("notebooks/2026"):
        page.meta["search"] = {"exclude": True}
    return markdown.replace(_FIRST_SCREEN, first_screen())


def first_screen() -> str:
    """The README from below its title to its installation, with links as on the home page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n")[2].partition("## Install")[0]
    return _relinked(text)


def _command_line() -> str:
    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        f"{_GENERATED} from the metadata of the commands (version {simplan.__version__}). "
        "`simplan COMMAND --help` prints the same.*",
        "Every command except `dashboard` and `report` takes `--json`. Results go to stdout and messages to stderr. "
        "[Exit codes](files.md#exit-codes) are the same for all commands.",
    ]
    commands: Mapping[str, Any] = root.commands  # type: ignore[attr-defined]
    overview = [
        [f"[`{name}`](#simplan-{name})", _cell(command.get_short_help_str(200))] for name, command in commands.items()
    ]
    parts.append(_table(["command", "does"], overview))
    for name, command in commands.items():
        parts += _command(name, command)
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(f"simplan {name}", [], resilient_parsing=True)
    yield f"## simplan {name}"
    arguments = [one.metavar or one.name.upper() for one in command.params if one.param_type_name == "argument"]
    yield f"```text\nsimplan {name} [OPTIONS] {' '.join(arguments)}".rstrip() + "\n```"
    yield "\n\n".join(_cell(" ".join(part.split())) for part in (command.help or "").split("\n\n"))
    if command.epilog:
        yield command.epilog
    rows = []
    for parameter in command.params:
        names, about = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            names = parameter.metavar or parameter.name.upper()
        rows.append([f"`{names.replace('|', chr(92) + '|')}`", _cell(about)])
    if rows:
        yield _table(["argument or option", "meaning"], rows)


def _scenario() -> str:
    parts = [
        "# Scenario file",
        f"{_GENERATED} by `simplan show model`, `show cluster`, `show topology`, `show training`, `show plan`, "
        "`show search-space`, `show run`, `show expect`, `show measured` and `show scenario`.*",
        "A scenario is a YAML file with these sections, a `name`, `software` (a name of [frameworks](frameworks.md) "
        "or a mapping of `preset` and options) and `expect` (a list of [expectations](../how-to/ci.md)). A key that is "
        "unknown, or a value that is not modeled, is an error that names the line.",
    ]
    parts += [_listed("scenario"), f"A complete minimal scenario:\n\n```\n{MINIMAL_SCENARIO}\n```"]
    for section, about in _SECTIONS.items():
        parts += [f"## {'search' if section == 'search-space' else section}", about, _listed(section)]
    return "\n\n".join(parts) + "\n"


def _catalog() -> str:
    parts = [
        "# Devices, links, clusters, topologies, models, reliability",
        f"{_GENERATED} by `simplan show devices`, `links`, `clusters`, `topologies`, `models` and `reliability`.*",
    ]
    parts.append("`simplan show devices NAME`, for instance, prints one entry with the source of every value.")
    for kind in ("devices", "links", "clusters", "topologies", "models", "reliability"):
        parts += [f"## {kind.capitalize()}", _listed(kind)]
    return "\n\n".join(parts) + "\n"


def _frameworks() -> str:
    parts = [
        "# Frameworks",
        f"{_GENERATED} by `simplan show software`.*",
        "`software:` of a scenario names one of these profiles. `simplan show software NAME` prints every value "
        "with its source. `simplan run` executes `torch` and `transformers` only.",
        _listed("software"),
    ]
    for name in catalog.names("software"):
        profile = catalog.software(name)
        lines = [f"## {name}", f"Options of `software:`: {', '.join(f'`{one}`' for one in profile.options) or 'none'}."]
        if profile.not_modelled:
            lines += ["Not modeled:", "\n".join(f"- {_cell(what)}" for what in profile.not_modelled)]
        parts += lines
    return "\n\n".join(parts) + "\n"


def _schedules() -> str:
    head = f"{_GENERATED} by `simplan show schedules`.*"
    more = "`schedule: FILE.csv` and installed packages add [custom schedules](../how-to/custom-schedule.md)."
    return "\n\n".join(["# Schedules", head, _listed("schedules"), more]) + "\n"


def _optimizers() -> str:
    head = f"{_GENERATED} by `simplan show optimizers`.*"
    more = (
        "Bytes of states per weight are those of a matrix of 4,096 x 4,096 that is not sharded, without copies of "
        "weights of a framework; where the framework decides, they are torch's, as wide as the weights. "
        "bitsandbytes keeps tensors below 4,096 weights in FP32, and under Hugging Face's Trainer embeddings as "
        "well. torchao keeps shards below 4,096 weights, and those that are no whole blocks of 256 (128 for 4 "
        "bits), as wide as the weights. Paged states are in the predicted `device` memory as far as there is room, "
        "in no counter of torch (`allocated`, `reserved`), and do not decide whether a plan fits. Muon's states "
        "are those of matrices of blocks; embeddings, head, norms and biases have AdamW's. Under FSDP2 ranks "
        "gather its matrices in BF16, and all of them orthogonalize each; under Megatron Core ranks own whole "
        "matrices. `training.optimizer_dtypes` has types of Adam's states, for Megatron's precision-aware "
        "optimizer and torchtitan."
    )
    return "\n\n".join(["# Optimizers", head, more, _listed("optimizers")]) + "\n"


def _metrics() -> str:
    head = f"{_GENERATED} by `simplan show metrics`.*"
    more = (
        "`expect: yes` marks metrics that an [expectation](../how-to/ci.md) can name; the others are words of reports."
    )
    return "\n\n".join(["# Metrics", head, more, _listed("metrics")]) + "\n"


def _listed(kind: str) -> str:
    rows = listing(kind)
    headers = list(rows[0])
    cells = [[f"`{row[key]}`" if key == "name" else _cell(row[key]) for key in headers] for row in rows]
    return _table(headers, cells)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(text: str) -> str:
    """Plain text as Markdown: only code between backticks keeps its meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = [re.sub(r"([*_\[\]|])", r"\\\1", html.escape(part, quote=False)) for part in parts[::2]]
    code = [part.replace("|", "\\|") for part in parts[1::2]]
    return "".join(one for pair in zip(plain, [*code, ""], strict=True) for one in pair)


def _of_repository(file: str) -> str:
    depth = "../" if file.startswith("scenarios") else ""
    return _relinked((ROOT / file).read_text(encoding="utf-8"), depth)


def _relinked(text: str, depth: str = "") -> str:
    for start, place in _PLACES.items():
        text = text.replace(f"]({start}", f"]({depth}{place}")
    return text
