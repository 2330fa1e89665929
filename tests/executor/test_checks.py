"""Jobs that the executor refuses by name."""

from __future__ import annotations

from typing import Any

import pytest

from executor.checks import check_job
from simplan.errors import NotModelledError


def test_a_stage_on_another_rank_is_refused(make_job: Any) -> None:
    job = make_job("gpipe", pp=2)
    check_job(job)
    with pytest.raises(
        NotModelledError, match=r"^table.0 = stage 1: the executor runs stage s on pipeline rank s only"
    ):
        check_job(job.model_copy(update={"table": job.table[::-1]}))
