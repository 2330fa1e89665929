"""What is dropped on a page is data: it is limited, checked and told about in sentences; and what may start a run."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app import uploads
from app.figures.validation import MeasuredResult, predict_published, result_of_files, terms_figure
from app.fitting import document_text
from app.jobs.job import Update
from app.jobs.run import ServerRuns, may_run
from app.state import USUAL
from simplan.cli.dashboard import RUN_FLAG
from simplan.errors import SpecError
from simplan.interop.formats import formats
from simplan.predict import predict
from simplan.predict.step_summary import summarize_step
from simplan.scenario import load_scenario, parse_scenario, scenario_from
from simplan.scenario.names import model_named
from simplan.validate.logged_run import LoggedRun
from tests.accuracy.runs import run_data
from tests.app.figures.drawn import checked
from tests.app.views.pages import SMALL, assert_no_bug, opened
from tests.interop.public import cases, written
from tests.support.problems import says
from tests.validate.measuring import measure

ROOT = Path(__file__).resolve().parents[2]


@cache
def made() -> tuple[bytes, bytes]:
    scenario = load_scenario(ROOT / "scenarios" / "1f1b.yaml")
    prediction = predict(scenario.job, name=scenario.name)
    return json.dumps(prediction.to_json()).encode(), measure(prediction, 1.1).model_dump_json().encode()


def test_a_prediction_and_its_measurement_are_compared() -> None:
    files = made()
    result = result_of_files(uploads.prediction_of("p.json", files[0]), uploads.measured_of("m.json", files[1]))
    assert isinstance(result, MeasuredResult)
    comparison = result.comparison
    assert comparison.rows[0].signed_error == pytest.approx(1 / 1.1 - 1)
    terms = checked(terms_figure(comparison.rows))
    errors = [row.signed_error for row in comparison.rows if row.signed_error is not None]
    assert list(terms.data[1].x) == pytest.approx([100 * error for error in errors])
    ranks = {rank["rank"] for rank in json.loads(files[1])["ranks"]}
    assert all(f"rank {rank} predicted" in result.svg for rank in ranks)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"{}", "schema_version"),
        (b'{"schema_version": 2, "kind": "campaign"}', "must be .prediction"),
    ],
)
def test_a_broken_prediction_is_a_sentence(content: bytes, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        uploads.prediction_of("p.json", content)


def test_a_large_file_is_refused_unread() -> None:
    with pytest.raises(SpecError, match="is larger than 32 MiB"):
        uploads.measured_of("m.json", b" " * (uploads.MAX_BYTES + 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs: !!python/object/apply:os.system ['touch /tmp/simplan-was-here']", "is not allowed"),
        ("a: &a [1]\nb: [*a, *a]\n", "runs"),
        ("runs: [{id: x}]", "is missing"),
    ],
)
def test_published_runs_are_read_as_data(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        uploads.published_of("runs.yaml", text.encode())
    assert not Path("/tmp/simplan-was-here").exists()


KEYS = ("inputs", "stage_boundaries", "table", "step_time_s", "step_time_interval_s", "ranks", "timeline", "splits")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KEYS), st.sampled_from(["null", "7", '"x"', "[]", "{}", "[{}]", "[[]]", "drop"]))
def test_no_damaged_prediction_is_a_bug(key: str, damage: str) -> None:
    document = json.loads(made()[0])
    document.pop(key, None)
    if damage != "drop":
        document[key] = json.loads(damage)
    with suppress(SpecError):  # and nothing else
        prediction = uploads.prediction_of("p.json", json.dumps(document).encode())
        result_of_files(prediction, uploads.measured_of("m.json", made()[1]))


def test_published_runs_are_predicted_with_progress() -> None:
    text = yaml.safe_dump({"meta": {}, "runs": [run_data("one"), run_data("two")]})
    seen: list[Update] = []
    outcomes = predict_published([uploads.published_of("made-up.yaml", text.encode())], seen.append)
    assert [outcome.run.id for outcome in outcomes if outcome.error is not None] == ["one", "two"]
    assert seen[-1].done == seen[-1].total


@pytest.mark.parametrize("flag", [None, "0", "", "yes"])
def test_without_the_flag_nothing_runs(flag: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_FLAG, raising=False)
    if flag is not None:
        monkeypatch.setenv(RUN_FLAG, flag)
    assert not may_run()
    with pytest.raises(SpecError, match="--allow-run"):
        ServerRuns().start("name: x", "x", 5)
    assert list(tmp_path.iterdir()) == []


def test_a_run_stays_in_the_workspace_and_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_FLAG, "1")
    monkeypatch.setattr("app.jobs.run._WORKSPACE", Path("simplan-out") / "dashboard")
    runs = ServerRuns()
    run = runs.start("nonsense: 1", "../../../etc/passwd", 5)
    assert run.folder.parent == tmp_path / "simplan-out" / "dashboard"
    if run.is_going:
        with pytest.raises(SpecError, match="going on"):
            runs.start("nonsense: 1", "x", 5)
    runs.close()
    assert not run.is_going
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")} == {"simplan-out"}


CONFIG = {
    "model_type": "llama",
    "_name_or_path": "someone/tiny",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def test_a_config_becomes_the_model_that_a_file_of_it_is(tmp_path: Path) -> None:
    fields = uploads.own_model_fields("config.json", json.dumps(CONFIG).encode(), 1024)
    document = {**SMALL, "model": fields}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "scenario.yaml").write_text(
        document_text({**SMALL, "model": {"hf_config": "config.json", "seq_len": 1024}})
    )
    loaded = load_scenario(tmp_path / "scenario.yaml").job.model
    assert parse_scenario(document_text(document)).job.model == loaded.model_copy(update={"name": "someone/tiny"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "this is not JSON"),
        (b'{"model_type": "banana"}', "model_type"),
        (b" " * (3 * 2**20), "larger than 2 MiB"),
        (b"\x89PNG\r\n\x1a\n\xff", "config.json: is not UTF-8 text; drop the config.json of a Hugging Face model"),
    ],
)
def test_other_files_are_refused_in_a_sentence(content: bytes, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        uploads.own_model_fields("config.json", content, 1024)


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_refused(content: bytes) -> None:
    for read in (partial(uploads.own_model_fields, seq_len=1024), uploads.checked_scenario_data):
        with suppress(SpecError):
            assert isinstance(read("file", content), dict)


def test_own_yaml_is_applied_and_what_is_wrong_is_said_by_line() -> None:
    page = opened()
    page.button(key="form edit").click().run()
    text = document_text({**SMALL, "name": "mine", "training": {"global_batch_size": 32}})

    def apply(text: str) -> None:
        page.text_area(key="form text").set_value(text)
        page.button(key="form apply").click().run()
        assert_no_bug(page)

    apply("model: [")
    assert "this is not YAML" in page.warning[0].value
    apply("!!python/object/apply:os.system ['true']")
    assert page.warning
    apply(text.replace("pp: 2", "pp: 3"))
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "pp: 2" in line)
    assert f"line {line}: " in page.warning[0].value.replace("\\", "")
    apply(text)
    assert not page.warning
    assert page.query_params["training.global_batch_size"] in ("32", ["32"])


TORCHTITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
"""


