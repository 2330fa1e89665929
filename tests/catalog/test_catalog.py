from __future__ import annotations

import re
from typing import get_args

import pytest

from simplan import catalog
from simplan.cluster import machine
from simplan.errors import NotModelledError, SpecError
from simplan.software.rates import KernelRates
from simplan.units import GIB, MIB
from tests.catalog.test_published_models import ROWS
from tests.support.problems import says

PUBLISHED = {row["num_parameters"] for row in ROWS}
ROUNDED = {"gpt3-175b", "mt-nlg-530b", "deepseek-v3", "bert-tiny"}
"""Models whose authors print no exact count."""
DEVICES = {
    "gb300", "gb200", "mi355x", "tpu-v7x", "b300-sxm", "b200-sxm", "gaudi3", "mi325x", "mi300x", "h200-sxm",
    "h100-sxm-80gb", "gh200", "tpu-v6e", "h100-pcie-80gb", "trainium2", "tpu-v5p", "gaudi2", "mi250x", "l40s",
    "mi250", "a100-sxm-80gb", "a100-pcie-80gb", "tpu-v4", "tpu-v5e", "mi455x", "rubin-sxm", "ascend-950dt",
    "v100-sxm2-32gb", "v100-sxm2-16gb", "v100-pcie-16gb", "v100-pcie-32gb", "a100-sxm-40gb", "a100-pcie-40gb",
    "a10g", "a10", "a6000", "l4", "rtx-4090", "t4", "a40", "tpu-v2", "tpu-v3", "h100-sxm-96gb-500w",
    "v100-sxm3-32gb", "h20-sxm-96gb", "h20-sxm-141gb", "h800-sxm-80gb", "a800-sxm-80gb", "h100-nvl-94gb", "l20", "l40",
    "rtx-6000-ada", "rtx-3090", "rtx-4060-ti-16gb", "rtx-5090", "rtx-pro-6000",
}  # fmt: skip
MODELS = {
    "gpt2-124m", "gpt2-1.5b", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3.1-405b",
    "llama3.2-1b", "llama3.2-3b", "mistral-7b-v0.1", "mistral-7b-v0.3", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b",
    "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-0.6b", "qwen3-8b", "qwen3-32b", "gemma-2b", "gemma-7b",
    "gemma2-2b", "gemma2-9b", "gemma2-27b", "gemma3-1b", "gemma3-4b", "gemma3-12b", "gemma3-27b", "gpt-neox-20b",
    "pythia-6.9b", "pythia-12b", "mpt-125m", "mpt-350m", "mpt-760m", "mpt-1b", "mpt-3b",
    "mpt-7b", "mpt-13b", "mpt-30b", "mpt-70b", "mpt-7b-alibi", "bert-base", "bert-large", "vit-b16", "vit-b32",
    "vit-l16", "vit-l32", "vit-h14", "gpt3-175b", "mt-nlg-530b", "bert-tiny",
}  # fmt: skip
CLUSTERS = {
    "dgx-v100", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "p5.48xlarge",
    "nd-mi300x-v5", "this-machine",
}  # fmt: skip

SECTIONS = {"topologies", "reliability", "spot_zones"}
"""Kinds whose entries are sections of a scenario."""
ROUNDED_PEAKS = {"l4", "l40s", "rtx-3090", "rubin-sxm"}
"""GPUs whose datasheets have two or three digits; Rubin's FP8 is more than twice its BF16."""


def test_rates_are_fitted_under_the_profile_that_a_prediction_takes_them_from() -> None:
    """Also where that one takes them from a third: else runs are fitted to constants that no profile has."""
    for name in catalog.names("software"):
        profile = catalog.software(name)
        owner = catalog.software(profile.rates_profile)
        assert owner.rates_of is None, name
        assert profile.rates.traffic == owner.rates.traffic, name


