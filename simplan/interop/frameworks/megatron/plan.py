"""Plan of Megatron-LM's arguments: parallelism, stages, recomputation and sharding."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from simplan.interop.frameworks.megatron.arguments import is_above
from simplan.interop.frameworks.megatron.options import (
    CONTEXT_PARALLEL,
    DEEPSPEED,
    DEFAULT,
    PLAN,
)
from simplan.interop.frameworks.megatron_core import read_placement
from simplan.interop.nccl import read_nccl_algo

if TYPE_CHECKING:  # the reader calls these functions
    from simplan.interop.frameworks.megatron.reading import MegatronReader

_MAX_LAYERS = 10_000
_RECOMPUTED = {
    "core_attn": "core_attn",
    "mla_up_proj": "mla_up_proj",
    "layernorm": "layernorm",
    "moe_act": "moe_act",
    "mlp": "mlp",
    "moe": "moe",
    "shared_experts": "shared_experts",
}
_UNEVEN = (
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that give the first and last stage other numbers of blocks."""


def read_parallelism(reader: MegatronReader) -> None:
    """Put tensor, pipeline, context and expert parallelism."""
    reading = reader.reading
    reading.match(PLAN)
    tp = None if reader.is_unsure("--tensor-model-parallel-size") else reader.value("--tensor-model-parallel-size", 1)
    if "--sequence-parallel" not in reading and tp != 1 and not reader.is_unsure("--sequence-parallel"):
        reading.put("plan.sequence_parallel", False, "without --sequence-parallel")
    elif "--sequence-parallel" in reading and isinstance(tp, int) and tp > 1:
        reading.put("plan.sequence_parallel", True, "--sequence-parallel")
    reading.no_effect("--sequence-parallel")  # with one tensor-parallel rank
    if is_above(reader.value("--context-parallel-size"), 1):
        reading.match([CONTEXT_PARALLEL])
    reading.no_effect("--cp-comm-type")
    read_placement(reading, "--use-tp-pp-dp-mapping")
    read_nccl_algo(reading)
    own = "--expert-tensor-parallel-size"
    if is_above(reader.value("--num-experts"), 1) and tp != 1:
        if own in reading:
            reading.put("plan.etp", reading.value(own), own)
        elif isinstance(tp, int):
            reading.put("plan.etp", tp, f"{DEFAULT}, as --tensor-model-parallel-size")
        elif not reader.is_unsure(own):
            what = f"has no {own}, which is then --tensor-model-parallel-size"
            reading.ask("plan.etp", what=what, fix="add --set plan.etp=1")
    reading.no_effect("--expert-tensor-parallel-size")


def read_stages(reader: MegatronReader) -> None:
    """Virtual stages, and blocks per stage."""
    reading, layers, pp = (
        reader.reading,
        reader.value("--num-layers"),
        reader.value("--pipeline-model-parallel-size", 1),
    )
    layout = "--pipeline-model-parallel-layout"
    if layout in reading and isinstance(pp, int):
        _read_layout(reader, str(reading.value(layout)), pp)
        return
    per_stage, number = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    virtual = 1
    if number in reading:
        virtual = reading.value(number)
        reading.put("plan.virtual_stages", virtual, number)
    elif per_stage in reading and isinstance(layers, int) and isinstance(pp, int) and pp > 1:
        blocks = reading.value(per_stage)
        if not isinstance(blocks, int) or blocks < 1 or layers % (pp * blocks):
            reading.contradiction(per_stage, f"times {pp} pipeline ranks does not divide --num-layers = {layers}")
            return
        virtual = layers // pp // blocks
        if virtual > 1:
            reading.put("plan.virtual_stages", virtual, per_stage)
    reading.no_effect(per_stage)
    if reader.is_unsure("--pipeline-model-parallel-size"):
        _ask_for_stages(reader)
    elif isinstance(layers, int) and isinstance(pp, int) and is_above(virtual, 0) and pp > 1:
        _read_uneven_stages(reader, layers, pp, virtual)


def _ask_for_stages(reader: MegatronReader) -> None:
    keys = [key for key in _UNEVEN if key in reader.reading]
    for key in keys:
        reader.reading.value(key)
    if keys:
        what = f"has {keys[0]}, whose stages depend on --pipeline-model-parallel-size"
        fix = "add --set plan.stage_layers='[2, 3, 3, 2]', blocks of each stage"
        reader.reading.ask("plan.stage_layers", what=what, fix=fix)


