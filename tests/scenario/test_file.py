from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simplan import catalog
from simplan.cluster import machine
from simplan.errors import NotModelledError, SpecError
from simplan.optimizers import OPTIMIZERS
from simplan.plan.plan import ParallelPlan
from simplan.scenario import Scenario, load_scenario, load_search, parse_scenario, parse_search
from simplan.training import TrainingSpec
from simplan.units import GIB
from tests.jobs import job_of
from tests.support.problems import refuses, says

REST = "training: {global_batch_size: 24}\nplan: {dp_replicate: 2}\n"
MODEL = "model: {preset: gpt2-124m}\n"
TWO = "cluster: {preset: dgx-a100-80gb, num_devices: 2}\n"


def load(folder: Path, text: str) -> Scenario:
    path = folder / "case.yaml"
    path.write_text(text)
    return load_scenario(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 2)
    monkeypatch.setattr(machine, "machine_memory_bytes", lambda: 8 * GIB)


def test_the_defaults_are_those_of_the_design(tmp_path: Path) -> None:
    scenario = load(tmp_path, MODEL + TWO + REST)
    assert scenario.name == "case"
    assert scenario.file == str(tmp_path / "case.yaml")
    assert scenario.job.model == catalog.model("gpt2-124m")
    assert scenario.job.cluster == catalog.cluster("dgx-a100-80gb", 2)
    assert scenario.job.training == TrainingSpec(
        global_batch_size=24, precision="bf16", optimizer="adamw", task="pretrain"
    )
    assert scenario.job.software == catalog.software("torch")
    assert scenario.job.plan == ParallelPlan(dp_replicate=2)
    assert scenario.job.num_microbatches == 12
    assert scenario.expect == ()


def test_fields_override_a_model_preset_and_derived_ones_follow(tmp_path: Path) -> None:
    text = MODEL.replace("gpt2-124m", "gpt2-124m, hidden_size: 384, seq_len: 256") + TWO + REST
    model = load(tmp_path, text).job.model
    assert (model.hidden_size, model.head_dim, model.intermediate_size, model.seq_len) == (384, 32, 1536, 256)
    assert model.max_position_embeddings == 1024


def test_an_inline_model(tmp_path: Path) -> None:
    text = (
        "model: {family: llama, num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 4, \n"
        "        num_key_value_heads: 2, intermediate_size: 128, vocab_size: 100, seq_len: 32}\n"
    )
    model = load(tmp_path, text + TWO + REST).job.model
    block = 2 * 64 + 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    assert model.num_parameters == 2 * block + 2 * 100 * 64 + 64
    with refuses("model.num_attention_heads", "5", rule="must divide hidden_size = 64", fix="use 4") as error:
        load(tmp_path, text.replace("num_attention_heads: 4", "num_attention_heads: 5") + TWO + REST)
    assert (1, 63) in [(problem.line, problem.column) for problem in error.value.problems]


def test_an_inline_cluster(tmp_path: Path) -> None:
    text = (
        "cluster:\n  device: {preset: a100-sxm-80gb, memory_bytes: 60000000000}\n  devices_per_node: 1\n"
        "  intra_link: pcie4\n  inter_link_gbit_per_device: 100\n  num_nodes: 2\n"
    )
    cluster = load(tmp_path, MODEL + text + REST).job.cluster
    assert (cluster.id, cluster.num_devices, cluster.num_nodes) == ("inline", 2, 2)
    assert cluster.device.memory_bytes == 60_000_000_000
    assert cluster.device.sources["memory_bytes"] == "the scenario"
    assert cluster.device.peak_flop_per_s == catalog.device("a100-sxm-80gb").peak_flop_per_s
    assert cluster.inter_link is not None
    assert cluster.inter_link.bytes_per_s == 12.5e9
    one_node = text.replace("devices_per_node: 1", "devices_per_node: 2").replace("num_nodes: 2", "num_nodes: 1")
    assert load(tmp_path, MODEL + one_node + REST).job.cluster.intra_link == catalog.link("pcie4")