def test_a_configuration_takes_from_the_session_what_it_does_not_say() -> None:
    current = {
        "model": {"preset": "gpt2-1.5b"},
        "cluster": {"preset": "dgx-a100-80gb", "num_nodes": 2},
        "training": {"global_batch_size": 5},
    }
    text, notes = uploads.as_scenario("train.toml", TORCHTITAN.encode(), current)
    job = parse_scenario(text).job
    assert (job.model.name, job.model.seq_len, job.cluster.id) == ("llama3-8b", 4096, "dgx-a100-80gb")
    assert (job.plan.tp, job.plan.dp_shard, job.training.global_batch_size) == (2, 8, 16)
    assert says(notes[0], "sidebar: cluster.preset, cluster.num_nodes")
    assert "tensor_parallel_degree = 2 (line 8)" in text
    whole = yaml.safe_dump(SMALL)
    assert uploads.as_scenario("own.yaml", whole.encode(), current) == (whole, ())
    with pytest.raises(SpecError, match="tensor_parallel_degree"):
        uploads.as_scenario("train.toml", TORCHTITAN.replace("degree = 2", "degree = 3").encode(), current)


def test_the_form_shows_a_framework_that_has_options() -> None:
    document = {**SMALL, "software": {"preset": "torchtitan", "compiled": True}}
    page = opened(document=document)
    (shown,) = [box for box in page.selectbox if box.label == "Framework"]
    assert shown.value == "torchtitan"
    shown.set_value("torch").run()
    assert page.query_params["software.preset"] in ("torch", ["torch"])
    assert_no_bug(page)