def _read_uneven_stages(reader: MegatronReader, layers: int, pp: int, virtual: int) -> None:
    """Other numbers of blocks in the first and last rank (megatron/core/transformer/transformer_block.py)."""
    reading = reader.reading
    first, last, embedding, loss = _UNEVEN
    parts = "--pp-partition-method"
    keys = [key for key in (first, last, embedding, loss) if key in reading]
    with_ends = reading.value(parts) == "type:transformer|embedding"
    if not keys and not with_ends:
        if layers % (pp * virtual):
            what = f"does not divide --num-layers = {layers}, which Megatron-LM refuses; here stages differ by a block"
            reading.not_modeled("--pipeline-model-parallel-size", what)
        return
    keys = keys or [parts]
    if not reading.can_split(layers, pp * virtual, "--pipeline-model-parallel-size"):
        return
    by_rank: list[int | None] = [None] * pp
    if first in reading or last in reading:
        for key, rank in ((first, 0), (last, -1)):
            if key in reading:
                by_rank[rank] = reading.value(key)
        middle = [rank for rank, blocks in enumerate(by_rank) if blocks is None]
        rest = layers - sum(blocks for blocks in by_rank if isinstance(blocks, int))
        if (not middle and rest) or (middle and rest % len(middle)):
            reading.contradiction(keys[0], f"leaves {rest} blocks for {len(middle)} pipeline ranks", "change it")
            return
        blocks = [rest // len(middle) if each is None else each for each in by_rank]
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


def _read_layout(reader: MegatronReader, layout: str, pp: int) -> None:
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
        reader.reading.refuse(
            key,
            "is a layout that is not modeled: embedding first, blocks, loss last",
            "give E, t, m and L by stage",
        )
        return
    reader.reading.put("plan.stage_layers", [stage.count("t") for stage in stages], key)
    if len(stages) > pp:
        reader.reading.put("plan.virtual_stages", len(stages) // pp, key)
    if any("m" in stage for stage in stages[:-1]):
        reader.reading.not_modeled(key, "layers for multi-token prediction are predicted on the last stage")


def read_recompute(reader: MegatronReader) -> None:
    """Put recomputation."""
    reading = reader.reading
    granularity, key = reading.value("--recompute-granularity"), "--recompute-granularity"
    method = reading.value("--recompute-method", reading.value("--activations-checkpoint-method"))
    number_key = next(
        (
            each
            for each in ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
            if each in reading
        ),
        "--recompute-num-layers",
    )
    number = reading.value(number_key, 1)
    if "--recompute-activations" in reading:
        granularity, key = "selective", "--recompute-activations"
    for each in ("--checkpoint-activations", "--activations-checkpoint-method"):
        if each in reading:
            granularity, key = "full", each
    if "--moe-layer-recompute" in reading and granularity != "full":
        reading.put("plan.recompute", "selective", "--moe-layer-recompute")
        reading.put("plan.recompute_modules", ["moe"], "--moe-layer-recompute")
        return
    if granularity in (None, "none"):
        reading.no_effect(
            "--recompute-method", "--recompute-num-layers", "--recompute-modules", "--checkpoint-num-layers"
        )
        return
    if granularity not in ("full", "selective"):
        reading.refuse(key, "is not modeled yet", "only full or selective is")
        return
    reading.put("plan.recompute", granularity, key)
    if granularity == "selective":
        _read_recomputed_modules(reader)
    elif method == "block" and isinstance(number, int):
        reading.put("plan.recompute_layers", number, number_key)
    elif is_above(number, 1):
        reading.not_modeled(number_key, "the input of every block is saved, which takes more memory than one per group")


def _read_recomputed_modules(reader: MegatronReader) -> None:
    reading, key = reader.reading, "--recompute-modules"
    if key not in reading:
        return
    given = reading.value(key)
    modules = [str(each) for each in (given if isinstance(given, list) else str(given).replace(",", " ").split())]
    others = [each for each in modules if each not in _RECOMPUTED]
    if others:
        reading.refuse(key, f"has {', '.join(others)}, which is not modeled yet", f"use {', '.join(_RECOMPUTED)}")
    elif modules != ["core_attn"]:
        reading.put("plan.recompute_modules", [_RECOMPUTED[each] for each in modules], key)


def read_sharding(reader: MegatronReader) -> None:
    """Replicas or shards of the optimizer; ``simplan.scenario.source`` fills in their number from the devices."""
    reading = reader.reading
    if reader.software == DEEPSPEED:
        _read_zero_stage(reader)
        return
    fsdp = next((key for key in ("--use-megatron-fsdp", "--use-custom-fsdp") if key in reading), "")
    strategy = reading.value("--data-parallel-sharding-strategy", "no_shard")
    if fsdp and strategy not in ("no_shard", "optim"):
        rule = f"with {strategy} is Megatron's FSDP, which is not modeled; simplan models FSDP2 of torch"
        reading.refuse(fsdp, rule, "use --data-parallel-sharding-strategy optim, or import it and set software: torch")
        return
    reading.value(fsdp)
    key = "--use-distributed-optimizer"
    if key in reading or (fsdp and strategy == "optim"):
        key = key if key in reading else fsdp
        reading.put("plan.zero_stage", 1, key)
        replicas = reading.value("--num-distributed-optimizer-instances", 1)
        given = "--num-distributed-optimizer-instances" in reading
        reading.put(
            "plan.dp_replicate",
            replicas,
            "--num-distributed-optimizer-instances"
            if given
            else f"with {key}, all data-parallel ranks share optimizer states",
        )
    elif not reader.is_unsure(key):
        reading.put("plan.dp_shard", 1, f"without {key}, data-parallel ranks are replicas")
    bucket = reading.value("--ddp-bucket-size")
    if isinstance(bucket, int) and "--overlap-grad-reduce" in reading:
        width = 2 if "--grad-reduce-in-bf16" in reading else 4
        reading.put("plan.bucket_bytes", bucket * width, "--ddp-bucket-size")
    reading.no_effect("--ddp-bucket-size")
    reading.no_effect("--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap")
    reading.no_effect("--num-distributed-optimizer-instances", "--data-parallel-sharding-strategy")


def _read_zero_stage(reader: MegatronReader) -> None:
    reading, key = reader.reading, "--zero-stage"
    if key in reading and reading.value(key) == 0 and "--bf16" in reading:
        own = "with --bf16, whose optimizer in DeepSpeed shards its states at --zero-stage 0"
        reading.put("plan.zero_stage", 1, own)
        reading.put("plan.dp_replicate", 1, "BF16_Optimizer shards over all data-parallel ranks")
    elif key in reading:
        stage = reading.value(key)
        reading.put("plan.zero_stage", stage, key)
        path = "plan.dp_replicate" if stage != 0 else "plan.dp_shard"
        reading.put(path, 1, f"with {key} {stage}")
    elif not reader.is_unsure(key):
        what = "has its ZeRO stage in the JSON of --deepspeed_config, which is not read"
        reading.ask("plan.zero_stage", what=what, fix="add --set plan.zero_stage=1")