def test_a_device_and_a_link_of_ones_own(tmp_path: Path) -> None:
    text = (
        "cluster:\n  device: {id: mine, memory_bytes: 1000000000, peak_flop_per_s: {bf16: 1e14}}\n"
        "  devices_per_node: 2\n  intra_link: {bytes_per_s: 1e10, latency_s: 5e-6}\n"
    )
    cluster = load(tmp_path, MODEL + text + REST).job.cluster
    assert cluster.device.id == "mine"
    assert cluster.intra_link is not None
    assert (cluster.intra_link.bytes_per_s, cluster.intra_link.latency_s) == (1e10, 5e-6)
    assert cluster.intra_link.launch_s == catalog.link("pcie4").launch_s  # as nothing else is said


def test_a_network_by_name(tmp_path: Path) -> None:
    efa = "cluster: {preset: dgx-h100, inter_link: efa-400gbit, devices_per_node: 1, num_devices: 2}\n"
    assert load(tmp_path, MODEL + efa + REST).job.cluster.inter_link == catalog.link("efa-400gbit")
    link_section = efa.replace("efa-400gbit", "{bytes_per_s: 1e9, latency_s: 1e-5, bandwidth_share: 0.5}")
    link = load(tmp_path, MODEL + link_section + REST).job.cluster.inter_link
    assert link is not None
    assert (link.bytes_per_s, link.bandwidth_share) == (1e9, 0.5)


@pytest.mark.parametrize(
    ("network", "num_cards"),
    [
        ("inter_link: tcp-10gbit", 1),
        ("nics_per_node: 2, inter_link: tcp-5gbit", 2),
        ("nic_gbit: 10", 1),
        ("nics_per_node: 4, nic_gbit: 2.5", 4),
        ("inter_link_gbit_per_node: 10", None),
        ("inter_link_gbit_per_device: 2.5, inter_link_gbit_per_node: 10", None),
    ],
)
def test_devices_of_a_node_share_its_network_cards(tmp_path: Path, network: str, num_cards: int | None) -> None:
    """10 Gbit/s are 1.25 GB/s for a node of four, and a quarter of that for each of them."""
    text = f"cluster: {{device: rtx-4090, devices_per_node: 4, intra_link: pcie4, num_nodes: 2, {network}}}\n"
    cluster = load(tmp_path, MODEL + text + REST.replace("replicate: 2", "replicate: 8")).job.cluster
    assert cluster.inter_link is not None
    assert cluster.inter_link.bytes_per_s == pytest.approx(1.25e9 / 4)
    assert cluster.links["inter_node"] == {
        "name": cluster.inter_link.id,
        "bytes_per_s_per_device": pytest.approx(1.25e9 / 4),
        "bytes_per_s_per_node": pytest.approx(1.25e9),
        "nics_per_node": num_cards,
    }


def test_fewer_cards_than_a_preset_has(tmp_path: Path) -> None:
    text = "cluster: {preset: dgx-h100, num_nodes: 2, nics_per_node: 4}\n"
    cluster = load(tmp_path, MODEL + text + REST.replace("replicate: 2", "replicate: 8, pp: 2")).job.cluster
    assert cluster.inter_link is not None
    assert cluster.inter_link.bytes_per_s == catalog.link("network-200gbit").bytes_per_s


def test_a_preset_with_another_device_takes_its_link(tmp_path: Path) -> None:
    cluster = load(
        tmp_path, MODEL + TWO.replace("num_devices", "device: v100-sxm2-32gb, num_devices") + REST
    ).job.cluster
    assert cluster.device.id == "v100-sxm2-32gb"
    assert cluster.intra_link == catalog.link("nvlink2")


