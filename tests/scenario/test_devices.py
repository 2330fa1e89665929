"""The device of a cluster as it is written: what follows from what is given, and numbers of another unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from simplan import catalog
from simplan.cluster.hardware import DeviceSpec
from simplan.errors import SpecError
from simplan.scenario import load_scenario
from tests.support.problems import says

SCENARIO = (
    "model: {{preset: gpt2-124m}}\ncluster: {{preset: dgx-h100, num_devices: 2, device: {}}}\n"
    "training: {{global_batch_size: 24}}\nplan: {{dp_replicate: 2}}\n"
)
H100 = catalog.device("h100-sxm-80gb")


def device(folder: Path, written: str) -> DeviceSpec:
    path = folder / "case.yaml"
    path.write_text(SCENARIO.format(written))
    return load_scenario(path).job.cluster.device


def test_another_peak_drops_what_was_measured_of_the_old_one(tmp_path: Path) -> None:
    slower = device(tmp_path, "{peak_flop_per_s: {bf16: 1.48e14, fp8: 1.979e15}}")
    assert slower.matmul_flop_per_s == {"fp8": H100.matmul_flop_per_s["fp8"]}
    assert device(tmp_path, "{memory_bytes: 100000000000}").matmul_flop_per_s == H100.matmul_flop_per_s
    changed = device(tmp_path, "{peak_flop_per_s: {bf16: 1.48e14}, matmul_flop_per_s: {bf16: 1.2e14}}")
    assert changed.matmul_flop_per_s == {"bf16": 1.2e14}


def test_another_architecture_brings_its_kernels(tmp_path: Path) -> None:
    other = device(tmp_path, "{architecture: ampere}")
    assert other.kernels == catalog.device("a100-sxm-80gb").kernels != H100.kernels
    assert "A100" in other.sources["kernels.attention.flash2"]
    changed = device(tmp_path, "{id: mine, architecture: hopper, peak_flop_per_s: {bf16: 2e14}}")
    assert changed.kernels == H100.kernels


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("{memory_bytes: 80}",
         "cluster.device.memory_bytes = 80: is less ... device ... write ... 80 GiB is 85899345920"),
        ("{peak_flop_per_s: {bf16: 989}}",
         "cluster.device.peak_flop_per_s.bf16 = 989: is less ... device ... write ... FLOP ... 989 TFLOP/s is 989e12"),
        ("{memory_bandwidth_bytes_per_s: 3350}",
         "cluster.device.memory_bandwidth_bytes_per_s = 3350: is less ... device ... write ... 3.35 TB/s is 3.35e12"),
        ("{memory_bytes: 60_000_000_000}",
         'cluster.device.memory_bytes = "60_000_000_000": ... whole number; write 60000000000 ... YAML ... _'),
        ("{architecture: amper}",
         "cluster.device.architecture = amper: is not ... catalog; did you mean ampere or ampere-ga10x?"),
    ],
)  # fmt: skip
def test_values_that_no_device_has(tmp_path: Path, written: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        device(tmp_path, written)
    assert says(str(caught.value), sentence)


def test_all_that_is_wrong_with_a_device_is_told_at_once(tmp_path: Path) -> None:
    written = (
        "{preset: h100-sx, architecture: amper, memory_bytes: 80, peak_flop_per_s: {bf16: fast}, host_link: pcie9}"
    )
    with pytest.raises(SpecError) as caught:
        device(tmp_path, written)
    fields = ("preset", "architecture", "memory_bytes", "peak_flop_per_s.bf16", "host_link")
    assert [problem.field for problem in caught.value.problems] == [f"cluster.device.{field}" for field in fields]
