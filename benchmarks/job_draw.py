"""Valid jobs of the catalog at random: one for each seed, on 1 to 8,192 devices without contention.

A document of a scenario is drawn, and what a rule refuses is left out of it. Rules refuse rare features most often, so
each seed asks for one feature, and draws until a job has it. The job of a seed stays the same until rules or the
catalog change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeVar, get_args

from simplan import catalog
from simplan.cluster.machine import THIS_MACHINE
from simplan.errors import SpecError
from simplan.model.low_precision import Fp8Recipe
from simplan.model.model import ModelSpec
from simplan.optimizers import OptimizerName
from simplan.plan.plan import Recompute, RecomputeModule
from simplan.plan.schedules import SCHEDULE_FACTS
from simplan.predict import cost_model
from simplan.scenario import Scenario, scenario_from
from simplan.training import Precision
from simplan.wording import divisors

Document = dict[str, Any]
"""Sections of a scenario file."""
T = TypeVar("T")

_MOST_DEVICES = 8192
_MOST_MICROBATCHES = 1024
_MENDINGS, _ATTEMPTS = 12, 100
_MODELS = tuple(dict.fromkeys(catalog.canonical_name("models", name) for name in catalog.names("models")))
_CLUSTERS = tuple(name for name in catalog.names("clusters") if name != THIS_MACHINE)
_SEQUENCE_LENGTHS = tuple(2**power for power in range(9, 18))
_SOFTWARE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "autocast": (True,),
    "compiled": (True, False),
    "compiled_loss": (True, False),
    "channels_last": (True, False),
    "broadcast_buffers": (True, False),
    "cuda_graphs": (True, False),
    "dtensor": (True, False),
    "expert_dispatch": ("copies", "deepep", "hybridep"),
    "expert_overlap": (True, False),
    "flat_shards": (False,),
    "fp8_activation_input": (True,),
    "fp8_dot_product_attention": (True,),
    "fused_experts": (True, False),
    "grad_overlap": (True, False),
    "gradient_as_bucket_view": (True, False),
    "loading": ("none",),
    "loss": ("whole", "chunked"),
    "overlap_param_gather": (True, False),
    "tp_overlap": ("none", "gathers", "all"),
    "vocab_multiple": (1, 128),
    "zero_grad_set_to_none": (True, False),
}


_NEEDED = frozenset({"preset", "device", "num_devices", "global_batch_size", "microbatch_size"})
"""Keys without which there is no job."""
_FEATURES: dict[tuple[str, str], Any] = {
    **{("plan", degree): 1 for degree in ("tp", "cp", "ep", "etp", "pp", "virtual_stages", "dp_replicate")},
    ("plan", "schedule"): "1f1b",
    ("plan", "zero_stage"): 3,
    ("plan", "recompute"): "none",
    ("plan", "recompute_modules"): None,
    ("plan", "recompute_layers"): None,
    ("plan", "microbatch_sizes"): None,
    ("plan", "offload_optimizer"): False,
    ("plan", "offload_activations"): False,
    ("plan", "placement"): None,
    ("plan", "grad_sync"): None,
    ("training", "precision"): "bf16",
    ("training", "optimizer"): "adamw",
    ("training", "task"): "pretrain",
    ("training", "backup_workers"): 0,
    ("training", "pure_bf16"): False,
}
"""Keys with the values that have no feature."""


def random_scenario(seed: int) -> tuple[Document, Scenario]:
    """Document and scenario of a seed."""
    random = Random(seed)
    while True:
        (section, key), usual = random.choice([*_FEATURES.items()])
        draw = _Draw(random, key)
        for _ in range(_ATTEMPTS):
            document, num_microbatches = draw.document()
            scenario = _mended(document, num_microbatches)
            if scenario is not None and document[section].get(key, usual) != usual:
                return document, scenario


def _mended(document: Document, num_microbatches: int) -> Scenario | None:
    """Scenario of the document without the keys that rules refuse; None if one that it needs is refused."""
    for _ in range(_MENDINGS):
        _complete(document, num_microbatches)
        try:
            scenario = scenario_from(document)
            cost_model(scenario.job, None)  # refuses devices without published rates
            return scenario
        except SpecError as error:
            refused = {tuple(problem.field.split(".")[:2]) for problem in error.problems}
        left = [path for path in refused if len(path) == 2 and path[1] in document[path[0]]]
        for section, key in left:
            if key in _NEEDED:
                return None
            del document[section][key]
        if not left:
            return None
    return None


def _complete(document: Document, num_microbatches: int) -> None:
    """Sets the number of devices and the batch to those of the plan."""
    plan = document["plan"]
    degree = {axis: plan.get(axis, 1) for axis in ("tp", "cp", "pp", "dp_replicate", "dp_shard")}
    dp = degree["dp_replicate"] * degree["dp_shard"]
    sizes = plan.get("microbatch_sizes") or [plan["microbatch_size"]] * dp
    document["cluster"]["num_devices"] = math.prod(degree.values())
    document["training"]["global_batch_size"] = num_microbatches * sum(sizes)


class _Draw:
    """Random choices of the parts of a job.

    Args:
        wanted: Key that is drawn in every job where it can be.
    """

    def __init__(self, random: Random, wanted: str) -> None:
        self._random, self._wanted = random, wanted

    def document(self) -> tuple[Document, int]:
        """A document, which rules may refuse, and the number of microbatches."""
        model_section, model = self._model()
        cluster, devices_per_node = self._cluster()
        training = self._training(model_section)
        plan = self._mesh(model, devices_per_node)
        plan |= self._pipeline(model, plan["pp"]) | self._options(model, plan)
        document = {
            "model": model_section,
            "cluster": cluster,
            "training": training,
            "software": self._software(),
            "plan": plan,
        }
        return document, self._log_uniform(1, _MOST_MICROBATCHES)

    def _model(self) -> tuple[Document, ModelSpec]:
        name = self._random.choice(_MODELS)
        model = catalog.model(name)
        section: Document = {"preset": name}
        if model.sample != "image" and self._random.random() < 0.7:
            section["seq_len"] = self._random.choice(_SEQUENCE_LENGTHS)
        return section, model

    def _cluster(self) -> tuple[Document, int]:
        """The section, and the devices of a node."""
        if self._random.random() < 0.8:
            name = self._random.choice(_CLUSTERS)
            return {"preset": name}, catalog.node(name).devices_per_node
        device = self._random.choice(catalog.names("devices"))
        devices_per_node, gbit = self._random.choice((4, 8, 8, 16)), self._random.choice((25, 100, 400))
        links = {"intra_link": "pcie5", "inter_link_gbit_per_device": gbit}
        return {"device": device, "devices_per_node": devices_per_node, **links}, devices_per_node

    def _training(self, model: Document) -> Document:
        training: Document = {
            "precision": self._usually("precision", "bf16", get_args(Precision)),
            "optimizer": self._usually("optimizer", "adamw", get_args(OptimizerName)),
        }
        rare: dict[str, Sequence[Any]] = {
            "pure_bf16": (True,),
            "fp8_recipe": get_args(Fp8Recipe),
            "fused_optimizer": (False,),
            "clip_grad_norm": (1.0,),
            "backup_workers": (1, 2),
        }
        training |= self._some(rare, 0.05)
        if self._has("task", 0.05):
            training["task"], model["lora_rank"] = "lora", self._random.choice((8, 64))
        return training

    def _software(self) -> Document:
        name = self._random.choice(catalog.names("software"))
        options = {str(option): _SOFTWARE_OPTIONS[option] for option in catalog.software(name).options}
        return {"preset": name, **self._some(options, 0.2)}

    def _mesh(self, model: ModelSpec, devices_per_node: int) -> Document:
        """Parallel degrees whose product is any number of devices that fills nodes."""
        max_devices = max(self._log_uniform(1, _MOST_DEVICES) for _ in range(2))
        heads = divisors(model.num_attention_heads or 1)
        tp = self._degree("tp", [degree for degree in heads if degree <= min(max_devices, devices_per_node)])
        cp = self._degree("cp", [degree for degree in (1, 2, 4, 8, 16) if degree * tp <= max_devices])
        pp = self._degree("pp", range(1, min(model.num_blocks, 64, max_devices // (tp * cp)) + 1))
        inner = tp * cp * pp
        dp = self._rounded(max_devices // inner)
        if inner * dp > devices_per_node:
            unit = devices_per_node // math.gcd(devices_per_node, inner)
            dp = max(1, dp // unit) * unit
        dp_shard = self._random.choice((1, dp, dp, self._random.choice(divisors(dp))))
        mesh = {"tp": tp, "cp": cp, "pp": pp, "dp_replicate": dp // dp_shard, "dp_shard": dp_shard}
        experts = [ep for ep in divisors(model.num_experts or 1) if dp * tp * cp % ep == 0]
        return mesh | {"ep": self._degree("ep", experts), "microbatch_size": self._log_uniform(1, 16)}

    def _rounded(self, number: int) -> int:
        """The number, or a smaller one that is a power of two or three times one."""
        power = 2 ** int(math.log2(number))
        return self._random.choice((number, power, power, max(1, 3 * power // 4)))

    def _pipeline(self, model: ModelSpec, pp: int) -> Document:
        if pp == 1:
            return {}
        schedule = self._usually("schedule", "1f1b", tuple(SCHEDULE_FACTS))
        fixed, max_stages = SCHEDULE_FACTS[schedule].virtual_stages, max(2, model.num_blocks // pp)
        stages = self._random.randint(2, max_stages) if fixed is None else fixed
        return {"schedule": schedule, "virtual_stages": stages}

    def _options(self, model: ModelSpec, plan: Document) -> Document:
        """Other keys of a plan."""
        dp = plan["dp_replicate"] * plan["dp_shard"]
        usual: dict[str, Sequence[Any]] = {
            "recompute": get_args(Recompute),
            "zero_stage": (0, 1, 2, 3) if plan["dp_shard"] > 1 else (),
            "sequence_parallel": (True, False) if plan["tp"] > 1 else (),
            "cp_comm": ("ring", "all_gather", "a2a") if plan["cp"] > 1 else (),
        }
        rare: dict[str, Sequence[Any]] = {
            "reshard_after_forward": (False,),
            "grad_sync": ("step", "microbatch"),
            "grad_dtype": ("fp32", "bf16"),
            "bucket_bytes": (2**20, 2**28),
            "offload_optimizer": (True,),
            "offload_activations": (True,),
            "etp": divisors(plan["tp"]) if plan["ep"] > 1 else (),
            "placement": (["tp", "dp_shard", "dp_replicate", "cp", "pp"], ["pp", "tp", "cp", "dp_shard"]),
        }
        options = self._some(usual, 0.7) | self._some(rare, 0.05)
        if self._has("recompute_modules", 0.05):
            modules = self._random.sample(get_args(RecomputeModule), self._random.randint(1, 3))
            options |= {"recompute": "selective", "recompute_modules": modules}
        elif self._has("recompute_layers", 0.05):
            options |= {"recompute": "full", "recompute_layers": self._random.randint(1, model.num_blocks)}
        if 1 < dp <= 64 and self._has("microbatch_sizes", 0.05):
            sizes = [self._random.randint(1, 3) for _ in range(dp)]
            options |= {"microbatch_sizes": sizes, "microbatch_size": max(sizes)}
        return options

    def _has(self, key: str, share: float) -> bool:
        """True with a probability, and for the wanted key."""
        return key == self._wanted or self._random.random() < share

    def _some(self, values: Mapping[str, Sequence[Any]], share: float) -> Document:
        """Each key with a value of its own, with a probability."""
        return {
            key: self._random.choice(choices) for key, choices in values.items() if choices and self._has(key, share)
        }

    def _usually(self, key: str, usual: T, values: Sequence[T]) -> T:
        return self._random.choice(values) if self._has(key, 0.4) else usual

    def _degree(self, key: str, degrees: Sequence[int]) -> int:
        """Any of the degrees, small ones as often as large ones; most often 1."""
        if len(degrees) < 2 or not self._has(key, 0.4):
            return 1
        wanted = self._log_uniform(2, max(degrees))
        return max(degree for degree in degrees if degree <= wanted)

    def _log_uniform(self, low: int, high: int) -> int:
        """An integer whose logarithm is uniform."""
        return min(high, int(math.exp(self._random.uniform(math.log(low), math.log(high + 1)))))