@pytest.mark.usefixtures("small_machine")
def test_this_machine(tmp_path: Path) -> None:
    rest = REST.replace("24}", "24, precision: fp32}")
    here = load(tmp_path, MODEL + "cluster: {preset: this-machine}\n" + rest).job.cluster
    assert (here.id, here.num_devices, here.device.kind, here.cores_per_node) == ("this-machine", 2, "cpu", 2)
    gpu = "cluster: {preset: this-machine, device: h200-sxm, num_devices: 2, stragglers: [{rank: 1, slowdown: 2}]}\n"
    there = load(tmp_path, MODEL + gpu + REST).job.cluster
    assert [slow.rank for slow in there.stragglers] == [1]
    assert (there.id, there.num_devices, there.device.id, there.cores_per_node) == ("this-machine", 2, "h200-sxm", None)
    assert there.intra_link == catalog.link("nvlink4")


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ("{preset: dgx-h100, num_nodes: 2, num_devices: 8}",
         "case.yaml:2:43: cluster.num_devices = 8: ... 1 ... devices_per_node = 8, and num_nodes = 2; remove "
         "num_nodes ... 8 ... num_devices ... 16 ... devices_per_node: 4"),
        ("{preset: dgx-h100, num_nodes: 3, num_devices: 40}",
         "case.yaml:2:43: cluster.num_devices = 40: ... 5 ... devices_per_node = 8, and num_nodes = 3; remove "
         "num_nodes ... 40 ... num_devices ... 24"),
        ("{device: l40s, num_devices: 8, num_nodes: 2}", "case.yaml:2:1: cluster.devices_per_node: is missing; add "
         "devices_per_node: 4"),
        ("{preset: this-machine, num_nodes: 2}", "case.yaml:2:1: cluster.nic_gbit: ... several ... give"),
        ("{preset: this-machine, num_nodes: 2, num_devices: 3, inter_link_gbit_per_device: 1}",
         "case.yaml:2:47: cluster.num_devices = 3: ... multiple of num_nodes = 2 ... use 2 or 4"),
        ("{preset: this-machine, num_nodes: 2, device: h200-sxm}",
         "case.yaml:2:33: cluster.num_nodes = 2: this-machine ... use 1"),
        ("{preset: this-machine, devices_per_node: 2}",
         "case.yaml:2:33: cluster.devices_per_node: ... this-machine ... remove"),
        ("{devices_per_node: 2}", "case.yaml:2:1: cluster.device: is missing; give ... devices_per_node"),
        ("{device: a100-sxm-80gb}", "case.yaml:2:1: cluster.devices_per_node: is missing; give ... devices_per_node"),
        ("{device: l40s, num_devices: 4}",
         "case.yaml:2:1: cluster.devices_per_node: is missing; add devices_per_node: 4"),
        ("{device: mi250, devices_per_node: 2}",
         "case.yaml:2:1: cluster.intra_link: is missing: ... mi250 ... name ... e.g. pcie4 (`simplan ... links`"),
        ("{device: a100-sxm-80gb, devices_per_node: 1, num_nodes: 2}",
         "case.yaml:2:1: cluster.inter_link_gbit_per_node: is missing: 2 ... give ... InfiniBand or RoCE "
         "(--gbit-per-node), e.g. 3200 ... 400; or inter_link: tcp-10gbit"),
        ("{preset: dgx-h100, device: {memory_byte: 3}, num_devices: 2}",
         "case.yaml:2:38: cluster.device.memory_byte: ... known ... did you mean memory_bytes?"),
        ("{preset: dgx-h100, intra_link: {bytes_per_s: 0, latency_s: 0}, num_devices: 2}",
         "case.yaml:2:42: cluster.intra_link.bytes_per_s = 0: ... least 1"),
        ("{preset: dgx-h100, intra_link: nvlink9, num_devices: 2}",
         "case.yaml:2:29: cluster.intra_link = nvlink9: ... did you mean nvlink5 or nvlink4 or nvlink3?"),
        ("{preset: dgx-h100, inter_link: efa-400gbit, inter_link_gbit_per_device: 100, num_devices: 16}",
         'case.yaml:2:29: cluster.inter_link = "efa-400gbit": ... twice, with inter_link_gbit_per_device; give'),
        ("{device: l40s, devices_per_node: 4, num_nodes: 2, nics_per_node: 4, nic_gbit: 10, "
         "inter_link_gbit_per_node: 20}",
         "case.yaml:2:78: cluster.nic_gbit = 10: is 10 ... inter_link_gbit_per_node is 5; ... 4"),
        ("{device: l40s, devices_per_node: 4, num_nodes: 2, nics_per_node: 4}",
         "case.yaml:2:60: cluster.nics_per_node: ... without ... give nic_gbit"),
        ("{preset: dgx-h100, num_nodes: 2, nics_per_node: 4, inter_link: efa-400gbit}",
         'case.yaml:2:61: cluster.inter_link = "efa-400gbit": ... twice, with nics_per_node; give'),
        ("{preset: this-machine, inter_link: efa-400gbit}",
         "case.yaml:2:33: cluster.inter_link: ... this-machine ... remove"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small_machine")
def test_clusters_that_cannot_be(tmp_path: Path, cluster: str, sentence: str) -> None:
    assert says(refusal(tmp_path, f"{MODEL}cluster: {cluster}\n{REST}"), sentence)


def test_a_preset_and_a_config_contradict_each_other(tmp_path: Path) -> None:
    text = "model: {preset: gpt2-124m, hf_config: config.json}\n" + TWO + REST
    with refuses("model.hf_config", rule="cannot go with preset") as error:
        load(tmp_path, text)
    assert [(problem.line, problem.column) for problem in error.value.problems] == [(1, 28)]


def test_a_scenario_made_in_code_is_checked() -> None:
    job = job_of("gpt2-124m", {"pp": 2}, global_batch_size=8)
    assert Scenario(name="code", job=job).job.num_microbatches == 8
    with pytest.raises(NotModelledError, match=r"plan.grad_dtype = bf16: another dtype for gradients"):
        Scenario(name="code", job=job.with_plan(ParallelPlan(dp_replicate=2, grad_dtype="bf16")))
    with refuses("plan", rule="the plan needs 4 devices"):
        Scenario(name="code", job=job.with_plan(ParallelPlan(pp=4)))


def test_software_with_an_option(tmp_path: Path) -> None:
    text = MODEL + TWO + REST
    assert load(tmp_path, text + "software: {preset: torch, compiled: true}").job.software.compiled
    assert load(tmp_path, text + "software: {preset: torch}").job.software == catalog.software("torch")
    for software, said in (
        ("{preset: torch, compiled: 3}", "software.compiled = 3"),
        ("{preset: torch, bucket_bytes: 1}", "software.bucket_bytes = 1: is no option of torch; its options are"),
        ("{preset: maxtext, compiled: true}", "it has no options"),
        ("{preset: torhc}", "torch"),
    ):
        assert said in refusal(tmp_path, f"{text}software: {software}\n")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("{pp: 2, schedule: zb-h1}", 'plan.schedule = "zb-h1": splits backward'),
        ("{dp_replicate: 2, offload_activations: true}", "plan.offload_activations = true: moves tensors"),
    ],
)
def test_compiled_blocks_exclude_other_options(tmp_path: Path, plan: str, said: str) -> None:
    training = "training: {global_batch_size: 24}\nsoftware: {compiled: true}\n"
    assert said.replace('"', "") in refusal(tmp_path, MODEL + TWO + training + f"plan: {plan}\n").replace('"', "")


