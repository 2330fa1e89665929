"""Devices of a run: ranks that a launcher starts, by its options, its variables, or the files that it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simplan.interop.configuration import Setting
from simplan.interop.frameworks.hugging_face.keys import whole
from simplan.interop.frameworks.hugging_face.script import arguments_of, options_of
from simplan.interop.frameworks.shell import TrainingCommand, number_or_text

if TYPE_CHECKING:  # a run reads itself by these functions
    from simplan.interop.frameworks.hugging_face.run import TrainerRun


def read_devices(run: TrainerRun) -> None:
    """Read how many ranks the launcher starts, and on how many nodes; ask for what they are."""
    processes = whole(run.accelerate.value("num_processes"))
    machines = whole(run.accelerate.value("num_machines")) or 1
    if run.num_devices is None and (workers := whole(run.trainer.value("ray_num_workers"))):
        run.num_devices, run.devices_key = workers, run.trainer.full("ray_num_workers")
    if run.num_devices is None and (alone := _of_one_process(run)) is not None:
        run.num_devices = run.ranks_per_node = 1
        run.devices_key = run.trainer.full(alone)
    is_single = str(run.accelerate.value("distributed_type", "")).upper() == "NO"
    launchers = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm")
    if is_single and not any(run.accelerate.is_true(launcher) for launcher in launchers):
        # accelerate 1.15, commands/launch.py: simple_launcher starts one process, whatever num_processes is
        run.num_devices = run.ranks_per_node = 1
        run.devices_key = run.accelerate.full("distributed_type")
    if run.num_devices is None and processes:
        run.num_devices, run.devices_key = processes, run.accelerate.full("num_processes")
        if run.num_devices % machines:
            rule = f"is no multiple of the {machines} machines (num_machines)"
            run.reading.contradiction(run.devices_key, rule)
    if run.ranks_per_node is None and run.num_devices is not None and processes:
        run.ranks_per_node = run.num_devices // machines
        if machines > 1:
            setting = run.reading.settings.get(run.devices_key)
            line = None if setting is None else setting.line
            run.reading.ranks_per_node = Setting("num_processes / num_machines", run.ranks_per_node, line)
    if run.num_devices is None and run.num_nodes is not None:
        run.reading.put("cluster.num_nodes", run.num_nodes, run.devices_key)
    if run.num_devices is not None:
        run.reading.put("cluster.num_devices", run.num_devices, run.devices_key)
        run.reading.ask(
            "cluster.preset",
            "cluster.device",
            what="does not say which devices it runs on",
            fix="add --cluster dgx-h100 (`simplan show clusters`)",
        )
    else:
        run.reading.ask(
            "cluster",
            what="does not say which devices it runs on, and how many",
            fix="add --cluster dgx-h100 --num-devices 8",
        )


def _of_one_process(run: TrainerRun) -> str | None:
    """Setting of an optimizer that LLaMA-Factory (hparams/parser.py) and transformers refuse in several processes."""
    layerwise = ("galore_layerwise", "apollo_layerwise")
    keys = [*layerwise, "use_badam"] if run.is_factory and not run.deepspeed else []
    true_key = next((key for key in keys if run.trainer.is_true(key)), None)
    return "optim" if str(run.trainer.value("optim", "")).endswith("_layerwise") else true_key


def of_launcher(launch: TrainingCommand) -> TrainingCommand:
    """The command with arguments after ``--`` as options of its launcher: ``axolotl train run.yaml -- --nnodes=2``."""
    texts = [word.text for word in launch.arguments]
    if "--" not in texts:
        return launch
    at = texts.index("--")
    options = dict(arguments_of(launch.arguments[at + 1 :], launch.files))
    settings = tuple(options[key] for key in ("nnodes", "nproc_per_node") if key in options)
    nodes, ranks = (options[key].value if key in options else None for key in ("nnodes", "nproc_per_node"))
    nodes = 1 if "nnodes" not in options else nodes if isinstance(nodes, int) else None
    ranks = ranks if isinstance(ranks, int) else None
    in_all = None if nodes is None or ranks is None else nodes * ranks
    return replace(
        launch,
        arguments=launch.arguments[:at],
        launcher=settings,
        num_nodes=nodes,
        ranks_per_node=ranks,
        num_devices=in_all,
    )


def included_devices(launch: TrainingCommand) -> tuple[int, str] | None:
    """Devices of DeepSpeed's ``--include localhost:0,1@other:0,1``, and the option."""
    for name, setting in options_of(launch):
        if name == "include" and isinstance(setting.value, str):
            hosts = [host.partition(":")[2] for host in setting.value.split("@")]
            if all(hosts):
                return sum(len(ids.split(",")) for ids in hosts), setting.key
    return None


def devices_of_factory(launch: TrainingCommand) -> tuple[int | None, int | None, str]:
    """Nodes, ranks per node and the variable that says so: ``NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train``."""
    numbers = {}
    for name in ("NNODES", "NPROC_PER_NODE"):
        word = launch.environment.get(name)
        value = None if word is None or word.unknown else number_or_text(word.text)
        numbers[name] = value if isinstance(value, int) and value > 0 else None
    nodes, ranks = numbers["NNODES"], numbers["NPROC_PER_NODE"]
    words = " ".join(f"{name}={value}" for name, value in numbers.items() if value is not None)
    return nodes if nodes is not None or ranks is None else 1, ranks, words
