"""Predictions of one job over ranges of its settings, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from simplan.cost.calibration.format import Calibration
from simplan.errors import Problem, SpecError
from simplan.job import Job
from simplan.predict.step import predict
from simplan.units import GIB

if TYPE_CHECKING:
    import pandas as pd

_MAX_ROWS = 10_000


def sweep(job: Job, settings: Mapping[str, Sequence[Any]], *, calibration: Calibration | None = None) -> pd.DataFrame:
    """Predict a job for every combination of values of some settings.

    Columns: one per setting; ``seq_len``, unless it is a setting; ``step_time_s`` with its 90 % interval
    ``step_time_low_s`` and ``step_time_high_s``;
    ``tokens_per_s_per_device``, ``mfu``, ``device_gib`` (memory that the worst rank wants, perhaps more than its device
    has), ``fits``, ``memory_verdict`` and ``error``. Impossible combinations have the violated rule as ``error``, and
    no numbers. Settings that are not swept keep their values, except that data-parallel ranks take all devices that
    another degree leaves: ``plan.dp_shard`` or ``plan.dp_replicate``, which is a column then.

    Args:
        job: The job.
        settings: Values by setting, as for ``Job.with_changes``: ``{"microbatch_size": [1, 2, 4]}`` or
            ``{"plan.microbatch_size": [1, 2, 4]}``. Several settings that change together are one key, separated by
            spaces, with tuples: ``{"tp dp_shard": [(1, 8), (2, 4)]}``. Columns have these names.
        calibration: As for ``predict``.

    Raises:
        SpecError: There is no such setting, or there are more than 10,000 combinations.
        ImportError: pandas is not installed.
    """
    import pandas as pd

    num_rows = 1
    for values in settings.values():
        num_rows *= len(values)
    if num_rows > _MAX_ROWS:
        rule = f"are more than {_MAX_ROWS:,} combinations"
        raise SpecError(Problem(field="settings", value=f"{num_rows:,}", rule=rule, fix="give fewer values"))
    swept = [name for names in settings for name in names.split()]
    full = {name: job.full_key(name) for name in swept}
    has_sections = any("." in name for name in swept)
    rows = []
    for combination in product(*settings.values()):
        row: dict[str, Any] = {}
        for names, value in zip(settings, combination, strict=True):
            several = names.split()
            row |= dict(zip(several, value if len(several) > 1 else (value,), strict=True))
        changes = {full[name]: value for name, value in row.items()}
        filled = data_parallel_changes(job, changes)
        changes |= filled
        row |= {name if has_sections else name.partition(".")[2]: value for name, value in filled.items()}
        if "model.seq_len" not in changes:
            row["seq_len"] = job.with_changes(changes).model.seq_len
        rows.append(row | _figures(job, changes, calibration))
    return pd.DataFrame(rows)


def data_parallel_changes(job: Job, changes: Mapping[str, Any]) -> dict[str, int]:
    """Degree of data parallelism that fills the devices, if the changes leave too many or too few.

    The degree is that of the shards, or of the replicas for a plan without shards. None if it is among the changes, or
    the devices are no multiple of the others: then the plan is impossible, which a rule says.
    """
    keys = ("plan.dp_shard", "plan.dp_replicate")
    if not {"plan.tp", "plan.pp", "plan.cp", "cluster.num_devices"} & changes.keys() or {*keys} & changes.keys():
        return {}
    try:
        changed = job.with_changes(changes)
    except SpecError:
        return {}
    plan, key = job.plan, keys[job.plan.dp_shard == 1 and job.plan.dp_replicate > 1]
    kept = plan.dp_replicate if key == keys[0] else plan.dp_shard
    others = changed.plan.tp * changed.plan.pp * changed.plan.cp * kept
    devices = changed.cluster.num_devices
    return {key: devices // others} if devices % others == 0 else {}


def _figures(job: Job, changes: Mapping[str, Any], calibration: Calibration | None) -> dict[str, Any]:
    """Columns of one row, in addition to its settings."""
    figures: dict[str, Any] = dict.fromkeys(
        ("step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_device", "mfu", "device_gib", "fits")
    )
    figures["memory_verdict"] = None
    changed = job.with_changes(changes)
    try:
        prediction = predict(changed, calibration=calibration)
    except SpecError as error:
        return figures | {"error": error.sentences}
    low_s, high_s = prediction.step_time_interval_s
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": low_s,
        "step_time_high_s": high_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "device_gib": prediction.worst_memory.device_bytes / GIB,
        "fits": prediction.fits,
        "memory_verdict": prediction.memory_verdict,
        "error": "",
    }
