from __future__ import annotations

from typing import get_args

import pytest

from simplan import catalog
from simplan.cluster import machine
from simplan.errors import NotModelledError, SpecError
from simplan.software.rates import KernelRates
from simplan.units import GIB, MIB

EXACT_COUNTS = {
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "mpt-125m": 125_311_488,
    "mpt-350m": 355_985_408,
    "mpt-760m": 760_470_528,
    "mpt-1b": 1_315_950_592,
    "mpt-3b": 2_651_837_440,
    "mpt-7b": 6_658_859_008,
    "mpt-13b": 12_853_954_560,
    "mpt-30b": 29_975_214_080,
    "mpt-70b": 64_862_437_376,
    "mpt-7b-alibi": 6_649_286_656,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b16": 86_567_656,
    "vit-b32": 88_224_232,
    "vit-l16": 304_326_632,
    "vit-l32": 306_535_400,
    "vit-h14": 632_045_800,
}
DEVICES = {
    "gb300", "gb200", "mi355x", "tpu-v7x", "b300-sxm", "b200-sxm", "gaudi3", "mi325x", "mi300x", "h200-sxm",
    "h100-sxm-80gb", "gh200", "tpu-v6e", "h100-pcie-80gb", "trainium2", "tpu-v5p", "gaudi2", "mi250x", "l40s",
    "mi250", "a100-sxm-80gb", "a100-pcie-80gb", "tpu-v4", "tpu-v5e", "mi455x", "rubin-sxm", "ascend-950dt",
    "v100-sxm2-32gb", "v100-sxm2-16gb", "v100-pcie-16gb", "v100-pcie-32gb", "a100-sxm-40gb", "a100-pcie-40gb",
    "a10g", "a10", "a6000", "l4", "rtx-4090", "t4", "a40", "tpu-v2", "tpu-v3", "h100-sxm-96gb-500w",
    "v100-sxm3-32gb", "h20-sxm-96gb", "h20-sxm-141gb", "h800-sxm-80gb", "a800-sxm-80gb", "h100-nvl-94gb", "l20", "l40",
    "rtx-6000-ada", "rtx-3090",
}  # fmt: skip
CLUSTERS = {
    "dgx-v100", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "this-machine",
}  # fmt: skip


