"""Shell completion, asked as bash and zsh ask it."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan import catalog
from tests.cli.calls import Simplan


def completed(simplan: Simplan, shell: str, line: str) -> list[str]:
    """Completions of the last word of a command line; an empty one if the line ends in a space."""
    number = len(line.split()) - (not line.endswith(" "))
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(number)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
    }
    result = simplan(env={"_SIMPLAN_COMPLETE": f"complete_{shell}", **asked[shell]})
    assert result.returncode == 0, result.stderr
    text = result.stdout.replace("_arguments '*: :((", "").replace("))'", "").replace('"', "")
    return [word.partition(":")[0] for word in text.split("\n") if word]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_names_are_completed(simplan: Simplan, tmp_path: Path, shell: str) -> None:
    (tmp_path / "llama.yaml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    names = completed(simplan, shell, "simplan predict llama")
    assert "llama.yaml" in names
    assert set(names) - {"llama.yaml"} == {name for name in catalog.names("models") if name.startswith("llama")}
    assert "notes.txt" not in completed(simplan, shell, "simplan predict n")
    assert completed(simplan, shell, "simplan search x.yaml --cluster dgx-h") == ["dgx-h100", "dgx-h200"]
    assert "plan.recompute=" in completed(simplan, shell, "simplan run x.yaml --set plan.rec")
    assert completed(simplan, shell, "simplan predict x.yaml --schedule inter") == ["interleaved_1f1b"]
    assert completed(simplan, shell, "simplan predict x.yaml --software megatron-c") == ["megatron-core"]
    assert completed(simplan, shell, "simplan show dev") == ["devices"]
    assert completed(simplan, shell, "simplan show links tcp-10") == ["tcp-10gbit", "tcp-100gbit"]
