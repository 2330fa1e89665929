"""Plan of Megatron-LM's arguments: parallelism, stages, recomputation and sharding."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from simplan.interop.frameworks.megatron.arguments import is_above
from simplan.interop.frameworks.megatron.deepspeed import read_deepspeed
from simplan.interop.frameworks.megatron.options import CONTEXT_PARALLEL, DEEPSPEED, DEFAULT, PLAN
from simplan.interop.frameworks.megatron_core import put_modules, read_placement
from simplan.interop.nccl import read_nccl_algo

if TYPE_CHECKING:  # a reading calls these functions
    from simplan.interop.frameworks.megatron.reading import MegatronReading

_MAX_LAYERS = 10_000
_RECOMPUTED = ("core_attn", "mla_up_proj", "layernorm", "moe_act", "mlp", "moe", "shared_experts")
_UNEVEN = (
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that give the first and last stage other numbers of blocks."""


def read_parallelism(reading: MegatronReading) -> None:
    """Put tensor, pipeline, context and expert parallelism."""
    reading.match(PLAN)
    tp = None if reading.is_unsure("--tensor-model-parallel-size") else reading.peek("--tensor-model-parallel-size", 1)
    key, path = "--sequence-parallel", "plan.sequence_parallel"
    if key not in reading and tp != 1 and not reading.is_unsure(key):
        reading.put(path, False, f"without {key}")
    elif key in reading and is_above(tp, 1):
        reading.put(path, True, key)
    elif tp is None:
        reading.value(key)  # the default above one rank
    reading.no_effect(key)  # with one tensor-parallel rank
    if is_above(reading.peek("--context-parallel-size"), 1):
        reading.match([CONTEXT_PARALLEL])
    reading.no_effect("--cp-comm-type")
    read_placement(reading, "--use-tp-pp-dp-mapping")
    read_nccl_algo(reading)
    key, path = "--expert-tensor-parallel-size", "plan.etp"
    if is_above(reading.peek("--num-experts"), 1) and tp != 1 and not reading.copy(path, key):
        if isinstance(tp, int):
            reading.put(path, tp, f"{DEFAULT}, as --tensor-model-parallel-size")
        elif not reading.is_unsure(key):
            what = f"has no {key}, which is then --tensor-model-parallel-size"
            reading.ask(path, what=what, fix="add --set plan.etp=1")
    reading.no_effect(key)


def read_stages(reading: MegatronReading) -> None:
    """Virtual stages, and blocks per stage."""
    layers = reading.peek("--num-layers")
    pp = reading.peek("--pipeline-model-parallel-size", 1)
    layout = "--pipeline-model-parallel-layout"
    if layout in reading and isinstance(pp, int):
        _read_layout(reading, str(reading.value(layout)), pp)
        return
    per_stage, number = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    virtual = 1
    if reading.copy("plan.virtual_stages", number):
        virtual = reading.peek(number)
    elif per_stage in reading and isinstance(layers, int) and isinstance(pp, int) and pp > 1:
        blocks = reading.value(per_stage)
        if not isinstance(blocks, int) or blocks < 1 or layers % (pp * blocks):
            reading.contradiction(per_stage, f"times {pp} pipeline ranks does not divide --num-layers = {layers}")
            return
        virtual = layers // pp // blocks
        if virtual > 1:
            reading.put("plan.virtual_stages", virtual, per_stage)
    reading.no_effect(per_stage)
    if reading.is_unsure("--pipeline-model-parallel-size"):
        _ask_for_stages(reading)
    elif isinstance(layers, int) and isinstance(pp, int) and is_above(virtual, 0) and pp > 1:
        _read_uneven_stages(reading, layers, pp, virtual)


def _ask_for_stages(reading: MegatronReading) -> None:
    keys = [key for key in _UNEVEN if key in reading]
    for key in keys:
        reading.value(key)
    if keys:
        what = f"has {keys[0]}, whose stages depend on --pipeline-model-parallel-size"
        fix = "add --set plan.stage_layers='[2, 3, 3, 2]', blocks of each stage"
        reading.ask("plan.stage_layers", what=what, fix=fix)