@pytest.mark.parametrize(
    ("model", "software", "sentence"),
    [
        ("{preset: gpt2-124m}", "{preset: megatron-bridge, expert_overlap: true}",
         "case.yaml:1:37: software.expert_overlap = true: ... gpt ... none; remove"),
        ("{preset: gpt2-124m}", "{preset: megatron-bridge, expert_dispatch: deepep}",
         'case.yaml:1:37: software.expert_dispatch = "deepep": ... gpt ... none; remove'),
        ("{preset: mixtral-8x7b, intermediate_size: 4096}", "megatron-bridge",
         "case.yaml:2:31: model.intermediate_size = 4096: ... num_dense_layers = 0; ... 14,336; use "
         "moe_intermediate_size"),
    ],
)  # fmt: skip
def test_options_that_could_change_nothing_are_refused(
    tmp_path: Path, model: str, software: str, sentence: str
) -> None:
    text = f"software: {software}\nmodel: {model}\n" + TWO + REST
    assert says(refusal(tmp_path, text), sentence)


@pytest.mark.parametrize(
    "model",
    [
        "{preset: mixtral-8x7b, moe_intermediate_size: 4096}",
        "{preset: mixtral-8x7b, intermediate_size: 14336}",
        "{preset: mixtral-8x7b, intermediate_size: 4096, num_dense_layers: 1}",
    ],
)
def test_widths_that_some_layer_has_are_taken(tmp_path: Path, model: str) -> None:
    assert load(tmp_path, f"model: {model}\n" + TWO + REST).job.model.num_experts == 8