def test_the_names_that_scenarios_rely_on_are_there() -> None:
    assert set(catalog.names("devices")) == DEVICES
    assert set(catalog.names("clusters")) == CLUSTERS
    assert set(catalog.names("models")) >= MODELS
    wanted = ["nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "xgmi", "ici", "network-400gbit"]
    assert set(wanted) <= set(catalog.names("links"))


@pytest.mark.parametrize("kind", [kind for kind in get_args(catalog.Kind) if kind not in SECTIONS])
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
    assert says(source, "stas00/ml-engineering", "accelerator/README.md", "744d01e18b79")
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


@pytest.mark.parametrize("name", [name for name in catalog.names("devices") if catalog.device(name).kind == "gpu"])
def test_matrix_peaks_of_narrower_formats_are_multiples(name: str) -> None:
    """On a GPU, halving the width doubles the peak: with digits of one datasheet, to half a percent."""
    peaks = catalog.device(name).peak_flop_per_s
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8")):
        if wide in peaks and narrow in peaks and name not in ROUNDED_PEAKS:
            assert peaks[narrow] / peaks[wide] == pytest.approx(2, rel=5e-3), (wide, narrow)
    seen = {
        "h100-sxm-80gb": 79.11,
        "h100-sxm-96gb-500w": 95.0,
        "a100-sxm-40gb": 39.5,
        "rtx-4090": 23.64,
        "rtx-3090": 23.7,
        "rtx-4060-ti-16gb": 15.6,
        "gb300": 276.5,
        "b300-sxm": 267.69,
        "gb200": 184.31,
        "mi355x": 287.98,
        "mi325x": 255.98,
        "gh200": 94.88,
        "a6000": 47.53,
        "a40": 44.42,
        "l4": 22.03,
        "a10": 22.06,
        "t4": 14.56,
    }
    for name, gib in seen.items():  # what torch prints when it is out of memory
        assert (catalog.device(name).memory_bytes or 0) / GIB == pytest.approx(gib, abs=0.005)
    assert catalog.link("nvlink5").bytes_per_s == 1.8e12 / 2
    assert catalog.link("nvlink4").bytes_per_s == 900e9 / 2


def test_devices_that_are_others_with_fewer_links() -> None:
    """H800 and A800 are H100 and A100 whose NVLink has 400 GB/s both ways together (DeepSeek: 160 GB/s in use)."""
    for cut, whole in (("h800-sxm-80gb", "h100-sxm-80gb"), ("a800-sxm-80gb", "a100-sxm-80gb")):
        same = {"peak_flop_per_s", "matmul_flop_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s", "kernels"}
        first, other = catalog.device(cut), catalog.device(whole)
        assert first.model_dump(include=same) == other.model_dump(include=same)
        link = catalog.link(str(first.intra_link))
        assert link.bytes_per_s == 200e9
        assert link.bytes_per_s * link.bandwidth_share == 160e9


def test_consumer_cards_have_half_the_rate_when_they_add_up_in_32_bits() -> None:
    """Dense fp16 products over fp32 ones outside of tensor cores: 2 on GeForce, 4 on the datacentre's Ada."""
    two, four = (
        ("rtx-5090", "rtx-4090", "rtx-4060-ti-16gb", "rtx-3090"),
        ("rtx-pro-6000", "l40s", "rtx-6000-ada", "l4", "a40"),
    )
    for name, ratio in (*((name, 2) for name in two), *((name, 4) for name in four)):
        peak = catalog.device(name).peak_flop_per_s
        assert peak["bf16"] / peak["fp32"] == pytest.approx(ratio, rel=0.02), name


def test_a_measured_matmul_rate_is_below_the_peak() -> None:
    """GeForce cards run at higher clocks than the boost clock for which their peak is published."""
    for name in catalog.names("devices"):
        device, allowed = catalog.device(name), 1.1 if name.startswith("rtx-") else 1.0
        for dtype, rate in device.matmul_flop_per_s.items():
            assert rate < allowed * device.peak_flop_per_s[dtype], name


@pytest.mark.parametrize("name", catalog.names("models"))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    """To the unit, and as ``tests/catalog/published_models.yaml`` has them with their sources, unless rounded."""
    published = catalog.published_parameters(name)
    rounded = catalog.canonical_name("models", name) in ROUNDED
    assert (published in PUBLISHED) == (not rounded)
    assert catalog.model(name).num_parameters == pytest.approx(published, rel=4e-3 if rounded else 0, abs=0)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("llama3.1-8b", "llama3-8b"), ("llama3.1-70b", "llama3-70b"), ("gemma-2-9b", "gemma2-9b"), ("gpt2", "gpt2-124m")],
)
def test_alias_of_a_model_has_its_shape(alias: str, name: str) -> None:
    assert catalog.canonical_name("models", alias) == name
    assert catalog.model(alias) == catalog.model(name).model_copy(update={"name": alias})
    listed = catalog.names("models")
    assert listed.index(alias) > listed.index(name)


@pytest.mark.parametrize(
    "name", ["llama3.1-405b", "qwen2.5-7b", "mistral-7b", "gpt-neox-20b", "mixtral-8x7b", "gpt2-xl"]
)
def test_model_names_people_type_are_presets(name: str) -> None:
    assert catalog.model(name).name == name


def test_clusters_are_filled_node_by_node() -> None:
    node = catalog.cluster("dgx-h100")
    assert (node.num_devices, node.num_nodes, node.inter_link) == (8, 1, None)
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