def test_an_upload_opens_no_file_of_the_server() -> None:
    script = "torchrun train.py --model_name_or_path ./model --deepspeed /etc/passwd --per_device_train_batch_size 1\n"
    with pytest.raises(SpecError) as refusal:
        uploads.as_scenario("train.sh", script.encode(), {"cluster": {"preset": "dgx-h100", "num_nodes": 1}})
    assert "root:" not in refusal.value.text()
    assert "/etc/passwd, which is not next to it" in refusal.value.text()


def cut(text: str) -> st.SearchStrategy[str]:
    """A text with a part left out."""
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))
    return ends.map(lambda pair: text[: min(pair)] + text[max(pair) :])


MEGATRON = (
    "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--global-batch-size 128 --bf16 --tensor-model-parallel-size 4 --use-distributed-optimizer"
)
SCRIPT = f"""cat > train.toml <<EOF
{TORCHTITAN}EOF
torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file train.toml --parallelism.tensor_parallel_degree 4
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 8
  lora_alpha: 16
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset}
optimizer: {_component_: torch.optim.AdamW, fused: true}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
batch_size: 2
gradient_accumulation_steps: 8
device: cuda
enable_activation_checkpointing: true
dtype: bf16
"""
FROM_FILES = ("bridge", "nemo", "accelerate", "trainer", "deepspeed")


@pytest.mark.parametrize("framework", [*FROM_FILES, "megatron", "torchtitan-toml", "torchtitan", "torchtune"])
def test_pasted_text_of_every_reader_is_recognized(framework: str, tmp_path: Path) -> None:
    """By content alone, and read to a valid scenario with the values of the session for what it does not say."""
    texts = {"megatron": MEGATRON, "torchtitan-toml": TORCHTITAN, "torchtitan": SCRIPT, "torchtune": TORCHTUNE}
    texts |= {name: written(cases(name)[0], tmp_path).read_text() for name in FROM_FILES}
    assert {*texts} >= {name for name, file_format in formats().items() if file_format.read is not None} - {"chakra"}
    recognized = uploads.recognized("", texts[framework].encode(), USUAL)
    assert recognized.configuration is not None
    assert recognized.configuration.format.partition("-")[0] == framework.partition("-")[0]
    assert recognized.document is not None
    assert parse_scenario(document_text(recognized.document)).job.cluster.id == "dgx-h100"
    assert any(note.startswith("read from pasted") for note in recognized.notes)
    assert pickle.loads(pickle.dumps(recognized)) == recognized, "it comes from a worker"


def test_pasted_script_is_the_job_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(MEGATRON)
    job = scenario_from(file, {"cluster.preset": "dgx-h100"}).job
    document = uploads.recognized("", MEGATRON.encode(), USUAL).document
    assert document is not None
    read = parse_scenario(document_text(document)).job
    assert (read.plan, read.cluster, read.training, read.software) == (
        job.plan,
        job.cluster,
        job.training,
        job.software,
    )
    assert uploads.recognized("train.sh", MEGATRON.encode(), USUAL).document == {**document, "name": "train"}


@pytest.mark.parametrize(
    ("text", "preset"),
    [("meta-llama/Llama-3.1-8B", "llama3.1-8b"), ("Llama 3 70B", "llama3-70b"), ("gpt2-1.5b\n", "gpt2-1.5b")],
)
def test_pasted_name_is_the_model_that_the_command_line_finds(text: str, preset: str) -> None:
    document = uploads.recognized("", text.encode(), USUAL).document
    assert document is not None
    job = parse_scenario(document_text(document)).job
    assert document["model"] == {"preset": preset} == {"preset": model_named(text.strip())}
    assert job.model.name == preset


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "epoch 1 loss 3.2\nepoch 2 loss 2.9\n",
            '1 ... 3.2":',
        ),
        ("hello", "the name of a model"),
        ("", "it looked for"),
        ("meta-llama/Llama-3.1-9B", "is no model of the catalog; did you mean llama3.1-8b"),
        ("llama3", "may be several models; name one of"),
        ('{"model_type": "banana"}', "is a family that is not modeled yet"),
        ("torchrun --nproc_per_node 8 train.py --foo 3", "starts train.py, whose arguments are of no framework"),
        ("tune run full_finetune", "looks like a file of torchtune"),
        ("model: {preset: gpt2}\nplan: {tp: 3}", "plan.tp"),
    ],
)
def test_pasted_text_that_is_wrong_or_unknown_gets_a_sentence(text: str, said: str) -> None:
    with pytest.raises(SpecError) as refusal:
        uploads.recognized("", text.encode(), USUAL)
    assert says(str(refusal.value), said)