@pytest.mark.parametrize("name", ["lomo", "Ademamix", "paged_ademamix_32bit", "soap"])
def test_an_optimizer_that_is_not_modelled_is_no_misspelt_adamw(tmp_path: Path, name: str) -> None:
    text = MODEL + TWO + REST.replace("24}", f"24, optimizer: {name}}}")
    with refuses("training.optimizer", f'"{name}"', rule=", ".join(OPTIMIZERS)) as error:
        load(tmp_path, text)
    assert [(problem.line, problem.column) for problem in error.value.problems] == [(3, 35)]


@pytest.mark.parametrize(("length", "rule"), [("8k", 'seq_len = "8k": must be a whole number'), ("-4", "at least 1")])
def test_a_wrong_length_is_one_problem(tmp_path: Path, length: str, rule: str) -> None:
    """It is the default of the longest sequence, too, which nobody wrote."""
    for preset in ("gpt2-124m", "llama2-7b", "deepseek-v3"):
        refused = refusal(tmp_path, f"model: {{preset: {preset}, seq_len: {length}}}\n" + TWO + REST)
        assert len(refused.splitlines()) == 1
        assert refused.endswith(rule)


def test_a_missing_model_key_has_an_example(tmp_path: Path) -> None:
    """Keys that follow from others are not asked for."""
    text = "model: {family: llama, num_hidden_layers: 4, hidden_size: 64, num_attention_heads: 4}\n"
    example = catalog.model("llama2-7b")
    keys = "intermediate_size", "vocab_size", "seq_len"
    with refuses("model.seq_len", rule="is missing", fix="llama2-7b") as error:
        load(tmp_path, text + TWO + REST)
    assert [problem.field for problem in error.value.problems] == [f"model.{key}" for key in keys]
    for key, problem in zip(keys, error.value.problems, strict=True):
        assert f"add {key}: {getattr(example, key)} " in problem.fix
    with refuses("model.depths", rule="is missing", fix="add depths: [2, 2, 2, 2]"):
        load(tmp_path, "model: {family: resnet}\n" + TWO + REST)


def test_a_missing_family_has_an_example(tmp_path: Path) -> None:
    with refuses("model.family", rule="is missing", fix="add preset: gpt2-124m, or family: gpt") as error:
        load(tmp_path, "model: {num_hidden_layers: 4}\n" + TWO + REST)
    assert len(error.value.problems) == 1


PACKED = """\
model: {preset: gpt2-124m, seq_len: 512, document_lengths: {file: lengths.csv, packing: first_fit_decreasing, seed: 4}}
cluster: {preset: dgx-a100-80gb, num_devices: 2}
training: {global_batch_size: 24, task: sft}
plan: {dp_replicate: 2}
"""


