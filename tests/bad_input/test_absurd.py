"""Numbers and types that no job has: a rule for all fields, and the inputs that once ended in an internal error."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import simplan
from simplan import catalog
from simplan.cluster.topology import Switch
from simplan.errors import Problem, SimplanError, SpecError
from simplan.interop.formats import formats
from simplan.interop.huggingface import model_types
from simplan.plan.plan import ParallelPlan
from simplan.predict import predict
from simplan.scenario.source import read_source
from simplan.training import TrainingSpec
from tests.support.problems import refuses, says
from tests.support.slow import slow_except

_FREE = {"environment", "placement", "zero_stages"}
"""Fields of any values that are not computed with, or whose own check has the bounds."""


def _specs() -> list[type[BaseModel]]:
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(simplan.__path__, "simplan.")
               if not info.name.endswith("__main__")]  # fmt: skip
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return sorted(
        (spec for spec in classes if issubclass(spec, BaseModel) and spec.__module__.startswith("simplan")),
        key=lambda spec: f"{spec.__module__}.{spec.__qualname__}",
    )


def _integers(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas of the whole numbers of a field; constants are none."""
    if schema.get("type") == "integer" and "const" not in schema and "enum" not in schema:
        yield schema
    nested = [schema.get(key) for key in ("items", "additionalProperties")]
    for member in [
        *nested,
        *(part for key in ("anyOf", "oneOf", "allOf", "prefixItems") for part in schema.get(key, ())),
    ]:
        if isinstance(member, dict):
            yield from _integers(member)


def test_every_whole_number_of_a_spec_has_an_upper_bound() -> None:
    unbounded = [
        f"{spec.__module__}.{spec.__qualname__}.{name}"
        for spec in _specs()
        for name, schema in spec.model_json_schema().get("properties", {}).items()
        for number in _integers(schema)
        if name not in _FREE and not number.keys() & {"maximum", "exclusiveMaximum"}
    ]
    assert unbounded == []


def test_a_batch_too_large_to_count_its_bytes_is_refused() -> None:
    cluster = catalog.cluster("dgx-h100", 8)
    job = simplan.Job(
        catalog.model("llama3-8b"),
        cluster,
        TrainingSpec(global_batch_size=10**12),
        ParallelPlan(dp_replicate=8, microbatch_size=10**12 // 8),
        catalog.software("torch"),
    )
    with refuses("plan.microbatch_size", "125,000,000,000", rule="takes more than 4 EiB"):
        predict(job)


@pytest.mark.parametrize("number", [10**12 + 1, 10**30])
def test_a_batch_of_absurd_tokens_is_refused_before_it_is_sought(number: int) -> None:
    with refuses("--global-batch-tokens", rule="must be at most 1,000,000,000,000"):
        read_source(
            "llama3-8b",
            {"cluster.num_devices": 8, "global_batch_tokens": number},
            {"global_batch_tokens": "--global-batch-tokens"},
        )


@pytest.mark.parametrize("number", ["9" * 41, "9" * 5000, "0x" + "f" * 5000], ids=["41", "5000", "hexadecimal"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scenario.yaml", "model: {{preset: gpt2-124m, seq_len: {0}}}\n"),
        ("config.toml", '[model]\nname = "llama3"\n[training]\nsteps = 10\nseq_len = {0}\n'),
        ("config.toml", '[model]\nname = "llama3"\n[training]\nsteps = 10\nseq_len = [1, [{{a = {0}}}]]\n'),
        ("config.json", '{{"model_type": "llama", "hidden_size": {0}}}'),
        ("ds_config.json", '{{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": {0}{0}}}'),
        ("lab/config_registry.py", "def mine():\n    config = llama3_8b()\n    config.a.b = {0}\n    return config\n"),
    ],
)
def test_a_number_of_many_digits_is_refused(name: str, text: str, number: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.format(number))
    if file.suffix == ".py":
        file = tmp_path / "launch.sh"
        file.write_text("torchrun --nproc_per_node 8 -m torchtitan.train --module lab --config mine\n")
    with pytest.raises(SpecError, match=r"digits|absurd number"):
        read_source(str(file), {"cluster.num_devices": 8}, {}).scenario()


def test_a_network_of_one_device_has_no_load() -> None:
    cluster = catalog.cluster("dgx-h100", 1).with_changes(topology=Switch(kind="switch"))
    job = simplan.Job(
        catalog.model("gpt2-124m"),
        cluster,
        TrainingSpec(global_batch_size=1),
        ParallelPlan(),
        catalog.software("torch"),
    )
    network = predict(job).network
    assert network is not None
    assert network.links == ()


WRONG_TYPES: tuple[Any, ...] = ([], ["llama"], {"a": 1}, True, 1, 1.5, 10**400, -1, "", "\x1b", None, [[1]])


@pytest.mark.parametrize("value", slow_except([["llama"], 1.5, None], WRONG_TYPES))
def test_a_wrong_type_of_any_key_of_a_config_is_a_sentence(value: object, tmp_path: Path) -> None:
    """One key at a time is damaged, in every model type; where the value is right, the model is read."""
    for name, kind in model_types().items():
        valid: dict[str, Any] = {"model_type": name, "max_position_embeddings": 128}
        for key in (*kind.keys.values(), *kind.neutral, "model_type", "max_position_embeddings", "layer_types"):
            config = json.loads(json.dumps(valid))
            holder = config
            *outer, last = key.split(".")
            for part in outer:
                holder = holder.setdefault(part, {})
            holder[last] = value
            (tmp_path / "config.json").write_text(json.dumps(config))
            with suppress(SimplanError):
                read_source(str(tmp_path), {"cluster.num_devices": 8}, {}).scenario()


@pytest.mark.parametrize("target", [name for name, target in formats().items() if target.export is not None])
def test_every_kind_of_model_is_exported_or_refused(target: str) -> None:
    """One model of each family of the catalog."""
    write = formats()[target].export
    assert write is not None
    models = {catalog.model_fields(name)["family"]: name for name in catalog.names("models")}
    for name in models.values():
        scenario = read_source(name, {"cluster.num_devices": 8, "training.global_batch_size": 8}, {}).scenario()
        with suppress(SimplanError):
            write(scenario.job, scenario.name)


def test_many_problems_of_one_cause_are_one_line() -> None:
    """One mistake in an included file was told 35 times, in more than 20,000 characters."""
    alike = [
        Problem(field=f"model.key_{n}", rule="is not a known key", fix="known: " + "name, " * 100) for n in range(35)
    ]
    other = Problem(field="plan.pp", value="5", rule="must divide num_hidden_layers = 12", fix="use 4 or 6", line=3)
    text = str(SpecError([*alike, other], file="a.yaml"))
    first, last = text.splitlines()
    assert first.startswith("a.yaml: model.key_0: is not a known key; known: ")
    assert says(first, "34", *(f"model.key_{n}, " for n in range(1, 7)), "...")
    assert "model.key_7" not in first
    assert last == f"a.yaml:3: {other.sentence()}"
    assert len(SpecError(alike).problems) == 35


def test_a_line_of_an_error_is_short_whatever_names_a_file_has(tmp_path: Path) -> None:
    """A script that named a model of a million letters was refused in as many."""
    script = tmp_path / "start.sh"
    script.write_text(f"torchrun --nproc_per_node 8 train.py --model_name_or_path ./{'x' * 10**6} --output_dir o\n")
    with pytest.raises(SpecError) as error:
        read_source(str(script), {"cluster.num_devices": 8}, {}).scenario()
    assert len(str(error.value)) < 5000
