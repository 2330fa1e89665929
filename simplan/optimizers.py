"""One table of optimizers: states and their bytes, temporaries, kernels, matrices made whole, and what refuses which.

A new optimizer is one entry of ``OPTIMIZERS`` and its name in ``OptimizerName``. Sources: bitsandbytes 0.50, torchao
0.18 (``optim/``), transformers 5.23 (``optimization.py``), torch 2.13 (``optim/``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

OptimizerName = Literal[
    "adam",
    "adamw",
    "sgd",
    "sgd_momentum",
    "lars",
    "lamb",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "ao_adamw_fp8",
    "adafactor",
    "adafactor_torch",
    "lion",
    "lion_8bit",
    "paged_lion_8bit",
    "paged_lion_32bit",
    "muon",
]
_Foreach = Literal["adam_foreach", "adamw_foreach", "sgd_foreach", "sgd_momentum_foreach"]
UpdateName = OptimizerName | _Foreach
"""An optimizer and the kernels of its step; ``_foreach`` for a sequence of kernels over lists of all tensors."""
Package = Literal["torch", "simplan", "bitsandbytes", "torchao", "transformers"]
"""Library that has the optimizer; ``simplan`` for the executor's own, where torch has none."""
Situation = Literal["fsdp2", "tp", "ep", "experts", "on_host", "no_cuda", "replication"]
"""Property of a job under which an optimizer may not work; ``simplan.rules.optimizers`` decides which a job has."""


REFUSED_WORDS: Mapping[Situation, str] = {
    "fsdp2": "FSDP2",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
    "experts": "experts in torch",
    "on_host": "offload_optimizer",
    "no_cuda": "devices without CUDA",
    "replication": "workers that do not wait for each other",
}
"""Situations in words."""