def test_a_file_of_lengths(tmp_path: Path) -> None:
    """Of documents that all are as long, three fill a sequence, and 62 of 512 tokens are padding."""
    (tmp_path / "lengths.csv").write_text("150\n150\n\n 150 \n")
    model = load(tmp_path, PACKED).job.model
    assert model.document_lengths == (150, 150, 150)
    assert model.segments == (150, 150, 150, 62)
    assert model.packs is not None
    assert (model.packs.packing, model.packs.seed) == ("first_fit_decreasing", 4)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no lengths; write one whole number of tokens a line"),
        (b"12\n0\n", 'line 2 holds "0"'),
        (b"-3\n", 'line 1 holds "-3"'),
        (b"length\n12\n", 'line 1 holds "length"'),
        (b"9" * 13, 'line 1 holds "9999999999999"'),
        ("\u0663\n".encode(), "line 1 holds"),
        (b"1\0", "is a binary file"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"1\n" * (2 * 2**20 + 1), "is larger than 4 MiB"),
    ],
)
def test_files_that_hold_no_lengths(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "lengths.csv").write_bytes(content)
    refused = refusal(tmp_path, PACKED)
    assert sentence in refused
    assert "model.document_lengths.file" in refused


SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
START = "model: {preset: llama3-8b}\ncluster: {preset: dgx-h100}\ntraining: {global_batch_size: 16}\n"


@pytest.mark.parametrize("name", ["fsdp", "zb-h1", "mistral", "packed"])
def test_text_says_what_its_file_says(name: str) -> None:
    file = SCENARIOS / f"{name}.yaml"
    parsed = parse_scenario(file.read_text(), name=file.name)
    assert replace(parsed, file=None) == replace(load_scenario(file), file=None)


def test_a_search_as_text(tmp_path: Path) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(f"{START}search: {{tp: [1, 2]}}\n")
    parsed, loaded = parse_search(file.read_text(), "search"), load_search(file)
    assert (parsed.name, parsed.space, parsed.document) == (loaded.name, loaded.space, loaded.document)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: {hf_config: secret.json}", "model.hf_config"),
        ("model: {preset: llama3-8b, document_lengths: {file: secret.csv}}", "model.document_lengths.file"),
        ("plan: {pp: 2, schedule: secret.csv}", "plan.schedule"),
    ],
)
def test_files_are_not_opened(text: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("secret.json", "secret.csv"):
        (tmp_path / name).write_text("secret")
    with pytest.raises(SpecError, match=f"{field} = .*: names a file") as caught:
        parse_scenario(text)
    assert "content" not in str(caught.value)
    assert "does not exist" not in str(caught.value)


def test_problems_have_their_line() -> None:
    with pytest.raises(SpecError, match=r"^asked:4:1: plan = .*needs 4 devices"):
        parse_scenario(f"{START}plan: {{dp_shard: 4}}\n", name="asked")


@pytest.mark.parametrize(
    ("software", "plan", "grad_sync"),
    [
        ("litgpt", "dp_shard: 2", "step"),
        ("litgpt", "dp_shard: 2, grad_sync: microbatch", "microbatch"),
        ("litgpt", "dp_replicate: 2", None),
        ("torch", "dp_shard: 2", None),
    ],
)
def test_reductions_wait_where_the_software_defers_them(
    tmp_path: Path, software: str, plan: str, grad_sync: str | None
) -> None:
    """Shows a default of LitGPT's scripts, which a plan can still contradict."""
    more = f"training: {{global_batch_size: 24, precision: fp32, task: sft}}\nsoftware: {software}\nplan: {{{plan}}}\n"
    assert load(tmp_path, "model: {preset: llama3.2-1b, seq_len: 512}\n" + TWO + more).job.plan.grad_sync == grad_sync