def test_the_names_that_scenarios_rely_on_are_there() -> None:
    assert set(catalog.names("devices")) == DEVICES
    assert set(catalog.names("clusters")) == CLUSTERS
    assert {*EXACT_COUNTS, "gpt3-175b", "mt-nlg-530b", "bert-tiny"} <= set(catalog.names("models"))
    wanted = ["nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "xgmi", "ici", "network-400gbit"]
    assert set(wanted) <= set(catalog.names("links"))


@pytest.mark.parametrize("kind", get_args(catalog.Kind))
def test_every_entry_is_valid(kind: catalog.Kind) -> None:
    read = getattr(catalog, kind.removesuffix("s"))
    for name in catalog.names(kind):
        assert read(name).id == name if kind != "models" else read(name).name == name


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_every_value_of_a_device_names_its_source(name: str) -> None:
    device = catalog.device(name)
    for field in ("memory_bytes", "memory_bandwidth_bytes_per_s", "intra_link"):
        assert (getattr(device, field) is not None) == bool(device.sources.get(field)), field
    for field in ("peak_flop_per_s", "matmul_flop_per_s"):
        for dtype in getattr(device, field):
            assert device.sources.get(field) or device.sources.get(f"{field}.{dtype}"), (field, dtype)
    if device.intra_link is not None:
        catalog.link(device.intra_link)


def test_short_references_are_written_out() -> None:
    source = catalog.device("h100-sxm-80gb").sources["matmul_flop_per_s.bf16"]
    assert source.startswith("stas00/ml-engineering, compute/accelerator/README.md at 744d01e18b79")
    assert source.endswith(": 2048x2048x13312, 2.7.0+cu126")


def test_sources_are_in_the_order_of_fields() -> None:
    """So that two documents of the same job are equal, byte by byte."""
    sources = catalog.device("h100-sxm-80gb").sources
    fitted = [name for name in KernelRates.model_fields if sources.get(f"kernels.{name}", "").startswith("fitted")]
    assert len(fitted) > 10
    assert [f"kernels.{name}" for name in fitted] == [key for key in sources if key.removeprefix("kernels.") in fitted]


def test_datasheet_values() -> None:
    """NVIDIA's own datasheets, dense: bf16 TFLOP/s H100 SXM 989.4, A100 312; NVLink of B200 1.8 TB/s both ways."""
    assert catalog.device("h100-sxm-80gb").peak_flop_per_s["bf16"] == pytest.approx(989.4e12, rel=1e-3)
    assert catalog.device("a100-sxm-40gb").peak_flop_per_s["bf16"] == 312e12
    assert catalog.device("v100-sxm2-32gb").peak_flop_per_s["fp16"] == 125e12
    assert catalog.device("a100-sxm-80gb").memory_bytes == 80 * GIB
    assert catalog.device("h100-sxm-80gb").memory_bytes == 85_520_809_984  # nvidia-smi: 81559 MiB
    assert catalog.link("nvlink5").bytes_per_s == 1.8e12 / 2
    assert catalog.link("nvlink4").bytes_per_s == 900e9 / 2


def test_devices_that_are_others_with_fewer_links() -> None:
    """H800 and A800 are H100 and A100 whose NVLink has 400 GB/s both ways together (DeepSeek: 160 GB/s in use)."""
    for cut, whole in (("h800-sxm-80gb", "h100-sxm-80gb"), ("a800-sxm-80gb", "a100-sxm-80gb")):
        same = {"peak_flop_per_s", "matmul_flop_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s", "kernels"}
        one, other = catalog.device(cut), catalog.device(whole)
        assert one.model_dump(include=same) == other.model_dump(include=same)
        link = catalog.link(str(one.intra_link))
        assert link.bytes_per_s == 200e9
        assert link.bytes_per_s * link.bandwidth_share == 160e9


def test_consumer_cards_have_half_the_rate_when_they_add_up_in_32_bits() -> None:
    """Dense fp16 products over fp32 ones outside of tensor cores: 2 on GeForce, 4 on the datacentre's Ada."""
    for name, ratio in (("rtx-4090", 2), ("rtx-3090", 2), ("l40s", 4), ("rtx-6000-ada", 4), ("l4", 4), ("a40", 4)):
        peak = catalog.device(name).peak_flop_per_s
        assert peak["bf16"] / peak["fp32"] == pytest.approx(ratio, rel=0.02), name


def test_a_measured_matmul_rate_is_below_the_peak() -> None:
    for name in catalog.names("devices"):
        device = catalog.device(name)
        for dtype, rate in device.matmul_flop_per_s.items():
            assert rate < device.peak_flop_per_s[dtype], name


@pytest.mark.parametrize(("name", "count"), EXACT_COUNTS.items())
def test_parameter_counts_equal_the_published_ones(name: str, count: int) -> None:
    assert catalog.model(name).num_parameters == count == catalog.published_parameters(name)


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "bert-tiny"])
def test_parameter_counts_equal_rounded_ones(name: str) -> None:
    assert catalog.model(name).num_parameters == pytest.approx(catalog.published_parameters(name), rel=4e-3)


def test_clusters_are_filled_node_by_node() -> None:
    one = catalog.cluster("dgx-h100")
    assert (one.num_devices, one.num_nodes, one.inter_link) == (8, 1, None)
    two = catalog.cluster("dgx-h100", 12)
    assert (two.num_nodes, two.node_of(7), two.node_of(8)) == (2, 0, 1)
    assert two.inter_link is not None
    assert two.inter_link.bytes_per_s == 400e9 / 8
    assert two.intra_link == catalog.link("nvlink4")
    assert catalog.cluster("gb200-nvl72").num_devices == 72


