"""The largest that fits, against trying all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simplan import catalog
from simplan.errors import NoFeasiblePlanError, NotModelledError, SpecError
from simplan.search import SearchSpace, largest, search
from simplan.units import MIB
from tests.search.jobs import small_job

SPACE = SearchSpace(
    tp=(1,),
    recompute=("none",),
    schedule=("1f1b",),
    zero_stage=(3,),
    microbatch_size=(1, 2, 4),
    max_memory_fraction=1.0,
)
ASKED = small_job(num_devices=2, memory_bytes=1320 * MIB, hidden_size=512, vocab_size=8192, seq_len=512)


def fits(**changes: int) -> bool:
    job = replace(ASKED, model=ASKED.model.model_copy(update=changes))
    return search(job, SPACE, explain=False).best is not None


@pytest.mark.slow
def test_the_largest_model() -> None:
    answer = largest(ASKED, SPACE, "num_hidden_layers")
    assert answer.value > 4
    assert [value for value in range(answer.value, answer.value + 12) if fits(num_hidden_layers=value)] == [
        answer.value
    ]
    assert set(answer.fitting) & set(answer.failing) == set()
    assert answer.plan.num_devices == 2


def test_the_longest_sequence() -> None:
    space = SPACE.model_copy(update={"microbatch_size": (1,)})
    answer = largest(ASKED, space, "seq_len")
    assert answer.value % 1024 == 0
    assert answer.value + 1024 in answer.failing
    long = replace(
        ASKED, model=ASKED.model.model_copy(update={"seq_len": answer.value, "max_position_embeddings": 10**6})
    )
    assert search(long, space, explain=False).best is not None


def test_a_document_has_the_fields_raised_with_the_sequence() -> None:
    learned = small_job("gpt", num_devices=2, memory_bytes=1700 * MIB, seq_len=512)
    answer = largest(learned, SPACE.model_copy(update={"microbatch_size": (1,)}), "seq_len")
    assert answer.to_json()["model_fields"] == {"seq_len": answer.value, "max_position_embeddings": answer.value}


def test_the_largest_microbatch() -> None:
    job = replace(ASKED, training=ASKED.training.model_copy(update={"global_batch_size": 64}))
    space = SPACE.model_copy(update={"microbatch_size": None})
    answer = largest(job, space, "microbatch_size")
    wide = search(job, space.model_copy(update={"top": 1000}))
    assert answer.value == max(plan.plan.microbatch_size for plan in wide.ranked) < 64
    assert answer.exact


def test_the_largest_of_both_kinds_of_blocks() -> None:
    space = SPACE.model_copy(update={"microbatch_size": (1,)})
    alone = {
        compiled: largest(ASKED.with_changes({"software.compiled": compiled}), space, "num_hidden_layers").value
        for compiled in (False, True)
    }
    assert alone[False] < alone[True]
    answer = largest(ASKED, space.model_copy(update={"compiled": (False, True)}), "num_hidden_layers")
    assert (answer.value, answer.software) == (alone[True], {"compiled": True})


def test_nothing_fits_or_there_is_no_such_thing() -> None:
    tiny = small_job(num_devices=2, memory_bytes=1000)
    for quantity in ("seq_len", "microbatch_size", "num_hidden_layers"):
        with pytest.raises(NoFeasiblePlanError, match=quantity):
            largest(tiny, SPACE, quantity)
    with pytest.raises(SpecError, match="models of family resnet have no num_hidden_layers"):
        largest(small_job("resnet", precision="fp32"), SearchSpace(), "num_hidden_layers")


def test_only_what_the_software_has() -> None:
    """Megatron Core has neither ZeRO-2 nor ZeRO-3."""
    megatron = replace(small_job(num_devices=2), software=catalog.software("megatron-core"))
    assert largest(megatron, SearchSpace(), "microbatch_size").plan.zero_stage in megatron.software.zero_stages
    with pytest.raises(NotModelledError, match="megatron-core has zero_stage 0 or 1 only"):
        largest(megatron, SPACE, "microbatch_size")
