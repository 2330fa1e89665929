"""Bytes of optimizer states by tensor and shard: the table against torch's own tensors, and against arithmetic."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import simplan
from executor.train.optimizers import make_optimizer
from simplan.optimizers import OPTIMIZERS, OptimizerName, StoredTensor, Widths, newton_schulz_products
from simplan.prediction import Prediction
from simplan.program.program import MemoryCategory

SHAPES = ((1000, 64), (128, 64), (64,), (96, 100), (300, 200), (4096,), (5000,), (63, 65))
"""Below and from 4,096 elements on, whole blocks of 128 and 256 and others."""
NO_STATES = ("step", "RMS", "qmap1", "qmap2")
BY_TENSOR = [name for name, facts in OPTIMIZERS.items() if facts.by_tensor]


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from leaves(getattr(tensor, name))
    else:
        yield tensor


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of states, without counts of steps, sizes of weights and bitsandbytes' tables, which tensors share."""
    named = [item for state in optimizer.state.values() for item in state.items()]
    tensors = [
        value for key, value in named if isinstance(value, Tensor) and key not in ("step", "RMS", "qmap1", "qmap2")
    ]
    return sum(leaf.nbytes for tensor in tensors for leaf in leaves(tensor))


def test_flat_shards_have_one_tensor_per_unit() -> None:
    """FSDP1: no tensor is below the 4,096 elements from which on bitsandbytes stores bytes, with FP32 per 256."""
    options: dict[str, Any] = {"cluster": "dgx-h100", "num_devices": 8, "zero_stage": 3, "dp_shard": 8, "task": "sft"}
    options |= {"software": "accelerate", "software.flat_shards": True, "optimizer": "adamw_8bit", "precision": "bf16"}
    memory = simplan.predict("llama3-8b", {**options, "global_batch_size": 8, "seq_len": 512}).worst_memory
    assert memory.by_category[MemoryCategory.OPTIMIZER] == pytest.approx(
        2 * 8_030_261_248 / 8 * (1 + 4 / 256), rel=1e-6
    )


def test_the_table_has_every_name() -> None:
    assert tuple(OPTIMIZERS) == get_args(OptimizerName)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BY_TENSOR)
def test_states_are_as_large_as_those_of_the_package(
    name: OptimizerName, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = OPTIMIZERS[name]
    if facts.package in ("adam_mini", "galore_torch", "apollo_torch"):
        pytest.skip("the executor does not run it")
    if facts.package not in ("torch", "simplan") and find_spec(facts.package) is None:
        pytest.skip(f"without {facts.package}")
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paged states on a CPU are plain ones
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # of torchao, which takes long
        optimizer = make_optimizer(name, parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    stored = [StoredTensor(shape, is_matrix=len(shape) == 2, whole_shape=shape) for shape in SHAPES]
    width = dtype.itemsize
    widths = Widths(width, width, width)
    assert held_bytes(optimizer) == sum(facts.state_bytes(tensor, widths) for tensor in stored)
    least = facts.least_state_bytes(widths) * sum(tensor.num_elements for tensor in stored)
    assert least <= held_bytes(optimizer)


def predicted(optimizer: str, **keys: Any) -> Prediction:
    options = {"recompute": "full", "global_batch_size": 8, "cluster": "dgx-h100", **keys}
    return simplan.predict("llama3-8b", {"training.optimizer": optimizer}, **options)


def states_bytes(prediction: Prediction) -> int:
    return prediction.worst_memory.by_category[MemoryCategory.OPTIMIZER]


# Llama 3 8B: 32 blocks with these matrices, two norms each, an embedding, a head, and the last norm
MATRICES = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14336, 4096),) * 3
BLOCKS = 32 * sum(rows * columns for rows, columns in MATRICES)
ENDS = 128256 * 4096  # embedding, and as many in the head
NORMS = 65 * 4096


def test_states_of_8_bits_are_one_byte_and_a_scale_for_256() -> None:
    """Hugging Face's Trainer keeps those of the embedding in FP32; norms of 4,096 weights are in 8 bits."""
    of_torch, of_trainer = (
        states_bytes(predicted("adamw_8bit", dp_replicate=8, pure_bf16=True, software=software))
        for software in ("torch", "accelerate")
    )
    quantized = 2 * (BLOCKS + 2 * ENDS + NORMS) * (1 + 4 / 256)
    assert of_torch == quantized
    assert of_trainer == quantized + 2 * ENDS * (4 - 1 - 4 / 256)


def test_shards_that_are_no_whole_blocks_have_states_as_wide_as_their_weights() -> None:
    """torchao quantizes what a rank holds: over 8 ranks norms are 512 weights, with FP32 states."""
    bytes_per_weight = 2 * (1 + 4 / 256)
    matrices = bytes_per_weight * (BLOCKS + 2 * ENDS) / 8 + 2 * 1024 * (32 * 7 + 2)
    assert states_bytes(predicted("adamw_torch_8bit", dp_shard=8)) == matrices + 2 * 4 * NORMS / 8


def test_muon_has_one_state_of_matrices_and_adamw_two_of_all_others() -> None:
    whole = 4 * BLOCKS + 8 * (2 * ENDS + NORMS)
    assert states_bytes(predicted("muon", dp_replicate=8, pure_bf16=True)) == whole / 2
    assert states_bytes(predicted("muon", dp_shard=8)) == whole / 8