LINE = " iteration {}/ 100 | consumed samples: 128 | elapsed time per iteration (ms): {} | global batch size: 128 |"
LOG = "\n".join([f"+ {MEGATRON}", *(LINE.format(step, time) for step, time in ((10, 2152.2), (20, 2400), (30, 2500)))])


@pytest.mark.parametrize(
    ("text", "file"),
    [("step_times_s: [2.4, 2.5]", "log.yaml"), (json.dumps({"step_time_s": 2.4}), "log.json"), (LOG, "log.txt")],
)
def test_pasted_measurement_leads_to_validate(text: str, file: str) -> None:
    """Also a log that begins with the command of its run, which is a launch script by itself."""
    recognized = uploads.recognized("", text.encode(), USUAL)
    assert recognized.document is None
    measured = uploads.measured_of(recognized.file, text.encode())
    assert measured == uploads.measured_of(file, text.encode())
    assert isinstance(measured, LoggedRun)
    assert measured.has_time


def test_part_of_a_scenario_keeps_the_rest_of_the_session() -> None:
    recognized = uploads.recognized("", b"training: {global_batch_size: 256}", USUAL)
    assert recognized.document is not None
    assert recognized.document == {**USUAL, "training": {"global_batch_size": 256}, "plan": recognized.document["plan"]}
    assert says(recognized.notes[0], "sidebar: model, cluster, software, plan")


@given(st.one_of(st.text(max_size=200), st.sampled_from([MEGATRON, TORCHTITAN, SCRIPT]).flatmap(cut)))
def test_any_pasted_text_is_read_or_refused(text: str) -> None:
    with suppress(SpecError):
        uploads.recognized("", text.encode("utf-8", errors="replace"), USUAL)


def test_pasted_script_is_answered_on_the_page() -> None:
    page = opened("plan")
    page.session_state["details paste"] = True
    page.run()
    page.text_area(key="paste text").set_value(MEGATRON.replace("--micro-batch-size 1", "--micro-batch-size 16"))
    page.button(key="paste read").click().run()
    assert_no_bug(page)
    assert page.error[0].value.startswith("**Does not fit**")
    words = [text.value.replace("\\", "") for text in page.markdown]
    assert any(text.startswith("--micro-batch-size 16 -> ") for text in words), "in the words of the script"
    page.button(key="fix 0").click().run()
    assert_no_bug(page)
    assert page.success[0].value.startswith("**Fits**")
    assert "Changes that make it faster" in [header.value for header in page.subheader]
    before = page.session_state["simplan document"]
    faster = page.button(key="faster 0").click().run()
    assert_no_bug(faster)
    after = page.session_state["simplan document"]
    shorter, longer = (
        summarize_step(parse_scenario(document_text(document)).job).step_time_s for document in (after, before)
    )
    assert shorter < longer


@pytest.mark.parametrize("key", ["paste devices", pytest.param("document:cluster.num_devices", marks=pytest.mark.slow)])
def test_batch_of_a_file_follows_the_devices_that_it_does_not_say(key: str) -> None:
    """Asked above the verdict, and answered there or in the sidebar, the job is the one of torchtitan on 8 devices."""
    page = opened("plan", USUAL)
    page.session_state["details paste"] = True
    page.run()
    page.text_area(key="paste text").set_value(TORCHTITAN)
    page.button(key="paste read").click().run()
    (question,) = [box.value for box in page.warning if "How many devices?" in box.value]
    assert "64 are assumed" in question
    assert "64 in all" in question, "2 sequences of each of 32 data-parallel ranks"
    page.number_input(key=key).set_value(8).run()
    assert_no_bug(page)
    assert not page.warning
    on_8 = {**USUAL, "cluster": {"preset": "dgx-h100", "num_devices": 8}}
    expected = parse_scenario(uploads.as_scenario("pasted", TORCHTITAN.encode(), on_8)[0]).job
    assert (expected.plan.dp, expected.training.global_batch_size) == (4, 8)
    assert parse_scenario(document_text(page.session_state["simplan document"])).job == expected
    page.number_input(key="document:training.global_batch_size").set_value(64).run()
    page.number_input(key="document:cluster.num_devices").set_value(16).run()
    assert page.session_state["simplan document"]["training"]["global_batch_size"] == 64, "it is the user's own"