def _read_uneven_stages(reading: MegatronReading, layers: int, pp: int, virtual: int) -> None:
    """Other numbers of blocks in the first and last rank (megatron/core/transformer/transformer_block.py)."""
    first, last, embedding, loss = _UNEVEN
    parts, degree = "--pp-partition-method", "--pipeline-model-parallel-size"
    keys = [key for key in _UNEVEN if key in reading]
    with_ends = reading.value(parts) == "type:transformer|embedding"
    if not keys and not with_ends:
        if layers % (pp * virtual):
            what = f"does not divide --num-layers = {layers}, which Megatron-LM refuses; here stages differ by a block"
            reading.not_modeled(degree, what)
        return
    keys = keys or [parts]
    if not reading.can_split(layers, pp * virtual, degree):
        return
    if first in reading or last in reading:
        by_rank: list[int | None] = [None] * pp
        for key, rank in ((first, 0), (last, -1)):
            if key in reading:
                by_rank[rank] = reading.value(key)
        middle = by_rank.count(None)
        rest = layers - sum(blocks for blocks in by_rank if isinstance(blocks, int))
        if rest % middle if middle else rest:
            reading.contradiction(keys[0], f"leaves {rest} blocks for {middle} pipeline ranks", "change it")
            return
        blocks = [rest // middle if number is None else number for number in by_rank]
        stages = [number // virtual for _ in range(virtual) for number in blocks]
    else:
        ends = (embedding in reading or with_ends, loss in reading or with_ends)
        stages = [(layers + sum(ends)) // (pp * virtual)] * (pp * virtual)
        stages[0] -= ends[0]
        stages[-1] -= ends[1]
    for key in keys:
        reading.value(key)
    if sum(stages) != layers:
        reading.contradiction(keys[0], f"does not split {layers} blocks over {pp * virtual} stages evenly", "change it")
        return
    reading.put("plan.stage_layers", stages, keys[0])


def _read_layout(reading: MegatronReading, layout: str, pp: int) -> None:
    """``--pipeline-model-parallel-layout``: E, t, m and L by stage, ``|`` between stages, ``*N`` for N times."""
    key, text = "--pipeline-model-parallel-layout", layout.replace(",", "").replace(" ", "")
    while match := re.search(r"\(([^()]*)\)\*(\d{1,4})|([A-Za-z|])\*(\d{1,4})", text):
        group, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        text = text[: match.start()] + group * int(times) + text[match.end() :]
        if len(text) > _MAX_LAYERS:
            break
    stages = text.split("|")
    wrong = re.sub(r"[EtmL|]", "", text) or not stages[0].startswith("E") or not stages[-1].endswith("L")
    if wrong or len(stages) % pp:
        rule = "is a layout that is not modeled: embedding first, blocks, loss last"
        reading.refuse(key, rule, "give E, t, m and L by stage")
        return
    reading.put("plan.stage_layers", [stage.count("t") for stage in stages], key)
    if len(stages) > pp:
        reading.put("plan.virtual_stages", len(stages) // pp, key)
    if any("m" in stage for stage in stages[:-1]):
        reading.not_modeled(key, "layers for multi-token prediction are predicted on the last stage")


def read_recompute(reading: MegatronReading) -> None:
    """Put recomputation."""
    key = "--recompute-granularity"
    granularity = reading.value(key)
    method = reading.value("--recompute-method", reading.value("--activations-checkpoint-method"))
    numbers = ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
    number_key = next((candidate for candidate in numbers if candidate in reading), numbers[0])
    number = reading.value(number_key, 1)
    if "--recompute-activations" in reading:
        granularity, key = "selective", "--recompute-activations"
    for old_key in ("--checkpoint-activations", "--activations-checkpoint-method"):
        if old_key in reading:
            granularity, key = "full", old_key
    if "--moe-layer-recompute" in reading and granularity != "full":
        reading.put("plan.recompute", "selective", "--moe-layer-recompute")
        reading.put("plan.recompute_modules", ["moe"], "--moe-layer-recompute")
    elif granularity in (None, "none"):
        reading.no_effect(numbers[0], "--recompute-modules", numbers[2])
    elif granularity not in ("full", "selective"):
        reading.refuse(key, "is not modeled yet", "only full or selective is")
    else:
        reading.put("plan.recompute", granularity, key)
        if granularity == "selective":
            _read_recomputed_modules(reading)
        elif method == "block" and isinstance(number, int):
            reading.put("plan.recompute_layers", number, number_key)
        elif is_above(number, 1):
            what = "the input of every block is saved, which takes more memory than one per group"
            reading.not_modeled(number_key, what)


def _read_recomputed_modules(reading: MegatronReading) -> None:
    key = "--recompute-modules"
    if key not in reading:
        return
    listed = reading.value(key)
    modules = [
        str(module) for module in (listed if isinstance(listed, list) else str(listed).replace(",", " ").split())
    ]
    others = [module for module in modules if module not in _RECOMPUTED]
    if others:
        reading.refuse(key, f"has {', '.join(others)}, which is not modeled yet", f"use {', '.join(_RECOMPUTED)}")
    else:
        put_modules(reading, modules, key, _absent_modules(reading))


def _absent_modules(reading: MegatronReading) -> set[str]:
    """Modules that no block of the model has, which Megatron Core's checks let pass."""
    if not is_above(reading.peek("--num-experts"), 1):
        fused = set() if "--multi-latent-attention" in reading else {"layernorm"}  # into the matmul after the norm
        return {"moe", "shared_experts"} | fused
    absent = set() if reading.peek("--moe-shared-expert-intermediate-size") else {"shared_experts"}
    frequency = reading.peek("--moe-layer-freq", 1)
    return absent | ({"mlp"} if frequency == 1 else set())


def setting_of_narrow_gradients(reading: MegatronReading) -> str | None:
    """Argument that leaves gradients in BF16; None for FP32 ones, the default with --bf16.

    Source: Megatron-LM, training/arguments.py: ``accumulate_allreduce_grads_in_fp32`` is set for main gradients of FP32
    only.
    """
    if "--grad-reduce-in-bf16" in reading:
        return "--grad-reduce-in-bf16"
    is_narrow = "--bf16" in reading and reading.peek("--main-grads-dtype") == "bf16"
    return "--main-grads-dtype" if is_narrow else None


def read_sharding(reading: MegatronReading) -> None:
    """Replicas or shards of the optimizer; ``simplan.scenario.source`` fills in their number from the devices."""
    if reading.software == DEEPSPEED:
        read_deepspeed(reading)
        return
    fsdp = next((key for key in ("--use-megatron-fsdp", "--use-custom-fsdp") if key in reading), "")
    strategy = reading.value("--data-parallel-sharding-strategy", "no_shard")
    if fsdp and strategy not in ("no_shard", "optim"):
        rule = f"with {strategy} is Megatron's FSDP, which is not modeled; simplan models FSDP2 of torch"
        reading.refuse(fsdp, rule, "use --data-parallel-sharding-strategy optim, or import it and set software: torch")
        return
    reading.value(fsdp)
    if reading.value("--optimizer") == "dist_muon":  # ranks own whole matrices
        reading.put("plan.zero_stage", 1, "--optimizer")
        return
    key, instances = "--use-distributed-optimizer", "--num-distributed-optimizer-instances"
    if key in reading or (fsdp and strategy == "optim"):
        key = key if key in reading else fsdp
        reading.put("plan.zero_stage", 1, key)
        if not reading.copy("plan.dp_replicate", instances):
            reading.put("plan.dp_replicate", 1, f"with {key}, all data-parallel ranks share optimizer states")
    elif not reading.is_unsure(key):
        reading.put("plan.dp_shard", 1, f"without {key}, data-parallel ranks are replicas")
    bucket = reading.value("--ddp-bucket-size")
    if isinstance(bucket, int) and "--overlap-grad-reduce" in reading:
        width = 4 if setting_of_narrow_gradients(reading) is None else 2
        reading.put("plan.bucket_bytes", bucket * width, "--ddp-bucket-size")
    reading.no_effect("--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap", instances)