def test_adam_mini_has_one_state_and_a_number_per_row() -> None:
    """Zhang et al. 2024 (arXiv:2406.16793), in the precision of the weights (adam-mini 1.1.1)."""
    states = states_bytes(predicted("adam_mini", dp_replicate=8, pure_bf16=True, software="accelerate"))
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096) + 2 * 128256
    assert states == 2 * (BLOCKS + 2 * ENDS + NORMS + rows + 65)


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_projected_states_are_as_large_as_measured(name: OptimizerName) -> None:
    """galore-torch 1.0 and apollo-torch 1.0.3 with rank 8, measured on these tensors on 2026-11-30: 15,648 B in FP32.

    In BF16 half of that, and two temporaries of a tensor that is not projected.
    """
    shapes = ((64, 32), (32, 64), (100,), (48, 48))
    stored = [StoredTensor(shape, is_matrix=len(shape) == 2, whole_shape=shape) for shape in shapes]
    facts = OPTIMIZERS[name]
    for width, measured in ((4, 15_648), (2, 7_824)):
        widths = Widths(width, width, width, rank=8)
        assert sum(facts.state_bytes(tensor, widths) for tensor in stored) == measured
        assert facts.scratch_bytes(stored[2], widths) == 2 * 100 * width


def test_badam_has_copies_and_states_of_one_block() -> None:
    """Luo et al. 2024 (arXiv:2404.02827), section 2.2: 2 M, and 16 M / D of a block, less its gradient."""
    frozen = ["embedding", "head", "blocks.1-31"]
    memory = predicted("badam", num_devices=1, pure_bf16=True, software="accelerate", frozen=frozen)
    assert states_bytes(memory) == 12 * (BLOCKS + NORMS - 4096) / 32


def test_adafactor_has_rows_and_columns_of_matrices_but_not_of_flat_buffers() -> None:
    of_matrices = sum(rows + columns for rows, columns in 32 * MATRICES) + 2 * (128256 + 4096)
    assert states_bytes(predicted("adafactor", dp_replicate=8, software="accelerate")) == 4 * (of_matrices + NORMS)
    flat = predicted("adafactor", dp_shard=8, zero_stage=1, software="deepspeed")
    assert states_bytes(flat) == (4 + 4) * (BLOCKS + 2 * ENDS + NORMS) / 8  # with the FP32 copy


@pytest.mark.parametrize(
    ("types", "bytes_per_weight"), [({}, 10), ({"exp_avg": "bf16", "exp_avg_sq": "bf16"}, 6), ({"exp_avg": "fp8"}, 7)]
)
def test_precision_aware_states_of_megatron(types: dict[str, str], bytes_per_weight: int) -> None:
    """FP32 weights are BF16 weights and 16 bits more (store_param_remainders)."""
    job = simplan.make_job("llama3-8b", cluster="dgx-h100", dp_shard=8, zero_stage=1, software="megatron-core")
    training = job.training.with_changes(optimizer_dtypes=types)
    held = states_bytes(simplan.predict(replace(job, training=training)))
    assert held == pytest.approx(
        bytes_per_weight * (BLOCKS + 2 * ENDS + NORMS) / 8, rel=1e-6
    )  # shards are rounded up by layer


def test_paged_states_are_on_the_device_as_far_as_there_is_room() -> None:
    keys = {"cluster": "dgx-h100", "dp_replicate": 8, "pure_bf16": True, "software": "accelerate"}
    plain, small = predicted("sgd", **keys).worst_memory, predicted("paged_lion_8bit", **keys).worst_memory
    large = predicted("paged_adamw_32bit", **keys).worst_memory
    scales = 4 * ((BLOCKS + ENDS) // 256)
    assert small.paged_bytes == BLOCKS + ENDS + 4 * ENDS
    assert small.allocated_bytes - plain.allocated_bytes == scales + NORMS + 4 * (NORMS // 256)
    assert small.device_bytes - small.reserved_bytes - small.paged_bytes == plain.device_bytes - plain.reserved_bytes
    assert large.paged_bytes == 8 * (BLOCKS + 2 * ENDS)
    assert large.fits
    assert large.device_bytes == large.capacity_bytes
    assert large.evicted_bytes > 0


def test_newton_schulz_multiplies_as_torch_does() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _zeropower_via_newtonschulz(torch.randn(96, 160), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    products = newton_schulz_products((96, 160))
    assert counter.get_total_flops() == sum(number * 2 * m * n * k for (m, n, k), number in products)


class LargestSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors that operations make, at their largest sum."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = self._now_bytes = 0
        self._held = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._held:
                self._held[storage._cdata] = storage.nbytes()
                self._now_bytes += storage.nbytes()
                self.most_bytes = max(self.most_bytes, self._now_bytes)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, key: int) -> None:
        self._now_bytes -= self._held.pop(key, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["muon", "adafactor", "adafactor_torch"])
def test_temporaries_are_those_of_the_package(name: OptimizerName, dtype: torch.dtype) -> None:
    """Scalars, rows and columns are left out."""
    matrix = nn.Parameter(torch.randn(256, 512, dtype=dtype))
    optimizer = make_optimizer(name, [matrix])
    matrix.grad = torch.randn_like(matrix)
    optimizer.step()
    states = [state for state in optimizer.state[matrix].values() if isinstance(state, Tensor)]
    with LargestSum([matrix, matrix.grad, *states]) as largest:
        optimizer.step()
    temporaries, width = OPTIMIZERS[name].temporaries, dtype.itemsize
    assert temporaries is not None
    stored = StoredTensor((256, 512), is_matrix=True, whole_shape=(256, 512))
    expected = temporaries.num_bytes(stored, Widths(width, width, width))
    assert expected <= largest.most_bytes <= expected + 6 * 4 * (256 + 512)
