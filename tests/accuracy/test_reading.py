"""Files of published runs: what is wrong with one is a sentence with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simplan.accuracy.reading import read_published
from simplan.errors import SpecError
from tests.accuracy.runs import RESNET, run_data, write_runs

PUBLISHED = Path(__file__).resolve().parents[2] / "scenarios" / "published"
HELD_OUT = PUBLISHED.with_name("heldout")


def problems(file: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_published([file])
    return str(caught.value)


def test_a_folder_is_read_with_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write_runs(tmp_path / "below" / "a.yaml", run_data("a"), run_data("b"))
    (tmp_path / "links.yaml").write_text("meta: {source: x}\nrecords: []\n")
    found = {Path(read.file).name: read.runs for read in read_published([tmp_path])}
    assert found["links.yaml"] is None
    assert [run.id for run in found["a.yaml"] or ()] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan__microbatchsize": 2}, "runs.0.plan.microbatchsize: is not a known key; did you mean microbatch_size"),
        ({"plan__schedule": "1f2b"}, 'runs.0.plan.schedule = "1f2b": is not a known schedule; did you mean 1f1b?'),
        ({"cluster__inter_link_gbit_per_device": 1e30}, "gbit_per_device = 1e+30: must be at most 1,000,000"),
        ({"plan__virtual_stages": 10**12}, "plan.virtual_stages = 1000000000000: must be at most 2,000"),
        ({"model__seq_len": 256.5}, "runs.0.model.seq_len = 256.5: must be a whole number"),
        ({"cluster__num_devices": 8}, "run-1: cluster.num_devices = 8: must be dp_replicate x dp_shard x tp x pp x cp "
         "= 2 x 1 x 1 x 2 x 1 = 4"),
        ({"plan__num_microbatches": 4}, "run-1: plan.global_batch_size = 32: must be num_microbatches x "
         "microbatch_size x dp_replicate x dp_shard = 4 x 2 x 2 x 1 = 16"),
        ({"model__num_hidden_layers": 9}, "run-1: model.num_hidden_layers = 9: must be a multiple of pp x "
         "virtual_stages = 2 x 1 = 2; give plan.stage_layers, or correct one of the three"),
        ({"plan__stage_layers": [3, 4]}, "run-1: plan.stage_layers: adds up to 7, and num_hidden_layers = 8; give the "
         "layers of every pipeline rank"),
        ({"cluster__devices_per_node": 10**6}, "runs.0.cluster.devices_per_node = 1000000: must be at most 262,144"),
        ({"measured__peak_reserved_gib": 5e-324}, "runs.0.measured.peak_reserved_gib = 5e-324: must be at least 1e-06"),
        ({"plan__lora_rank": 8}, "run-1: plan.lora_rank = 8: is for task = lora; remove it"),
        ({"measured__oom": True}, "run-1: measured.step_time_s = 0.02: must be null where oom is true"),
        ({"measured__samples_per_s_per_device": 410.0}, "run-1: measured.samples_per_s_per_device = 410: times "
         "step_time_s and num_devices it is 32.8, and plan.global_batch_size = 32; correct one of the four"),
        ({"model__hidden_size": 0}, "run-1: model.hidden_size = 0: must be at least 1"),
        ({"model__patch_size": 16}, "run-1: model.patch_size = 16: is not for family = gpt; remove it"),
        ({"model": RESNET | {"seq_len": 256}}, "run-1: model.seq_len = 256: is not for family = resnet; remove it"),
        ({"model": {"name": "r", "family": "resnet", "image_size": 224, "num_classes": 10, "layer_type": "basic"}},
         "run-1: model.depths: is missing, and family = resnet needs it"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_a_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    told = problems(write_runs(tmp_path / "runs.yaml", run_data(**changes)))
    assert sentence in told
    assert f"{tmp_path / 'runs.yaml'}:" in told, "with its line"


def test_an_id_is_used_once(tmp_path: Path) -> None:
    write_runs(tmp_path / "a.yaml", run_data("same"))
    write_runs(tmp_path / "b.yaml", run_data("same"))
    assert f"runs.0.id = same: is the id of a run of {tmp_path / 'a.yaml'} as well" in problems(tmp_path)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    assert "holds no file of runs (*.yaml); name another folder" in problems(tmp_path)


def test_runs_that_are_held_out_are_no_others() -> None:
    """None has an id or a source of those that constants are fitted on; of small models, a source, model and device."""

    def origins(folder: Path) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for read in read_published([folder]):
            for run in read.runs or ():
                origin: tuple[str, ...] = (run.source.split(":")[0],)
                if Path(read.file).stem.startswith("small_models_"):
                    origin += (run.model.name, run.cluster.device)
                found[run.id] = origin
        return found

    held, seen = origins(HELD_OUT), origins(PUBLISHED)
    assert len(held) == 339
    assert not held.keys() & seen.keys()
    assert not set(held.values()) & set(seen.values())


def test_the_runs_of_this_project_add_up() -> None:
    files = read_published([PUBLISHED])
    assert sum(len(read.runs or ()) for read in files) == 521
    without = {Path(read.file).stem for read in files if read.runs is None}
    assert {"collectives", "devices", "zero_bubble_profiles"} <= without
