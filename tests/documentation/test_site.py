"""The documentation site: it builds strictly, and what the program writes is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from docs.generate import first_screen, pages
from simplan import catalog
from simplan.cli.app import app
from simplan.cli.listing import listing
from simplan.optimizers import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """A broken link, an anchor that is not there or a page that is left out ends it."""
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert 'id="simplan.prediction.Prediction"' in api
    home = (tmp_path / "site" / "index.html").read_text()
    assert "14,931" in home, "the home page begins as the README does"
    assert "simplan search" in (tmp_path / "site" / "reference" / "cli" / "index.html").read_text()


def test_generated_pages_have_every_command_option_and_entry() -> None:
    written = pages()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        section = written["reference/cli.md"].partition(f"\n## simplan {name}\n")[2].partition("\n## ")[0]
        assert section, name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in section, (name, parameter.opts)
    for kind in ("model", "cluster", "topology", "training", "plan", "search-space"):
        assert all(f"| `{row['name']}` |" in written["reference/scenario.md"] for row in listing(kind)), kind
    for kind in ("devices", "links", "clusters", "topologies", "models"):
        assert all(f"| `{row['name']}` |" in written["reference/catalog.md"] for row in listing(kind)), kind
    assert all(f"\n## {name}\n" in written["reference/frameworks.md"] for name in catalog.names("software"))
    assert all(f"| `{row['name']}` |" in written["reference/schedules.md"] for row in listing("schedules"))
    assert all(f"| `{name}` |" in written["reference/optimizers.md"] for name in OPTIMIZERS)
    assert all(f"| `{row['name']}` |" in written["reference/metrics.md"] for row in listing("metrics"))


def test_generated_tables_have_no_markup_of_docstrings() -> None:
    written = pages()
    for page in ("scenario", "schedules", "frameworks", "metrics", "catalog"):
        assert not re.search(r"``\w", written[f"reference/{page}.md"]), page
    assert "kept" + r"\_for" not in written["reference/schedules.md"]


def test_rows_of_generated_tables_have_as_many_cells_as_their_heads() -> None:
    for page, text in pages().items():
        cells = 0
        for line in text.splitlines():
            if not line.startswith("|"):
                cells = 0
            else:
                count = line.replace("\\|", "").count("|")
                assert cells in (0, count), (page, line)
                cells = count


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
def test_no_page_is_nearly_empty(page: str) -> None:
    """The API page has its text from docstrings too, the home page from the README."""
    text = (ROOT / page).read_text()
    assert len((first_screen() + text if page == "docs/index.md" else text).split()) >= 110