def test_torch_profile() -> None:
    torch = catalog.software("torch")
    assert (torch.bucket_bytes, torch.first_bucket_bytes) == (25 * MIB, 1 * MIB)
    assert torch.state_bytes["bf16"].parameter + torch.state_bytes["bf16"].gradient == 8
    assert torch.context_bytes["cpu"] == 0
    for precision in ("bf16", "fp16"):  # under autocast the residual stream stays in the dtype of the weights
        assert torch.state_bytes[precision].boundary == torch.state_bytes[precision].parameter == 4


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        (
            "device",
            "h100-sxm-80g",
            "device = h100-sxm-80g: is not in the catalogue; did you mean h100-sxm-80gb? "
            "https://simplan.readthedocs.io/how-to/devices/ says how",
        ),
        ("device", "H100", "device = H100: is not in the catalogue; did you mean h100-sxm-80gb or h100-nvl-94gb or"),
        ("device", "H20", "device = H20: is not in the catalogue; did you mean h20-sxm-96gb or h20-sxm-141gb? http"),
        (
            "device",
            "MTT-S4000",
            "device = MTT-S4000: is not in the catalogue; `simplan show devices` lists them; ",
        ),
        ("link", "nvlink", "link = nvlink: is not in the catalogue; did you mean nvlink5"),
        ("link", "network-0gbit", "link = network-0gbit: is not in the catalogue; did you mean network-50gbit"),
        ("model", "zzzzz", "model = zzzzz: is not in the catalogue; `simplan show models` lists them"),
        ("cluster", "dgx-h10", "cluster = dgx-h10: is not in the catalogue; did you mean dgx-h100"),
        (
            "cluster",
            "p6",
            "cluster = p6: is not in the catalogue; known: dgx-a100-40gb, dgx-a100-80gb, dgx-b200, dgx-h100, dgx-h200, "
            "dgx-v100, gb200-nvl72, this-machine; or give device and devices_per_node in place of a preset",
        ),
        ("software", "pytorch", "software = pytorch: is not in the catalogue; did you mean torch"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(kind: str, name: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        getattr(catalog, kind)(name)
    assert str(caught.value).startswith(sentence)
    assert not isinstance(caught.value, NotModelledError)


@pytest.mark.parametrize(
    ("kind", "name", "family"),
    [("model", "gemma-7b", "the Gemma family"), ("model", "bloom", "the BLOOM family")],
)
def test_names_that_are_not_modelled_yet_are_refused_by_name(kind: str, name: str, family: str) -> None:
    with pytest.raises(NotModelledError, match=f"{kind} = {name}: {family} is not modelled yet; "):
        getattr(catalog, kind)(name)


def test_this_machine_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 4)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 16 * GIB)
    here = catalog.cluster("this-machine")
    assert (here.num_devices, here.devices_per_node, here.num_nodes, here.cores_per_node) == (4, 4, 1, 4)
    assert here.device.kind == "cpu"
    assert here.device.memory_bytes == 4 * GIB
    assert here.device.peak_flop_per_s == {}
    assert catalog.cluster("this-machine", 3).num_devices == 3


@pytest.mark.parametrize(("cores", "memory_gib", "most"), [(2, 8, 8), (2, 1, 2), (64, 16, 46), (1, 0.1, 1)])
def test_how_many_ranks_a_machine_holds(cores: int, memory_gib: float, most: int) -> None:
    """Four per core, 350 MiB each: 16 GiB / 350 MiB = 46.8; one always."""
    assert machine.max_ranks(cores, int(memory_gib * GIB)) == most


def test_this_machine_refuses_more_ranks_than_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 8 * GIB)
    assert catalog.cluster("this-machine", 8).num_devices == 8
    with pytest.raises(SpecError, match=r"cluster.num_devices = 9: this machine holds at most 8 ranks: it has 2 cores"):
        catalog.cluster("this-machine", 9)


def test_reads_cores_and_memory_of_the_operating_system() -> None:
    with open("/proc/meminfo", encoding="ascii") as stream:  # noqa: PTH123
        total_kib = int(stream.readline().split()[1])
    assert machine.machine_memory_bytes() == total_kib * 1024
    assert machine.num_cores() >= 1


def test_every_claim_of_a_software_profile_has_a_source() -> None:
    for name in catalog.names("software"):
        software = catalog.software(name)
        sourced = {key.partition(".")[0] for key in software.sources}
        apart = {"id", "sources", "not_modelled", "first_bucket_bytes", "executable", "options"}
        said = software.model_fields_set - apart
        assert said <= sourced, (name, said - sourced)
        assert sourced <= set(type(software).model_fields), name
