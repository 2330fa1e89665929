"""Conversion of runs of the former schema to scenarios with ``measured``.

Values that the schema or a source leaves open are assumed here, and listed under ``assumed``; settings of the scripts
behind a table have their ``sources``. Features that a profile lacks are added to it, with a sentence under ``notes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from simplan import catalog
from simplan.accuracy.measured import Measured
from simplan.cluster.hardware import DeviceSpec
from simplan.document import Document, merged
from simplan.errors import Problem, SpecError
from simplan.model.families import FAMILIES
from simplan.model.model import MAX_LAYERS
from simplan.plan.schedules import SCHEDULE_FACTS, Placement
from simplan.problems import parse_model
from simplan.scenario.published.former.frameworks import framework_defaults, profile_name, year_of
from simplan.scenario.published.former.recipes import settings_of
from simplan.scenario.published.former.schema import FormerFile, FormerRun
from simplan.software.software import SoftwareSpec, StateBytes

MOVED: Mapping[str, str] = MappingProxyType({
    "task": "training.task",
    "plan.num_microbatches": "training.global_batch_size",
    "plan.global_batch_size": "training.global_batch_size",
    "plan.precision": "training.precision",
    "plan.optimizer": "training.optimizer",
    "plan.fused_optimizer": "training.fused_optimizer",
    "plan.clip_grad_norm": "training.clip_grad_norm",
    "plan.fp8_recipe": "training.fp8_recipe",
    "plan.lora_rank": "model.lora_rank",
    "model.params": "measured.num_parameters",
    "software.framework": "software.preset",
    "software.version": "measured.version",
    "software.flash_attention": "software.layers.attention",
    "software.compile": "software.compiled",
    "software.tp_comm_overlap": "software.tp_overlap",
})  # fmt: skip
"""Former key -> key of the scenario, where they differ; those of ``model.moe`` and ``model.mla`` are in ``model``."""
_MEASURED = {"model_tflops_per_device_published": "model_tflops_per_device", "mfu_published": "mfu"}
_SETS: Mapping[str, str] = MappingProxyType({
    "grad_dtype": "plan.grad_dtype",
    "weights": "software.low_precision.fp8.weights",
    "states": "software.state_bytes",
    "offload_layers": "plan.offload_layers",
    "lora_rank": "model.lora_rank",
    "lora_targets": "model.lora_targets",
    "virtual_stages": "plan.virtual_stages",
    "recompute_modules": "plan.recompute_modules",
    "recompute_layers": "plan.recompute_layers",
    "stage_layers": "plan.stage_layers",
    "mtp_num_layers": "model.mtp_num_layers",
    "expert_dispatch": "software.expert_dispatch",
    "expert_overlap": "software.expert_overlap",
    "fused_experts": "software.fused_experts",
    "fp8_dot_product_attention": "software.fp8_dot_product_attention",
})  # fmt: skip
"""Setting of a recipe -> key of the scenario."""

_NETWORK_GBIT: Mapping[str, float] = MappingProxyType({"tpu-v4": 50, "tpu-v5e": 25, "tpu-v5p": 50, "tpu-v6e": 100})
"""Data-center network of a TPU, Gbit/s (jax-ml/scaling-book, tpus.md: egress per chip)."""
_USUAL_GBIT = 100.0
_PACKED_DOCUMENT_TOKENS = 256  # fine-tuning rows: "the packed samples are much shorter than seq_len"
_NVL72, _TRAY = 72, 4  # devices of an NVLink domain of GB200 and GB300, and of a tray, the unit of allocation
_LORA_RANK = 32  # the default of NeMo and Megatron-Bridge (nemo/collections/llm/peft/lora.py: dim)
_OPTSYNC = "-optsync"
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_SIZES_OF_SOME = (
    "seq_len", "num_decoder_layers", "decoder_seq_len", "image_size", "patch_size", "num_classes", "depths",
    "layer_type", "head_dim",
)  # fmt: skip
_SIZES_OF_EXPERTS = ("num_experts", "top_k", "moe_intermediate_size")
_SWITCHES = (
    "attention_bias", "qkv_bias", "qk_norm", "sliding_window", "sliding_window_pattern", "attention_sinks",
    "router_bias", "expert_bias", "shared_expert_gate",
)  # fmt: skip
_PLAN = {
    "dp_replicate", "dp_shard", "zero_stage", "tp", "sequence_parallel", "cp", "ep", "pp", "microbatch_size",
    "recompute", "grad_dtype",
}  # fmt: skip
_SIXTEEN_BITS = StateBytes(parameter=2, gradient=2, master=4, activation=2, boundary=2).model_dump(mode="json")
"""Widths of Apex's level O2, which patches no function (NVIDIA/apex, docs/source/amp.rst), and of llm.c
(karpathy/llm.c, train_gpt2.cu: floatX is bf16, master weights are fp32)."""
_AUTOMODEL = "automodel"  # NVIDIA-NeMo/Automodel: parallelize_module, FSDP2 and torch's pipelines, not Megatron Core
_CUDNN_FIRST = 2026  # torch 2.9 (October 2025) still prefers FlashAttention 2; see ``rates`` of the profile ``torch``
_TORCH = "torch"  # the profile with the most features
_AS_WIDE: Mapping[str, str] = MappingProxyType({"fp16": "bf16", "bf16": "fp16", "tf32": "fp32"})
"""Precision with the same widths of weights and states."""


def has_former_schema(data: Mapping[str, Any]) -> bool:
    """True for a file whose runs have an ``id``; those of scenarios have a ``name``."""
    runs = data.get("runs")
    return isinstance(runs, list) and any(isinstance(run, dict) and "id" in run for run in runs)


def converted(document: Document, file: str) -> Iterator[tuple[dict[str, Any], SpecError | None]]:
    """Scenarios of the runs of a file; with an error, of ``name`` and ``measured`` alone.

    Raises:
        SpecError: The file violates the former schema.
    """
    read = parse_model(FormerFile, document.data, document.lines, file)
    for run in read.runs:
        conversion = _Conversion(run, *settings_of(run, read.recipes))
        try:
            yield conversion.scenario(), None
        except SpecError as error:
            yield {"name": run.id, "measured": conversion.measured({})}, error


def with_former_keys(error: SpecError) -> SpecError:
    """Copy of an error about a scenario, with the keys of the former schema."""
    former = {moved: key for key, moved in MOVED.items()}
    problems = [replace(problem, field=former.get(problem.field, problem.field)) for problem in error.problems]
    return type(error)(problems, file=error.file)


@dataclass
class _Conversion:
    """Conversion of one run.

    Attributes:
        settings, sources: Settings by the recipes, and the source of each.
        assumed, notes: As in ``measured``.
    """

    run: FormerRun
    settings: dict[str, Any]
    sources: dict[str, str]
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def scenario(self) -> dict[str, Any]:
        """Sections of the scenario.

        Raises:
            SpecError: The batch contradicts the plan, or the catalog has no such device.
        """
        run, plan = self.run, self.run.plan
        batch = plan.num_microbatches * plan.microbatch_size * plan.dp_replicate * plan.dp_shard
        if batch != plan.global_batch_size:
            rule = f"must be num_microbatches x microbatch_size x dp_replicate x dp_shard = {batch}"
            raise SpecError(Problem(field="plan.global_batch_size", value=str(plan.global_batch_size), rule=rule))
        self.assumed += [MOVED.get(key, key.replace("model.moe.", "model.")) for key in run.assumed]
        profile = catalog.software(profile_name(run))
        software = self._software(profile)
        sections = {
            "model": self._model(profile, pads=profile.vocab_multiple > 1 and "fallback_for" not in software),
            "cluster": self._cluster(),
            "training": self._training(profile, software),
            "software": software,
            "plan": self._plan(),
        }
        self._drop_refused_overlap(sections)
        sources = {_SETS[name]: text for name, text in self.sources.items() if _has(sections, _SETS[name].split("."))}
        return {"name": run.id} | sections | {"measured": self.measured(sources)}

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: self.settings[name] for name in names if name in self.settings}

    def _assume(self, key: str) -> None:
        if key not in self.assumed:
            self.assumed.append(key)

    def _software(self, profile: SoftwareSpec) -> dict[str, Any]:
        former, framework = self.run.software, framework_defaults()[self.run.software.framework]
        section: dict[str, Any] = {"preset": profile.id} | framework.software
        if not framework.is_known:
            section["fallback_for"] = former.framework
        section |= self._features_of_others(profile)
        if profile.rates_of is not None and year_of(former) < _CUDNN_FIRST:
            section["rates"] = {"attention_kernel": catalog.software(profile.rates_of).rates.attention_kernel}
        if former.grad_overlap is not None:
            section["grad_overlap"] = former.grad_overlap
        if former.tp_comm_overlap is not None:
            section["tp_overlap"] = "all" if former.tp_comm_overlap else profile.tp_overlap
        if former.compile is not None:
            section["compiled"] = former.compile or profile.compiled
        if former.channels_last:
            section["channels_last"] = True
        version = former.version or ""
        if _AUTOMODEL in version.lower():
            section["dtensor"] = True
        if "Apex O2" in version or former.framework == "llm.c":
            section["state_bytes"] = {"fp16": _SIXTEEN_BITS, "bf16": _SIXTEEN_BITS}
            self.notes.append("weights and all activations in 16 bits, with fp32 master weights")
        if "NVFuser" in version:
            section["compiled"] = True
            self.notes.append("operators that NVFuser fuses: as torch.compile fuses them")
        layers: dict[str, Any] = {}
        if former.flash_attention is not None:
            layers["attention"] = "fused" if former.flash_attention else "unfused"
        if self.run.model.family == "bert" and profile.id == _TORCH:
            layers["dropout"] = ["bert"]
            self.notes.append("dropout, with which every script trains BERT")
        section = merged(section, {"layers": layers}) if layers else section
        return merged(section, self._of_recipes(profile, section))

    def _of_recipes(self, profile: SoftwareSpec, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = self._given("expert_dispatch", "expert_overlap", "fused_experts", "fp8_dot_product_attention")
        if "weights" in self.settings and "fp8" in {**profile.low_precision, **section.get("low_precision", {})}:
            settings["low_precision"] = {"fp8": self._given("weights")}
        for kind in ("state_bytes", "lora_state_bytes") if "states" in self.settings else ():
            if "bf16" in {**getattr(profile, kind), **section.get(kind, {})}:
                settings[kind] = {"bf16": self.settings["states"]}
        return settings

    def _features_of_others(self, profile: SoftwareSpec) -> dict[str, Any]:
        """Features that the plan needs and the profile lacks; with a note for each."""
        plan, section = self.run.plan, dict[str, Any]()
        if plan.zero_stage not in profile.zero_stages and plan.dp_shard * plan.cp > 1:
            section["zero_stages"] = [*profile.zero_stages, plan.zero_stage]
            how = "parameters are gathered and gradients reduced as FSDP2 does"
            if plan.zero_stage == 1:
                section["optimizer_shards"] = "elements"
                how = "equal numbers of elements per rank, as in Megatron's distributed optimizer"
            self.notes.append(f"plan.zero_stage = {plan.zero_stage} with {profile.id}: {how}")
        if plan.sequence_parallel and plan.tp > 1 and not profile.sequence_parallelism:
            section["sequence_parallelism"] = True
            self.notes.append(f"plan.sequence_parallel = true with {profile.id}: as Megatron-LM has it")
        if plan.grad_dtype is not None and plan.grad_dtype not in profile.grad_dtypes and profile.id != _TORCH:
            section["grad_dtypes"] = [*profile.grad_dtypes, plan.grad_dtype]
            self.notes.append(f"plan.grad_dtype = {plan.grad_dtype} with {profile.id}: kept and reduced as others do")
        wide = plan.precision
        if wide in ("fp8", "mxfp8", "nvfp4"):
            if wide not in profile.low_precision:
                low = catalog.software(_TORCH).low_precision[wide].model_dump(mode="json")
                section["low_precision"] = {wide: low | {"eager": False}}
                self.notes.append(f"plan.precision = {wide} with {profile.id}: quantized as torch does")
            wide = "bf16"
        kind = "sharded_state_bytes" if plan.zero_stage in (2, 3) and plan.dp_shard * plan.cp > 1 else "state_bytes"
        known = [getattr(profile, name) for name in (kind, "state_bytes")]
        like = [widths[name] for widths in known for name in (wide, _AS_WIDE.get(wide, wide)) if name in widths]
        if wide not in known[0] and like:
            section[kind] = {wide: like[0].model_dump(mode="json")}
            self.notes.append(f"plan.precision = {wide} with {profile.id}: elements as wide as elsewhere")
        return section

    def _model(self, profile: SoftwareSpec, *, pads: bool) -> dict[str, Any]:
        """Section ``model``; ``pads`` is True if the software pads the vocabulary."""
        run, former = self.run, self.run.model
        family = self._family()
        takes = FAMILIES[family].fields
        sizes = {name: getattr(former, name) for name in (*_SIZES, *_SIZES_OF_SOME) if name in takes}
        fields: dict[str, Any] = {"name": former.name, "family": family} | {k: v for k, v in sizes.items() if v}
        if "vocab_size" in takes:
            tp = 1 if pads else run.plan.tp
            fields["vocab_size"] = -(-former.vocab_size // tp) * tp
            if fields["vocab_size"] != former.vocab_size:
                self.notes.append(
                    f"model.vocab_size = {former.vocab_size}: padded to {fields['vocab_size']}, a multiple of tp"
                )
            if former.tied_embeddings is None:
                self._assume("model.tied_embeddings")
            else:
                fields["tied_embeddings"] = former.tied_embeddings
        if "gated_mlp" in takes:
            fields["gated_mlp"] = former.gated_mlp
        if "num_decoder_layers" in takes and former.num_decoder_layers is None:
            self.assumed += ["model.num_decoder_layers", "model.decoder_seq_len"]
        for part in (former.moe, former.mla):
            fields |= {key: value for key, value in (part or {}).items() if value is not None}
        if former.max_predictions_per_seq is not None:
            fields["max_predictions_per_seq"] = max(1, former.max_predictions_per_seq)
            if not former.max_predictions_per_seq:
                self.notes.append("a small head in place of the vocabulary's: that of one predicted token")
        fields |= self._switches(family)
        if run.plan.lora_rank is not None:
            fields["lora_rank"] = run.plan.lora_rank
        if run.task == "lora":
            if fields.setdefault("lora_rank", self.settings.get("lora_rank")) is None:
                fields["lora_rank"] = _LORA_RANK
                self._assume("model.lora_rank")
            fields |= self._given("lora_targets")
        fields |= self._given("mtp_num_layers")
        if run.task != "pretrain" and profile.packed_attention is not None and "document_lengths" in takes:
            documents = max(1, former.seq_len // _PACKED_DOCUMENT_TOKENS)
            fields["document_lengths"] = [former.seq_len // documents] * documents
            self._assume("model.document_lengths")
        return fields

    def _family(self) -> str:
        """Model family with the same layers."""
        model = self.run.model
        if model.family == "moe":
            return "deepseek" if model.mla is not None else "moe"
        if model.family == "mpt":
            # llm-foundry's benchmark models: learned positions and biases, no ALiBi; their printed sizes say the same
            return "gpt"
        computed = "llama" if model.gated_mlp else "gpt"
        if model.family in ("gpt", "llama", "other") and model.family != computed:
            self.notes.append(f"model.family = {model.family}: computed as {computed}")
            return computed
        return model.family

    def _switches(self, family: str) -> dict[str, Any]:
        """Biases, windows and norms, from the catalog's models of exactly the same sizes, if they agree."""
        model = self.run.model
        sizes = {name: getattr(model, name) for name in (*_SIZES, "vocab_size")}
        if model.moe is not None:
            del sizes["intermediate_size"]
            sizes |= {name: model.moe.get(name) for name in _SIZES_OF_EXPERTS}
        topologies: dict[str, dict[str, Any]] = {}
        for name in catalog.names("models"):
            fields = catalog.model_fields(name)
            if fields["family"] == family and all(fields.get(size) == value for size, value in sizes.items()):
                topologies[name] = {switch: fields[switch] for switch in _SWITCHES if switch in fields}
        first, *others = topologies.values() or [{}]
        if not first or any(other != first for other in others):
            return {}
        said = ", ".join(f"{switch} = {value}" for switch, value in first.items())
        self.notes.append(f"as the catalog's {next(iter(topologies))}, whose sizes it has: {said}")
        return first

    def _cluster(self) -> dict[str, Any]:
        former = self.run.cluster
        device = catalog.device(former.device)
        section: dict[str, Any] = {"device": former.device, "num_devices": former.num_devices}
        if former.matmul_flop_per_s is not None:
            rates = device.matmul_flop_per_s | former.matmul_flop_per_s
            section["device"] = {"preset": former.device, "matmul_flop_per_s": rates}
            self.notes.append("best GEMM rates of its machine, measured by its owners")
        section["devices_per_node"] = self._domain()
        if device.intra_link is None and former.intra_link is not None:
            section["intra_link"] = former.intra_link
        gbit = former.inter_link_gbit_per_device
        if gbit is None and former.num_devices > former.devices_per_node:
            gbit = _network_gbit(device)
            self._assume("cluster.inter_link_gbit_per_device")
        return section if gbit is None else section | {"inter_link_gbit_per_device": gbit}

    def _domain(self) -> int:
        """Devices that a job uses per NVLink domain: equal numbers of full trays, if it needs several NVL72 domains.

        NVIDIA-NeMo/Megatron-Bridge at 067f987, scripts/performance/utils/executors.py (since v0.1.0rc4): ``--segment``
        is the largest number of up to 18 trays that divides those of the job.
        """
        size, number = self.run.cluster.devices_per_node, self.run.cluster.num_devices
        if size != _NVL72 or number <= size or number % _TRAY:
            return size
        domain_size = _TRAY * max(trays for trays in range(1, size // _TRAY + 1) if number // _TRAY % trays == 0)
        if domain_size != size:
            self.notes.append(f"cluster.devices_per_node = {size}: the job takes {domain_size} of each")
        return domain_size

    def _training(self, profile: SoftwareSpec, software: Mapping[str, Any]) -> dict[str, Any]:
        plan = self.run.plan
        fields = plan.model_dump(
            include={"global_batch_size", "precision", "optimizer", "fused_optimizer", "clip_grad_norm"},
            exclude_none=True,
        )
        if self.run.task != "pretrain":
            fields["task"] = self.run.task
        printed = plan.fp8_recipe
        recipes = {**profile.model_dump(mode="json")["low_precision"], **software.get("low_precision", {})}
        if plan.precision == "fp8" and "fp8" in recipes:
            known = recipes["fp8"].get("recipes") or profile.low_precision["fp8"].recipes
            words = ("tensorwise", "rowwise_with_gw_hp", "rowwise")
            recipe = framework_defaults()[self.run.software.framework].fp8_recipe
            if printed:
                recipe = next((word for word in words if word in printed.lower()), words[0])
            if recipe not in known:
                self.notes.append(f"fp8 recipe {recipe}: predicted as {known[0]}, {profile.id} has no such one")
                recipe = known[0]
            fields["fp8_recipe"] = recipe
        elif printed is not None and plan.precision != "fp8":
            self.notes.append(f"plan.fp8_recipe = {printed!r} is not in the prediction")
        return fields

    def _plan(self) -> dict[str, Any]:
        run, former, defaults = self.run, self.run.plan, framework_defaults()[self.run.software.framework]
        schedule = former.schedule.removesuffix(_OPTSYNC)
        facts = SCHEDULE_FACTS.get(schedule)
        virtual_stages = former.virtual_stages
        if facts is not None and facts.virtual_stages is not None:
            virtual_stages = facts.virtual_stages
        fields = self._given("grad_dtype") | former.model_dump(include=_PLAN, exclude_none=True)
        if "offload_layers" in self.settings:
            fields |= {"offload_activations": True} | self._given("offload_layers")
        if self.settings.get("recompute_modules") and former.recompute == "none":
            fields |= {"recompute": "selective"} | self._given("recompute_modules")
        if "recompute_layers" in self.settings and former.recompute == "none":
            fields |= {"recompute": "full"} | self._given("recompute_layers")
        if "virtual_stages" in self.settings and schedule == "1f1b":
            schedule, virtual_stages = "interleaved_1f1b", self.settings["virtual_stages"]
            facts = SCHEDULE_FACTS[schedule]
        fields |= {"schedule": schedule, "virtual_stages": virtual_stages}
        if run.model.moe is not None and former.tp > 1:
            since = defaults.whole_experts_since
            fields["etp"] = former.tp if since is None or year_of(run.software) < since else 1
            self._assume("plan.etp")
        if former.cp > 1:
            fields["cp_comm"] = former.cp_comm or defaults.cp_comm
        can_be_filled = former.pp * virtual_stages <= MAX_LAYERS  # else a rule refuses the plan
        if former.pp > 1 and can_be_filled and run.model.family not in ("t5", "resnet"):  # whose stages are unknown
            by_rank = former.stage_layers or (run.model.num_hidden_layers // former.pp,) * former.pp
            fields["stage_layers"] = layers_of_stages(
                by_rank, virtual_stages, "loop" if facts is None else facts.placement
            )
            if former.stage_layers is None or "plan.stage_layers" in run.assumed:
                fields |= self._given("stage_layers")
        return fields

    def _drop_refused_overlap(self, sections: dict[str, Any]) -> None:
        """Disable ``expert_overlap`` where the framework does not support it for the plan.

        A recipe enables it per model and device. A run with other stages or recomputation cannot have used it.
        """
        plan, software = sections["plan"], sections["software"]
        reasons = {
            "plan.ep = 1": plan["ep"] == 1,
            "plan.virtual_stages = 1": plan["pp"] > 1 and plan["virtual_stages"] == 1,
            f"training.precision = {self.run.plan.precision}": self.run.plan.precision in ("fp32", "tf32"),
            "recomputation of experts": plan["recompute"] == "full" or "moe" in plan.get("recompute_modules", ()),
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if software.get("expert_overlap") and why is not None:
            software["expert_overlap"] = False
            what = "no expert dispatch overlapped with another microbatch"
            self.notes.append(f"{what}: {software['preset']} does not support it with {why}")

    def measured(self, sources: dict[str, str]) -> dict[str, Any]:
        """Section ``measured``."""
        run, defaults = self.run, framework_defaults()[self.run.software.framework]
        fields = {_MEASURED.get(key, key): value for key, value in run.measured.items()}
        fields |= {"source": run.source, "version": run.software.version, "num_parameters": run.model.params}
        printed = fields.pop("peak_memory_gb_as_printed", None)
        if fields.get("peak_allocated_gib") is None and fields.get("peak_reserved_gib") is None:
            unit = "gb" if defaults.prints_gb else "gib"
            fields[f"peak_{'memory' if defaults.prints == 'device' else defaults.prints}_{unit}"] = printed
            fields["memory_kind"] = defaults.prints if printed is None else "allocated"
        if run.plan.schedule.endswith(_OPTSYNC):
            fields["steps_overlap"] = False
        fields |= {"derived_step_time": run.derived_step_time, "quality": run.quality}
        fields |= {"assumed": tuple(dict.fromkeys(self.assumed)), "sources": sources, "notes": tuple(self.notes)}
        usual = {name: field.get_default(call_default_factory=True) for name, field in Measured.model_fields.items()}
        return {key: value for key, value in fields.items() if value != usual.get(key)}


def _has(data: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(data, dict) and path[0] in data and _has(data[path[0]], path[1:]))


def _network_gbit(device: DeviceSpec) -> float:
    """Usual network of a device in Gbit/s: from a catalog cluster with the same device, or with the same links."""
    if device.id in _NETWORK_GBIT:
        return _NETWORK_GBIT[device.id]
    nodes = [catalog.node(name) for name in catalog.names("clusters") if name != "this-machine"]
    same = [node for node in nodes if node.device.id == device.id]
    same = same or [node for node in nodes if node.device.intra_link == device.intra_link]
    link = same[0].inter_link if same else None
    return _USUAL_GBIT if link is None else link.bytes_per_s * 8 / 1e9


def layers_of_stages(by_rank: Sequence[int], virtual_stages: int, placement: Placement = "loop") -> list[int]:
    """Distribute the layers of each rank evenly over its stages.

    A rank with too few layers for equal stages gets fewer in its stage with the embedding or head, which count as
    layers there: the first or the last stage of the pipeline.

    >>> layers_of_stages([3, 4, 4, 3], 2)
    [1, 2, 2, 2, 2, 2, 2, 1]
    >>> layers_of_stages([3, 4], 2, "v")
    [2, 2, 2, 1]
    """
    num_ranks = len(by_rank)
    stages = [0] * (num_ranks * virtual_stages)
    for rank, layers in enumerate(by_rank):
        least, more = divmod(layers, virtual_stages)
        sizes = [least + (turn < more) for turn in range(virtual_stages)]
        if rank == 0 and placement == "loop":
            sizes.reverse()
        for turn, size in enumerate(sizes):
            back = placement == "v" and turn % 2
            place = num_ranks - 1 - rank if back else rank
            stages[turn * num_ranks + place] = size
    return stages
