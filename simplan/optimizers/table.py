"""One table of optimizers: states and their bytes, temporaries, kernels, matrices made whole, and what refuses which.

A new optimizer is one entry of ``OPTIMIZERS`` and its name in ``OptimizerName``. Sources: bitsandbytes 0.50, torchao
0.18 (``optim/``), transformers 5.23 (``optimization.py``), torch 2.13 (``optim/``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from simplan.optimizers.facts import OptimizerFacts, Package, Situation, StateFormat, Temporaries

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
    "adam_mini",
    "galore_adamw",
    "galore_adamw_8bit",
    "apollo_adamw",
    "badam",
]
_Foreach = Literal["adam_foreach", "adamw_foreach", "sgd_foreach", "sgd_momentum_foreach"]
UpdateName = OptimizerName | _Foreach
"""An optimizer and the kernels of its step; ``_foreach`` for a sequence of kernels over lists of all tensors."""
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

_WIDE = StateFormat()
"""A state as wide as the framework has states: with its weights, or in FP32 beside weights of 16 bits."""
_FP32 = StateFormat(4.0)
_ADAMW = OptimizerFacts((_WIDE, _WIDE), 32)
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
_WITH_BNB = ("torch", "accelerate", "transformers", "deepspeed", "litgpt", "torchtune", "unsloth")
_WITH_TORCHAO = ("torch", "torchtitan", "torchtitan-2025", "accelerate", "transformers", "torchtune")
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


_OF_PROJECTIONS: Mapping[Situation, tuple[str, str]] = {
    **_ONE_BY_ONE,
    "fsdp2": ("projects whole matrices, and FSDP2 leaves shards", "use zero_stage = 0"),
    "tp": (_SPLIT[0].format("tensor parallelism"), _SPLIT[1]),
    "ep": (_SPLIT[0].format("expert parallelism"), "use ep = 1"),
    "experts": (
        "takes nn.Linear's matrices, and experts are one tensor of three dimensions",
        "use adamw, or a model without experts",
    ),
    "on_host": _ON_HOST,
}


def _of_projections(
    kind: str,
    package: Package,
    state: StateFormat,
    streamed_bytes: int,
    temporaries: Temporaries,
    host_calls: int,
    *,
    projects_back: bool,
    synchronizes: bool,
    note: str = "",
) -> OptimizerFacts:
    """AdamW whose states of matrices of blocks are those of gradients of a low rank.

    Other tensors have an AdamW of single operations, with a root and an update as temporaries
    (``galore_torch/adamw.py``, ``apollo_torch/apollo.py``), or that of bitsandbytes.
    """
    moment = replace(state, projected="gradient")
    others = OptimizerFacts((state, state), 64, by_tensor=True, temporaries=Temporaries(8, 4))
    if state.block:
        others = OptimizerFacts((state, state), 16, by_tensor=True)
    return OptimizerFacts(
        (moment, moment, StateFormat(projected="projection")),
        streamed_bytes,
        package=package,
        kind=kind,
        like="adamw",
        by_tensor=True,
        host_calls=host_calls,
        synchronizes=synchronizes,
        temporaries=temporaries,
        projects_back=projects_back,
        note=note,
        others=others,
        refused_under=_OF_PROJECTIONS,
        software=("torch", "accelerate", "transformers"),
    )


# copies of the gradient in FP32 (torch copies the argument of an SVD), and both factors
_OF_SVD = Temporaries(8, 12, square_bytes=4, of_matrices=True)
_SVD = "the SVD of every matrix, each 200 steps by default, takes minutes of a large model and is in no step time"

OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    # in fused kernels all read weight and gradient, write the weight and zero the gradient; a state is read and written
    "adam": OptimizerFacts((_WIDE, _WIDE), 32),
    "adamw": _ADAMW,
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
        others=_ADAMW,
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
    # adam-mini 1.1.1, adam_mini.py: single operations; a second moment per row of a matrix (of queries and keys per
    # head, which is less), in the precision of the weights
    "adam_mini": OptimizerFacts(
        (_WIDE, StateFormat(by_row=True)),
        56,  # square, mean, mean of gradients, update, rate, sign, weight, and zeroed gradients
        package="adam_mini",
        like="adamw",
        by_tensor=True,
        host_calls=16,
        temporaries=Temporaries(8, 4),  # update and its negative
        refused_under={
            **_ONE_BY_ONE,
            "fsdp2": ("sums squares over ranks tensor by tensor, which is not modeled yet", "use zero_stage = 0"),
            "tp": (_SPLIT[0].format("tensor parallelism"), _SPLIT[1]),
            "ep": (_SPLIT[0].format("expert parallelism"), "use ep = 1"),
            "on_host": _ON_HOST,
        },
        software=("torch", "accelerate", "transformers"),
    ),
    # galore-torch 1.0: the update of full rank, scaled and added; in 8 bits also a clone of the weight
    "galore_adamw": _of_projections(
        "GaLoreAdamW", "galore_torch", _WIDE, 20, _OF_SVD, 14, projects_back=True, synchronizes=False, note=_SVD
    ),
    "galore_adamw_8bit": _of_projections(
        "GaLoreAdamW8bit", "galore_torch", _BNB_8BIT, 28, _OF_SVD, 16, projects_back=True, synchronizes=True, note=_SVD
    ),
    # apollo-torch 1.0.3: a gradient scaled by channels, its norm, the limiter's copy, its scale, and added; max() of a
    # scalar on the device
    "apollo_adamw": _of_projections(
        "AdamW",
        "apollo_torch",
        _WIDE,
        40,
        Temporaries(8, 4, of_matrices=True),
        24,
        projects_back=False,
        synchronizes=True,
    ),
    # badam 1.4, block_optim.py, step_single_gpu: torch's AdamW of FP32 copies, to which gradients are upcast and from
    # which weights are copied
    "badam": OptimizerFacts(
        (_WIDE, _WIDE),
        32 + 12,
        package="badam",
        kind="BlockOptimizer",
        like="adamw",
        updates_copies=True,
        note=(
            "badam trains the blocks in turn, 50 steps each by default: the step is that of the block that "
            "model.frozen leaves; backward ends at it, so the first block has the longest step and the largest peak"
        ),
        refused_under={
            **_ONE_BY_ONE,
            "fsdp2": ("changes which weights are trained, and FSDP2 does not follow", "use zero_stage = 0"),
            "tp": ("is not modeled yet with tensor parallelism", "use tp = 1"),
            "ep": ("is not modeled yet with expert parallelism", "use ep = 1"),
            "on_host": _ON_HOST,
        },
        software=("torch", "accelerate", "transformers"),
    ),
}
"""Optimizers by name: SGD (with momentum 0.9), Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), LARS (You
et al. 2017, arXiv:1708.03888), LAMB (You et al. 2020, arXiv:1904.00962), 8-bit optimizers (Dettmers et al. 2022,
arXiv:2110.02861), Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), Lion (Chen et al. 2023, arXiv:2302.06675), Muon
(Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982), Adam-mini (Zhang et al. 2024, arXiv:2406.16793), GaLore
(Zhao et al. 2024, arXiv:2403.03507), APOLLO (Zhu et al. 2024, arXiv:2412.05270), BAdam (Luo et al. 2024,
arXiv:2404.02827)."""

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


def projection_products(shape: Sequence[int], rank: int) -> tuple[tuple[tuple[int, int, int], int], ...]:
    """Matmuls that project the gradient of a matrix to a rank, and an update back, as in ``newton_schulz_products``.

    The gradient is projected along the shorter side (galore-torch 1.0, ``galore_projector.py``, ``proj_type`` std).

    >>> projection_products((64, 16), 4)
    (((64, 4, 16), 1), ((64, 16, 4), 1))
    """
    n, m = sorted(shape[-2:])
    return ((m, min(rank, n), n), 1), ((m, n, min(rank, n)), 1)
