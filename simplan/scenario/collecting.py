"""Reads sections of a scenario file and collects their problems, so that one error reports all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

from simplan.document import Document
from simplan.errors import NotModelledError, Problem, SpecError
from simplan.goodput.sections import SECTIONS
from simplan.model.model import ModelSpec
from simplan.plan.plan import ParallelPlan
from simplan.problems import MISSING, Path, find_place, in_file_order, render_value, validate
from simplan.training import TrainingSection
from simplan.unmodeled import unmodeled

_Model = TypeVar("_Model", bound=BaseModel)
_Found = TypeVar("_Found")
_MAX_NAME = 1000


class Sections:
    """Reads sections of one document and collects their problems."""

    def __init__(self, document: Document, file: str) -> None:
        self.file = file
        self._lines = document.lines
        self._searches = isinstance(document.data, dict) and "search" in document.data
        self._problems: list[Problem] = []
        self._all_unmodelled = True
        self._moved: tuple[Path, Path] = ((), ())

    @contextmanager
    def moved(self, section: Path, path: Path) -> Iterator[None]:
        """While it lasts, a section is read and its problems are reported at another path of the file."""
        self._moved = section, path
        try:
            yield
        finally:
            self._moved = (), ()

    def _path(self, path: Path) -> Path:
        section, there = self._moved
        return there + path[len(section) :] if section and path[: len(section)] == section else path

    def read(
        self, model: type[_Model], data: Any, path: Path, examples: Mapping[str, str] | None = None
    ) -> _Model | None:
        """Data as a spec; None, after recording the problems, when the data is invalid.

        Args:
            model: The spec.
            data: The section.
            path: Keys of the section in the file.
            examples: For each required key, what to add if it is missing. Other missing keys follow from these, and are
                no problems of their own. None for no examples.
        """
        is_section = len(path) <= 1
        elsewhere = where_keys_belong(str(path[0]) if path else "", searches=self._searches) if is_section else {}
        there = self._path(path)
        if there != path:  # keys of a group of nodes are written without the section in front
            elsewhere = {key: text.removeprefix(f"{path[0]}.") for key, text in elsewhere.items()}
        path = there
        result, problems = validate(model, data, self._lines, prefix=path, elsewhere=elsewhere)
        if examples is not None:
            problems = tuple(_with_examples(problems, examples, path)) or problems
        left = _without_consequences(problems, data, path) if isinstance(data, dict) else problems
        named = [_named_unmodeled(problem, data) for problem in left]
        self._keep([problem for problem in named if problem not in left], modelled=False)
        self._keep([problem for problem in named if problem in left], modelled=True)
        return result

    @property
    def num_problems(self) -> int:
        """Number of problems recorded so far."""
        return len(self._problems)

    def refuse(self, path: Path, rule: str, *, value: Any = None, fix: str = "") -> None:
        """Records one problem."""
        path = self._path(path)
        shown = None if value is None else render_value(value)
        problem = Problem(field=_dotted(path), value=shown, rule=rule, fix=fix).at(*find_place(self._lines, path))
        self._keep([problem], modelled=True)

    def look_up(self, path: Path, find: Callable[[Any], _Found], name: Any) -> _Found | None:
        """``find(name)``; None, after recording its problems under ``path``, when it raises."""
        if not isinstance(name, str) or len(name) > _MAX_NAME:
            self.refuse(path, "must be a name", value=name, fix="write one word")
            return None
        try:
            return find(name)
        except SpecError as error:
            self.keep(error, path)
            return None

    def keep(self, error: SpecError, path: Path) -> None:
        """Records the problems of an error as problems of the field at ``path``."""
        path = self._path(path)
        field, place = _dotted(path), find_place(self._lines, path)
        problems = [replace(problem, field=field).at(*place) for problem in error.problems]
        self._keep(problems, modelled=not isinstance(error, NotModelledError))

    def is_mapping(self, data: Any, path: Path, example: str) -> bool:
        """True for a mapping; else records a problem, whose fix takes a word for a catalog name."""
        if not isinstance(data, dict):
            preset = data if isinstance(data, str) and data.strip() and len(data) < 40 else example
            self.refuse(path, "must be a mapping (key: value)", value=data, fix=f"write {{preset: {preset}}}")
        return isinstance(data, dict)

    def in_file(self, error: SpecError) -> SpecError:
        """Copy of an error about fields of the file, with their lines, in the order of the file."""
        placed = (problem.at(*find_place(self._lines, _keys(problem.field))) for problem in error.problems)
        return type(error)(sorted(placed, key=in_file_order), file=self.file)

    def raise_problems(self) -> None:
        """Raises the recorded problems, in the order of the file.

        Raises:
            SpecError: There were problems; a NotModelledError when all are options that are not modeled yet.
        """
        if self._problems:
            ordered = sorted(dict.fromkeys(self._problems), key=in_file_order)
            raise (NotModelledError if self._all_unmodelled else SpecError)(ordered, file=self.file)

    def _keep(self, problems: tuple[Problem, ...] | list[Problem], *, modelled: bool) -> None:
        self._problems.extend(problems)
        if problems and modelled:
            self._all_unmodelled = False


def _keys(field: str) -> Path:
    """Path of a field with dots, in which numbers are places in a list."""
    return tuple(int(key) if key.isdecimal() else key for key in field.split("."))


def _named_unmodeled(problem: Problem, data: Any) -> Problem:
    """The problem, in the words of the technique if its unknown key or value names one that is not modeled yet.

    Args:
        data: The section, with the value of an unknown key: ``sync: local_sgd``.
    """
    if not problem.rule.startswith("is not a known"):
        return problem
    word = problem.field.rpartition(".")[2] if problem.value is None else problem.value.strip('"')
    record = unmodeled(word)
    if record is None and problem.value is None and isinstance(data, dict):
        record = unmodeled(str(data.get(word)))
    return problem if record is None else replace(problem, rule=f"{record.what} not modeled yet", fix=record.fix)


def _with_examples(problems: Sequence[Problem], examples: Mapping[str, str], path: Path) -> Iterator[Problem]:
    for problem in problems:
        key = problem.field.removeprefix(f"{_dotted(path)}.")
        if problem.rule != MISSING:
            yield problem
        elif key in examples:
            yield replace(problem, fix=f"add {examples[key]}")


def _without_consequences(problems: Sequence[Problem], data: dict[str, Any], path: Path) -> list[Problem]:
    """Problems without those of derived fields, if a field that the file contains has a problem itself."""

    def key(problem: Problem) -> str:
        return problem.field.removeprefix(f"{_dotted(path)}.").partition(".")[0]

    written = [problem for problem in problems if problem.value is None or key(problem) in data]
    return written if any(problem.value is not None for problem in written) else list(problems)


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


_SECTIONS: dict[str, type[BaseModel]] = {
    **SECTIONS,
    "model": ModelSpec,
    "training": TrainingSection,
    "plan": ParallelPlan,
}
"""Sections by their key; a key of several belongs to the last of these."""

_OTHER_WORDS = {
    "plan.microbatch_size": "micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size device_train_microbatch_size mbs",
    "training.global_batch_size": "batch_size train_batch_size global_train_batch_size global_batch gbs",
    "training.global_batch_size, from which it follows": "gradient_accumulation_steps num_microbatches",
    "training.precision": "dtype mixed_precision bf16 fp16 fp8",
    "plan.dp_replicate": "dp ddp dp_size data_parallel data_parallel_size data_parallel_replicate_degree",
    "plan.dp_shard": "fsdp fsdp_size data_parallel_shard_degree",
    "plan.zero_stage": "zero zero_optimization",
    "plan.tp": "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "plan.pp": "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "plan.cp": "cp_size context_parallel context_parallel_size context_parallel_degree",
    "plan.ep": "ep_size expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "plan.etp": "expert_tensor_parallel_size expert_tensor_parallel_degree",
    "plan.collectives": "nccl_algo collective_algorithms all_reduce_algorithm",
    "plan.collectives, with all_reduce: parameter_server": "parameter_server parameter_servers num_ps",
    "plan.compression": "gradient_compression grad_compression comm_hook ddp_comm_hook",
    "plan.replication": "replication_kind async async_sgd asynchronous asynchronous_sgd outer_optimizer",
    "plan.replication, with kind: local_sgd": "local_sgd localsgd post_local_sgd local_steps sync_every fedavg",
    "plan.replication, with kind: diloco": "diloco outer_steps",
    "plan.replication, with kind: streaming_diloco": "streaming_diloco",
    "plan.replication, with kind: hogwild": "hogwild",
    "plan.replication, with kind: parameter_server and staleness": "staleness max_staleness stale_gradients "
    "async_parameter_server asynchronous_parameter_server async_ps ssp",
    "plan.compression, with kind: powersgd": "powersgd power_sgd",
    "plan.compression, with kind: top_k": "topk_compression top_k_compression",
    "plan.compression, with kind: one_bit_adam": "onebit_adam 1bit_adam one_bit_adam onebitadam",
    "plan.virtual_stages": "virtual_pipeline_model_parallel_size num_virtual_stages vpp",
    "software.compiled": "compiled compile torch_compile use_torch_compile",
    "plan.recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute_granularity",
    "model.seq_len": "sequence_length max_seq_len max_length context_length seq_length",
    "model.num_hidden_layers": "num_layers n_layer n_layers",
    "model.hidden_size": "d_model n_embd dim",
    "model.num_attention_heads": "num_heads n_head n_heads",
    "model.num_key_value_heads": "num_query_groups n_kv_heads num_kv_heads",
    "model.intermediate_size": "ffn_hidden_size d_ff",
    "model.num_experts": "num_local_experts n_routed_experts",
    "model.top_k": "num_experts_per_tok moe_router_topk",
    "model.mtp_num_layers": "num_nextn_predict_layers",
    "cluster.num_devices": "num_gpus n_gpus ngpus gpus world_size",
    "cluster.num_nodes": "nnodes node_count count",
    "cluster.devices_per_node": "gpus_per_node num_gpus_per_node nproc_per_node",
    "cluster.device": "gpu gpu_type accelerator",
    "cluster.nics_per_node": "num_nics nics",
    "cluster.nic_gbit": "network_gbit nic_gbps",
    "cluster.topology": "network network_topology fabric",
    "cluster.stragglers": "straggler slow_rank slow_ranks slow_node slow_nodes",
    "training.backup_workers": "backup_worker num_backup_workers backup_replicas drop_slowest replicas_to_aggregate",
    "run.num_steps": "max_steps train_iters train_steps training_steps num_iterations",
    "reliability.device_mtbf_h": "failures failure failure_rate mtbf mtbf_h mtbf_hours mtbf_s mttf mttf_h gpu_mtbf_h",
    "reliability.node_mtbf_h": "node_failures node_mttf_h",
    "checkpoint.interval_s": "checkpoint_every_s save_interval_s",
    "checkpoint.blocking_s": "checkpoint_s",
    "checkpoint.interval_steps": "save_interval save_steps checkpoint_every checkpoint_interval",
    "recovery.restart_s": "restart_time_s restart_time",
    "recovery.spares": "hot_spares spare_nodes num_spares",
    "spot.preemptions_per_h": "preemption preemptions preemptible preemption_rate spot_instances",
    "price.device_hour": "gpu_hour price_per_hour price_per_gpu_hour",
    "cluster.device: {preset: ..., memory_bytes: ...}": "memory memory_bytes memory_gb memory_gib gpu_memory",
}
"""Keys of Megatron-LM, torchtitan, DeepSpeed, Hugging Face and others, by the equivalent key of simplan."""

IN_SAVED_PLAN = "in the scenario that --save-plan writes, as a search does not vary it"
"""Place of a key of the plan that no search varies."""


@cache
def where_keys_belong(section: str, *, searches: bool) -> dict[str, str]:
    """For a section, unknown key -> key to write instead, e.g. ``model.seq_len`` for ``seq_len``.

    Args:
        section: Section that contains the key; empty for the top level of the file.
        searches: True for a file with ``search`` instead of ``plan``.
    """
    places = {word: place for place, words in _OTHER_WORDS.items() for word in words.split()}
    for other, spec in _SECTIONS.items():
        places |= {key: f"{other}.{key}" for key in spec.model_fields if other != section}
    if searches:
        from simplan.search.space import SearchSpace

        in_search = SearchSpace.model_fields.keys()
        moved = {key: place.partition(".") for key, place in places.items() if place.startswith("plan.")}
        places |= {
            key: f"search.{name}" if name in in_search else f"{section}.{name} {IN_SAVED_PLAN}"
            for key, (section, _, name) in moved.items()
        }
    return places