class StoredTensor(NamedTuple):
    """A parameter, or the shard or flat buffer of it, of which a rank holds optimizer states.

    Attributes:
        shape: Dimensions on the rank; one for a part of a flat buffer.
        is_embedding: The tensor is a lookup table.
        is_matrix: The tensor is a matrix of a block, or a stack of matrices (experts).
        whole_shape: Dimensions before sharding over data-parallel ranks.
    """

    shape: tuple[int, ...]
    is_embedding: bool = False
    is_matrix: bool = False
    whole_shape: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements on the rank."""
        return math.prod(self.shape)


class Widths(NamedTuple):
    """Bytes per element of a run, as far as states depend on them (``StateBytes``).

    Attributes:
        moment, second_moment: States as wide as the framework has them.
        parameter: Weights.
        trainer: Hugging Face's Trainer makes the optimizer.
        saved_bytes: Bytes that a step streams less per weight, with states in narrower types than the framework's.
    """

    moment: int
    second_moment: int
    parameter: int
    trainer: bool = False
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Storage of one state.

    Attributes:
        element_bytes: Bytes per element; 0 for as wide as the framework has states.
        block: Elements with a scale in FP32 of their own; 0 for no scales.
        table_bytes: Lookup table that every tensor has.
        least_elements: Tensors with fewer elements are stored in ``otherwise_bytes`` each.
        whole_blocks: Tensors that are no whole number of blocks are, too.
        otherwise_bytes: Bytes per element of tensors outside of the format; 0 for as wide as the weights.
        wide_embeddings: Hugging Face's Trainer keeps the states of lookup tables in FP32 (``trainer.py``,
            ``create_optimizer``).
        factored: Tensors of two or more dimensions have one number per row and one per column.
        paged_elements: Tensors with at least as many elements are in managed memory; 0 for none.
    """

    element_bytes: float = 0.0
    block: int = 0
    table_bytes: int = 0
    least_elements: int = 0
    whole_blocks: bool = False
    otherwise_bytes: int = 4
    wide_embeddings: bool = False
    factored: bool = False
    paged_elements: int = 0

    def num_bytes(self, tensor: StoredTensor, wide_bytes: int, widths: Widths) -> int:
        """Bytes of the state of a tensor.

        Args:
            wide_bytes: Bytes per element of a state of the framework.
        """
        number = tensor.num_elements
        each = self.element_bytes or wide_bytes
        if self.factored and len(tensor.shape) >= 2:
            rows, columns = tensor.shape[-2:]
            return int(each * (number // columns + number // rows)) if number else 0
        if not self.block:
            return int(each * number)
        if self._is_outside(tensor, widths):
            return number * (self.otherwise_bytes or widths.parameter)
        return math.ceil(self.element_bytes * number) + 4 * math.ceil(number / self.block) + self.table_bytes

    def paged_bytes(self, tensor: StoredTensor, wide_bytes: int, widths: Widths) -> int:
        """Bytes of the state in managed memory; scales are outside of it."""
        number = tensor.num_elements
        if not self.paged_elements or number < self.paged_elements:
            return 0
        scaled = self.block and not self._is_outside(tensor, widths)
        return math.ceil(self.element_bytes * number) if scaled else self.num_bytes(tensor, wide_bytes, widths)

    def least_bytes(self, wide_bytes: int, widths: Widths) -> float:
        """Lower bound of the bytes per element, over all tensors."""
        if self.factored:
            return 0.0
        each = self.element_bytes or wide_bytes
        return min(each + 4 / self.block, self.otherwise_bytes or widths.parameter) if self.block else each

    def _is_outside(self, tensor: StoredTensor, widths: Widths) -> bool:
        number = tensor.num_elements
        uneven = self.whole_blocks and number % self.block != 0
        return (
            number < self.least_elements or uneven or (self.wide_embeddings and widths.trainer and tensor.is_embedding)
        )


@dataclass(frozen=True, slots=True)
class Temporaries:
    """Temporaries of the update of one tensor after the other, of which those of the largest tensor count.

    Attributes:
        element_bytes: Bytes per element of a tensor whose weight has 32 bits.
        narrow_bytes: The same for a weight of 16 bits.
        square_bytes: Bytes per element of a square matrix with the shorter side of a matrix.
        whole_bytes: Both per element of the whole tensor, where it is gathered from shards; zeros where it is not.
        of_matrices: Only matrices of blocks have them.
    """

    element_bytes: int
    narrow_bytes: int
    square_bytes: int = 0
    whole_bytes: tuple[int, int] = (0, 0)
    of_matrices: bool = False

    def num_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the temporaries of one tensor."""
        if self.of_matrices and not tensor.is_matrix:
            return 0
        sizes, shape = (self.element_bytes, self.narrow_bytes), tensor.shape
        if any(self.whole_bytes) and tensor.whole_shape not in ((), shape):
            sizes, shape = self.whole_bytes, tensor.whole_shape
        each = sizes[widths.parameter == 2]
        side = min(shape[-2:], default=0) if len(shape) >= 2 else 0
        stacked = math.prod(shape[:-2])
        return each * math.prod(shape) + self.square_bytes * side * side * stacked


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        states: Format of each state.
        streamed_bytes: Bytes that a step reads and writes per FP32 weight, zeroing the gradient included. With
            ``by_tensor``, without states, each of which is read and written once in addition.
        narrow_streamed_bytes: The same per weight of 16 bits; 0 for half of it.
        num_norms: Norms computed per parameter tensor; ranks with shards of a tensor sum the squares.
        num_temporaries: Temporary tensors of a step, each as large as all parameters.
        package: See ``Package``.
        kind: Class in a package other than torch.
        like: Optimizer with the same rule of learning rates; empty for one of its own.
        by_tensor: Tensors are updated one after another, and the bytes of their states depend on their shapes.
        host_calls: With ``by_tensor``, operations that the host issues for a tensor.
        synchronizes: With ``by_tensor``, the host waits for the device after every tensor.
        temporaries: With ``by_tensor``, temporaries of the largest tensor; None for none.
        orthogonalizes: Updates of matrices of blocks are orthogonalized.
        others: Optimizer of the tensors that are no matrices of blocks; empty for the same.
        gathers: Tensors that ranks all-gather under FSDP2: updates of ``matrices`` of blocks, or gradients and weights
            of ``all``; empty for none.
        refused_under: Situation -> why the optimizer does not work in it, and what does.
        software: Frameworks in which the optimizer runs; empty for all.
    """

    states: tuple[StateFormat, ...]
    streamed_bytes: int
    num_norms: int = 0
    num_temporaries: int = 0
    narrow_streamed_bytes: int = 0
    package: Package = "torch"
    kind: str = ""
    like: str = ""
    by_tensor: bool = False
    host_calls: int = 0
    synchronizes: bool = False
    temporaries: Temporaries | None = None
    orthogonalizes: bool = False
    others: str = ""
    gathers: Literal["", "matrices", "all"] = ""
    refused_under: Mapping[Situation, tuple[str, str]] | None = None
    software: tuple[str, ...] = ()

    @property
    def num_states(self) -> int:
        """Tensors stored per parameter."""
        return len(self.states)

    @property
    def is_paged(self) -> bool:
        """True if states are in managed memory."""
        return any(state.paged_elements for state in self.states)

    def _states_of(self, tensor: StoredTensor) -> Iterable[tuple[StateFormat, int]]:
        """Formats of a tensor's states with the index of each."""
        facts = self if tensor.is_matrix or not self.others else OPTIMIZERS[self.others]  # type: ignore[index]
        return zip(facts.states, range(len(facts.states)), strict=True)

    def state_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the states of a tensor; where all tensors are gathered, every rank has the states of whole ones."""
        if self.gathers == "all" and tensor.whole_shape:
            tensor = tensor._replace(shape=tensor.whole_shape)
        return sum(state.num_bytes(tensor, widths[index], widths) for state, index in self._states_of(tensor))

    def paged_bytes(self, tensor: StoredTensor, widths: Widths) -> int:
        """Bytes of the states of a tensor in managed memory, which no counter of torch's allocator has."""
        return sum(state.paged_bytes(tensor, widths[index], widths) for state, index in self._states_of(tensor))

    def least_state_bytes(self, widths: Widths) -> float:
        """Lower bound of the bytes of the states per parameter, whatever the shapes; exact unless ``by_tensor``."""
        return sum(state.least_bytes(widths[index], widths) for index, state in enumerate(self.states))

    def update_bytes(self, fraction: float, widths: Widths) -> float:
        """Lower bound of the bytes that a step streams per parameter; exact unless ``by_tensor``.

        Args:
            fraction: See ``StateBytes.update_fraction``.
        """
        if not self.by_tensor:
            return int(self.streamed_bytes * fraction) - widths.saved_bytes
        own = self._own_bytes(fraction) + 2 * self.least_state_bytes(widths)
        return min(own, OPTIMIZERS[self.others].update_bytes(fraction, widths)) if self.others else own  # type: ignore[index]

    def _own_bytes(self, fraction: float) -> float:
        """Bytes streamed per weight, without states."""
        narrow = self.narrow_streamed_bytes if fraction < 1 else 0
        return narrow or self.streamed_bytes * fraction

    def tensor_bytes(self, tensor: StoredTensor, fraction: float, widths: Widths) -> int:
        """Bytes that the step of one tensor streams; see ``update_bytes``."""
        if self.others and not tensor.is_matrix:
            return int(OPTIMIZERS[self.others].update_bytes(fraction, widths) * tensor.num_elements)  # type: ignore[index]
        return int(self._own_bytes(fraction) * tensor.num_elements) + 2 * self.state_bytes(tensor, widths)


_WIDE = StateFormat()
"""A state as wide as the framework has states: with its weights, or in FP32 beside weights of 16 bits."""
_FP32 = StateFormat(4.0)
_BNB_8BIT = StateFormat(1.0, 256, least_elements=4096, wide_embeddings=True)
"""bitsandbytes, ``optim/optimizer.py``: blocks of 256 with ``absmax`` in FP32, tensors below 4,096 elements in FP32."""
_PAGED = 100_000  # elements; bitsandbytes, ``get_state_buffer``
_PAGED_8BIT, _PAGED_FP32 = (replace(state, paged_elements=_PAGED) for state in (_BNB_8BIT, _FP32))


def _torchao_state(element_bytes: float, block: int, table_bytes: int) -> StateFormat:
    """torchao, ``optim/adam.py``, ``_new_buffer``: shards that are no whole blocks have states like their weights."""
    return StateFormat(element_bytes, block, table_bytes, 4096, whole_blocks=True, otherwise_bytes=0)


_ONE_BY_ONE: Mapping[Situation, tuple[str, str]] = {
    "replication": ("is not modeled yet for workers that do not wait for each other", "use sgd_momentum or adamw")
}
_TP_OF_BNB = (
    "knows no shards of tensor parallelism: bitsandbytes updates plain tensors, and these are DTensors",
    "use adamw_torch_8bit, or tp = 1",
)
_ON_HOST = (
    "updates tensors on the device, and offload_optimizer keeps them on the host",
    "use adamw, or offload nothing",
)
_OF_BNB: Mapping[Situation, tuple[str, str]] = {
    **_ONE_BY_ONE,
    "fsdp2": (
        "does not work under FSDP2, whose shards are DTensors and bitsandbytes' kernels take plain tensors",
        "use adamw_torch_8bit (torchao), or zero_stage = 0",
    ),
    "tp": _TP_OF_BNB,
    "on_host": _ON_HOST,
}
_NO_PAGES: Mapping[Situation, tuple[str, str]] = {
    "no_cuda": ("has states in CUDA's managed memory, and this device has none", "use the optimizer without paged_")
}
_OF_TORCHAO: Mapping[Situation, tuple[str, str]] = {
    **_ONE_BY_ONE,
    "on_host": _ON_HOST,
}
_WITH_BNB = ("torch", "accelerate", "transformers", "deepspeed")
_WITH_TORCHAO = ("torch", "torchtitan", "torchtitan-2025", "accelerate", "transformers")
_MUON_SOFTWARE = ("torch", "accelerate", "transformers", "megatron-core", "megatron-bridge")
_SPLIT = ("needs whole tensors, and {} splits them", "use tp = 1")


def _of_bitsandbytes(kind: str, *states: StateFormat) -> OptimizerFacts:
    """An optimizer of bitsandbytes: a kernel and a synchronization for every tensor (``optim/optimizer.py``, ``step``).

    States in 32 bits are FP32 also for weights of 16 bits.
    """
    is_paged = any(state.paged_elements for state in states)
    return OptimizerFacts(
        states,
        16,
        package="bitsandbytes",
        kind=kind,
        like="adamw",
        by_tensor=True,
        host_calls=8 if is_paged else 6,  # and prefetches of pages
        synchronizes=True,
        refused_under={**_OF_BNB, **_NO_PAGES} if is_paged else _OF_BNB,
        software=_WITH_BNB,
    )


def _of_torchao(kind: str, state: StateFormat) -> OptimizerFacts:
    """AdamW of torchao: a compiled function for every tensor, which computes in FP32 (``optim/adam.py``, ``step``)."""
    return OptimizerFacts(
        (state, state),
        16,
        package="torchao",
        kind=kind,
        like="adamw",
        by_tensor=True,
        host_calls=10,
        refused_under=_OF_TORCHAO,
        software=_WITH_TORCHAO,
    )


OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    # in fused kernels all read weight and gradient, write the weight and zero the gradient; a state is read and written
    "adam": OptimizerFacts((_WIDE, _WIDE), 32),
    "adamw": OptimizerFacts((_WIDE, _WIDE), 32),
    "sgd": OptimizerFacts((), 16),
    "sgd_momentum": OptimizerFacts((_WIDE,), 24),
    "lars": OptimizerFacts((_WIDE,), 32, 2, package="simplan"),  # weight and gradient once more, for their norms
    # the update is written in place of the gradient, and read with the weight
    "lamb": OptimizerFacts((_WIDE, _WIDE), 44, 2, package="simplan"),
    "adamw_8bit": _of_bitsandbytes("AdamW8bit", _BNB_8BIT, _BNB_8BIT),
    "paged_adamw_8bit": _of_bitsandbytes("PagedAdamW8bit", _PAGED_8BIT, _PAGED_8BIT),
    "paged_adamw_32bit": _of_bitsandbytes("PagedAdamW32bit", _PAGED_FP32, _PAGED_FP32),
    "adamw_torch_8bit": _of_torchao("AdamW8bit", _torchao_state(1.0, 256, 1024)),
    "adamw_torch_4bit": _of_torchao("AdamW4bit", _torchao_state(0.5, 128, 64)),
    "ao_adamw_fp8": _of_torchao("AdamWFp8", _torchao_state(1.0, 256, 0)),
    # transformers, optimization.py: Adafactor without a first moment
    "adafactor": OptimizerFacts(
        (StateFormat(4.0, factored=True),),
        88,  # see below, and casts of 16 bits to FP32 and back
        narrow_streamed_bytes=104,
        package="transformers",
        like="adamw",
        by_tensor=True,
        host_calls=24,
        synchronizes=True,  # max() of a scalar on the device
        temporaries=Temporaries(8, 16),  # update and its negative; copies of gradient and weight in FP32
        refused_under={
            **_ONE_BY_ONE,
            "fsdp2": (
                "makes plain tensors, which do not mix with FSDP2's DTensors",
                "use adafactor_torch, or zero_stage = 0",
            ),
            "tp": (_SPLIT[0].format("tensor parallelism"), _SPLIT[1]),
            "on_host": _ON_HOST,
        },
        software=_WITH_BNB,
        kind="Adafactor",
    ),
    # torch, optim/_adafactor.py, _single_tensor_adafactor
    "adafactor_torch": OptimizerFacts(
        (StateFormat(factored=True),),
        72,
        like="adamw",
        by_tensor=True,
        host_calls=17,
        synchronizes=True,  # item() of two norms
        temporaries=Temporaries(4, 2, whole_bytes=(12, 6)),
        gathers="all",
        refused_under={
            **_ONE_BY_ONE,
            "tp": (_SPLIT[0].format("tensor parallelism"), _SPLIT[1]),
            "ep": (_SPLIT[0].format("expert parallelism"), "use ep = 1"),
            "on_host": _ON_HOST,
        },
        software=("torch", "transformers"),
    ),
    "lion": _of_bitsandbytes("Lion32bit", _FP32),
    "lion_8bit": _of_bitsandbytes("Lion8bit", _BNB_8BIT),
    "paged_lion_8bit": _of_bitsandbytes("PagedLion8bit", _PAGED_8BIT),
    "paged_lion_32bit": _of_bitsandbytes("PagedLion32bit", _PAGED_FP32),
    # torch, optim/_muon.py: momentum, Nesterov's, a copy in BF16, decay and the weight
    "muon": OptimizerFacts(
        (_WIDE,),
        44,
        like="adamw",
        by_tensor=True,
        host_calls=28,
        temporaries=Temporaries(8, 6, square_bytes=4, whole_bytes=(6, 6), of_matrices=True),
        orthogonalizes=True,
        others="adamw",
        gathers="matrices",
        refused_under={
            **_ONE_BY_ONE,
            "tp": ("needs whole matrices, and tensor parallelism splits them: it is not modeled yet", "use tp = 1"),
            "ep": ("is not modeled yet of experts that ranks share out", "use ep = 1, or adamw"),
            "experts": (
                "takes matrices (torch.optim.Muon), and experts are one tensor of three dimensions",
                "use adamw, or software megatron-core",
            ),
            "on_host": _ON_HOST,
        },
        software=_MUON_SOFTWARE,
    ),
}
"""Optimizers by name: SGD (with momentum 0.9), Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), LARS (You
et al. 2017, arXiv:1708.03888), LAMB (You et al. 2020, arXiv:1904.00962), 8-bit optimizers (Dettmers et al. 2022,
arXiv:2110.02861), Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), Lion (Chen et al. 2023, arXiv:2302.06675), Muon
(Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982)."""

UPDATES: dict[UpdateName, OptimizerFacts] = dict[UpdateName, OptimizerFacts](OPTIMIZERS.items()) | {
    # torch 2.13, optim/sgd.py: weight += gradient, or momentum *= and += before it
    "sgd_foreach": OptimizerFacts((), 12 + 4),
    "sgd_momentum_foreach": OptimizerFacts((_WIDE,), 8 + 12 + 12 + 4),
    # torch 2.13, optim/adam.py: lerp, mul, addcmul, a root in a separate tensor, its div and add, addcdiv; and decay
    "adam_foreach": OptimizerFacts((_WIDE, _WIDE), 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1),
    "adamw_foreach": OptimizerFacts(
        (_WIDE, _WIDE), 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 + 4, num_temporaries=1
    ),  # and decay
}
"""Optimizers with fused kernels, and with torch's sequence of kernels (``foreach``), whose bytes are summed."""

LAYERWISE = frozenset(name for name, facts in OPTIMIZERS.items() if facts.num_norms)
"""Optimizers whose step depends on norms."""

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's Newton-Schulz (torch 2.13, ``optim/_muon.py``; Megatron Core, ``muon_num_ns_steps``)."""


def newton_schulz_products(shape: Sequence[int]) -> tuple[tuple[tuple[int, int, int], int], ...]:
    """Matmuls of one orthogonalization of a matrix or of a stack of them: ((rows, columns, depth), number).

    With m the shorter and n the longer side, an iteration has X X^T (m x m x n), its square (m x m x m) and the product
    of both with X (m x n x m): 4 m^2 n + 2 m^3 FLOPs (torch 2.13, ``optim/_muon.py``).

    >>> newton_schulz_products((64, 16))
    (((16, 16, 64), 5), ((16, 16, 16), 5), ((16, 64, 16), 5))
    """
    m, n = sorted(shape[-2:])
    number = NEWTON_SCHULZ_STEPS * math.prod(shape[:-2])
    return ((m, m, n), number), ((m, m, m), number), ((m, n, m), number)