@pytest.mark.parametrize("name", ["torch", "torchtitan", "transformers"])
def test_torch_has_the_kernels_and_the_allocator_of_torchtitan(name: str) -> None:
    """Except for cuDNN's attention, and on a calibrated device, where torch's own kernels were timed."""
    software, same = catalog.software(name), catalog.software("torchtitan-2024")
    assert same.rates.fitted_on is not None
    later = {"attention_kernel": "flash3"}
    rates = later | {"relative_std": software.rates.relative_std, "fitted_on": software.rates.fitted_on}
    assert software.rates == same.rates.model_copy(update=rates)
    assert software.reserve_fraction == same.reserve_fraction > 0
    assert software.sources["rates"].endswith(f"; otherwise as torchtitan-2024: {same.sources['rates']}")
    prior = catalog.software(name, textbook=True)
    assert prior.rates == catalog.software("torchtitan-2024", textbook=True).rates.model_copy(update=later)
    for compiled, times in ((False, 1.0), (True, 0.7)) if software.executable else ():
        now, before = (profile.model_copy(update={"compiled": compiled}) for profile in (software, prior))
        assert now.timed_traffic == before.timed_traffic == times != now.traffic


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("device", "h100-sxm-80g",
         "device = h100-sxm-80g: is not ... catalog; did you mean h100-sxm-80gb? https://simplan.readthedocs.io/how-to/devices/"),
        ("device", "H20", "device = H20: ... several devices; name ... h20-sxm-96gb, h20-sxm-141gb"),
        ("device", "MTT-S4000", "device = MTT-S4000: is not ... catalog; `simplan ... devices`"),
        ("link", "nvlink", "link = nvlink: ... several links; name ... nvlink2, nvlink3"),
        ("link", "network-0gbit", "link = network-0gbit: is not ... catalog; did you mean network-50gbit"),
        ("link", "tcp-9999999gbit", "link = tcp-9999999gbit: ... 0.001 to 1,000,000"),
        ("model", "zzzzz", "model = zzzzz: is not ... catalog; `simplan ... models`"),
        ("cluster", "dgx-h10", "cluster = dgx-h10: is not ... catalog; did you mean dgx-h100"),
        ("cluster", "p6",
         "cluster = p6: is not ... catalog; known: dgx-a100-40gb, dgx-a100-80gb, dgx-b200, dgx-h100, dgx-h200, "
         "dgx-v100, gb200-nvl72, nd-mi300x-v5, p5.48xlarge, this-machine; ... devices_per_node"),
        ("cluster", "8x 4090", "cluster = 8x 4090: is not ... catalog; rtx-4090"),
        ("cluster", "8x A100", "cluster = 8x A100: ... several clusters; name ... dgx-a100-40gb, dgx-a100-80gb"),
        ("software", "megatron", "software = megatron: ... several frameworks; name ... megatron-core"),
        ("software", "FSDP2", "software = FSDP2: is not in the catalog; did you mean torch?"),
        ("software", "megatron-lm-20", "software = megatron-lm-20: is not ... catalog; did you mean megatron-lm-20"),
        ("software", "pytorch", "software = pytorch: is not ... catalog; did you mean torch"),
    ],
)  # fmt: skip
def test_unknown_names_are_refused_with_the_nearest(kind: str, name: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        getattr(catalog, kind)(name)
    assert says(str(caught.value), sentence)
    assert not isinstance(caught.value, NotModelledError)


@pytest.mark.parametrize(
    ("kind", "name", "family"),
    [("model", "microsoft/phi-2", "the Phi family"), ("model", "bloom", "the BLOOM family")],
)
def test_names_that_are_not_modelled_yet_are_refused_by_name(kind: str, name: str, family: str) -> None:
    with pytest.raises(NotModelledError, match=f"{kind} = {name}: {family} is not modeled yet; "):
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


@pytest.mark.parametrize(("cores", "memory_gib", "max_ranks"), [(2, 8, 8), (2, 1, 2), (64, 16, 46), (1, 0.1, 1)])
def test_how_many_ranks_a_machine_holds(cores: int, memory_gib: float, max_ranks: int) -> None:
    """Four per core, 350 MiB each: 16 GiB / 350 MiB = 46.8; one always."""
    assert machine.max_ranks(cores, int(memory_gib * GIB)) == max_ranks


def test_reads_cores_and_memory_of_the_operating_system() -> None:
    with open("/proc/meminfo", encoding="ascii") as stream:  # noqa: PTH123
        total_kib = int(stream.readline().split()[1])
    assert machine.machine_memory_bytes() == total_kib * 1024
    assert machine.num_cores() >= 1


def test_every_claim_of_a_software_profile_has_a_source() -> None:
    for name in catalog.names("software"):
        software = catalog.software(name)
        sourced = {key.partition(".")[0] for key in software.sources}
        apart = {"id", "stands_for", "sources", "not_modelled", "first_bucket_bytes", "executable", "options"}
        apart |= {"trains_modules", "trains_on_preferences"}  # of simplan
        said = {key for key in software.model_fields_set - apart if getattr(software, key) not in ({}, (), None)}
        assert said <= sourced, (name, said - sourced)
        assert sourced <= set(type(software).model_fields), name


@pytest.mark.parametrize("name", catalog.names("software"))
def test_no_framework_has_exact_memory(name: str) -> None:
    """Allocator and activations are uncertain under each, also under one with the rates of another."""
    spread = catalog.software(name).memory_spread
    assert spread.transient_std > 0
    assert spread.allocator_std > 0


@pytest.mark.parametrize("name", catalog.names("software"))
def test_every_profile_says_of_which_year_it_is(name: str) -> None:
    assert re.search(r"\b20[0-9]{2}\b", catalog.software(name).stands_for)
