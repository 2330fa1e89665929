"""LoRA (Hu et al. 2021, arXiv:2106.09685), DoRA and OFT: linear layers with adapters, and frozen parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from simplan.model.layer import Gemm, LayerSpec, ParameterSpec

_SCALE = 2.0  # alpha / r with the usual alpha = 2 r; it changes nothing that is predicted
_A, _ROTATION, _MAGNITUDE = ".lora_a.weight", ".oft_r.weight", ".magnitude"
_EXPERT_DIMS = 3
_INIT_STD = 0.02  # also of B: with zeros no gradient of A would say anything


class LoraLinear(nn.Linear):
    """y = x W^T + b + scale (x A^T) B^T (equation 3); its parameters are called as PEFT and torchtune call them.

    Attributes:
        lora_a, lora_b: A (r x k) and B (n x r).
        dropout: Probability with which an element of A's input is 0.
        is_on: Compute with the adapter.
    """

    is_on = True

    def __init__(self, linear: nn.Linear, rank: int, dropout: float = 0.0) -> None:
        k, n = linear.in_features, linear.out_features
        super().__init__(k, n, bias=linear.bias is not None)
        self.lora_a = nn.Linear(k, rank, bias=False)
        self.lora_b = nn.Linear(rank, n, bias=False)
        self.dropout = dropout

    def base(self, x: Tensor) -> Tensor:
        """The layer without its adapter."""
        return functional.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        if not self.is_on:
            return self.base(x)
        narrow = self.lora_a(self.dropped(x))
        return self.adapted(self.base(x), narrow, self.lora_b.weight)

    def dropped(self, x: Tensor) -> Tensor:
        """The input of A (..., k): x after dropout with the function of CUDA, which keeps a mask of booleans."""
        return torch.native_dropout(x, self.dropout, train=True)[0] if self.dropout else x

    @staticmethod
    def adapted(output: Tensor, narrow: Tensor, b: Tensor) -> Tensor:
        """X W^T + b (..., n) with what B makes of x A^T (..., r) added."""
        return torch.add(output, functional.linear(narrow, b), alpha=_SCALE)


class DoraLinear(LoraLinear):
    """DoRA as PEFT computes it (tuners/lora/dora.py): y + (s - 1) x W^T + s scale (x A^T) B^T, s = m / |W + scale B A|.

    Attributes:
        magnitude: Trained norms of the rows of W and its adapter together, (n).
        whole: Function that gives W (n x k), whatever form it is stored in.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear, rank)
        self.magnitude = nn.Parameter(torch.empty(linear.out_features))
        self.whole: Callable[[], Tensor] = lambda: self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        output = self.base(x)
        if not self.is_on:
            return output
        identity = torch.eye(self.in_features, device=x.device, dtype=self.lora_a.weight.dtype)
        width = torch.promote_types(x.dtype, torch.float32)
        change = self.lora_b(self.lora_a(identity)).T.to(width)
        del identity
        weight = self.whole().to(width)
        with torch.no_grad():
            norms = torch.linalg.norm(weight + _SCALE * change, dim=1)
        scale = (self.magnitude / norms).view(1, -1)
        adapted = self.lora_b(self.lora_a(x))
        product = output if self.bias is None else output - self.bias
        changed = (scale - 1) * product + scale * adapted * _SCALE
        result: Tensor = (output + changed).to(output.dtype)
        return result


class Rotation(nn.Module):
    """Blocks that rotate a vector (OFT), as PEFT makes them (tuners/oft/layer.py, ``OFTRotationModule``).

    Attributes:
        weight: Numbers above the diagonals of skew-symmetric blocks (k / r x r (r - 1) / 2).
    """

    def __init__(self, num_blocks: int, size: int) -> None:
        super().__init__()
        self._size = size
        self.weight = nn.Parameter(torch.empty(num_blocks, size * (size - 1) // 2))

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., k), in the precision of the weight."""
        rotation = self._rotation()
        blocks = torch.einsum("...rk,rkc->...rc", x.reshape(*x.shape[:-1], -1, self._size), rotation)
        result: Tensor = blocks.reshape(x.shape).to(x.dtype)
        return result

    def _rotation(self) -> Tensor:
        """I + 2 Q + 2 Q^2 + 2 Q^3 + Q^4 of each block (k / r x r x r)."""
        weight, size = self.weight, self._size
        rows, columns = torch.triu_indices(size, size, 1, device=weight.device)
        above = torch.zeros(len(weight), size, size, device=weight.device, dtype=weight.dtype)
        above[:, rows, columns] = weight
        skew = above - above.transpose(-2, -1)
        total = torch.eye(size, device=weight.device, dtype=weight.dtype).repeat(len(weight), 1, 1)
        total.add_(skew, alpha=2.0)
        square = torch.bmm(skew, skew)
        total.add_(square, alpha=2.0)
        cube = torch.bmm(square, skew)
        total.add_(cube, alpha=2.0)
        return total.add_(torch.bmm(cube, skew)).to(weight.dtype)


class OftLinear(nn.Linear):
    """y = (x R) W^T + b.

    Attributes:
        oft_r: Rotation of the input.
        is_on: Compute with the adapter.
    """

    is_on = True

    def __init__(self, linear: nn.Linear, num_blocks: int) -> None:
        k, n = linear.in_features, linear.out_features
        super().__init__(k, n, bias=linear.bias is not None)
        self.oft_r = Rotation(num_blocks, k // num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        if not self.is_on:
            return super().forward(x)
        dtype = x.dtype
        x = x.to(self.oft_r.weight.dtype)
        x = self.oft_r(x)
        return super().forward(x.to(dtype))


class LoraGroupedLinear(nn.Module):
    """Experts with adapters, which are added to the weights before these are used (PEFT, ``ParamWrapper``).

    Attributes:
        weight: A matrix for each expert (e x n x k).
        lora_a, lora_b: A (r e x k) and B (n x r e) of e experts.
        is_on: Compute with the adapters.
    """

    is_on = True

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        e, n, k = weight.shape
        self.weight = nn.Parameter(torch.empty(e, n, k))
        self.lora_a = nn.Linear(k, rank * e, bias=False)
        self.lora_b = nn.Linear(rank * e, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(e, rows, k) to (e, rows, n)."""
        weight = self.weight.to(x.dtype)
        if not self.is_on:
            return torch.bmm(x, weight.transpose(1, 2))
        e, n, k = weight.shape
        b = self.lora_b.weight.reshape(n, -1, e).permute(2, 0, 1).to(x.dtype)
        merged = torch.baddbmm(weight, b, self.lora_a.weight.reshape(e, -1, k).to(x.dtype), alpha=_SCALE)
        return torch.bmm(x, merged.transpose(1, 2))


class LoraMergedLinear(nn.Linear):
    """A router with an adapter, which is added to the weight before it is used (PEFT, ``ParamWrapper``).

    Attributes:
        lora_a, lora_b: A (r x k) and B (n x r).
        is_on: Compute with the adapter.
    """

    is_on = True

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        n, k = linear.weight.shape
        super().__init__(k, n, bias=linear.bias is not None)
        self.lora_a = nn.Linear(k, rank, bias=False)
        self.lora_b = nn.Linear(rank, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., n)."""
        if not self.is_on:
            return super().forward(x)
        weight = self.weight.to(x.dtype)
        merged = torch.addmm(weight, self.lora_b.weight.to(x.dtype), self.lora_a.weight.to(x.dtype), alpha=_SCALE)
        return functional.linear(x, merged, self.bias)


class LoraEmbedding(nn.Embedding):
    """y = E[x] + scale A^T[x] B^T, for tokens x (...) int64.

    Attributes:
        lora_a, lora_b: A (r x v) and B (n x r).
        is_on: Compute with the adapter.
    """

    is_on = True

    def __init__(self, table: nn.Embedding, rank: int) -> None:
        v, n = table.num_embeddings, table.embedding_dim
        super().__init__(v, n)
        self.lora_a = nn.Linear(v, rank, bias=False)
        self.lora_b = nn.Linear(rank, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(...) to (..., n)."""
        if not self.is_on:
            return super().forward(x)
        rows = functional.embedding(x, self.lora_a.weight.T)
        return LoraLinear.adapted(super().forward(x), rows, self.lora_b.weight)


def add_adapter(linear: nn.Module, a: ParameterSpec, b: ParameterSpec, dtype: torch.dtype) -> None:
    """Adds an adapter to a linear layer of any class, in place, as PEFT runs it: y + (x A^T) B^T scale.

    A and B are drawn from torch's generator. They are cast where the module computes in another dtype than theirs.
    """
    (rank, k), (n, _) = a.shape, b.shape
    device = next(linear.parameters()).device
    for name, rows, columns in (("lora_a", rank, k), ("lora_b", n, rank)):
        factor = nn.Linear(columns, rows, bias=False, device="meta")
        drawn = torch.empty(rows, columns).normal_(0.0, _INIT_STD)
        factor.weight = nn.Parameter(drawn.to(device, dtype))
        linear.add_module(name, factor)
    linear.register_forward_hook(_adapted)


def _adapted(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    (x,) = inputs
    low = functional.linear(x, linear.lora_a.weight.to(x.dtype))
    return output + functional.linear(low, linear.lora_b.weight.to(x.dtype)) * _SCALE


def add_adapters(layer: nn.Module, spec: LayerSpec, dropout: float = 0.0) -> None:
    """Adds what a LayerSpec has besides the weights of a module: LoRA adapters, and originals of modules to save."""
    marks = (".lora_", ".oft_r.", ".original_module.", _MAGNITUDE)
    added = {p.name: p.shape for p in spec.parameters if any(mark in p.name for mark in marks)}
    merged = {kernel.name for kernel in spec.kernels if isinstance(kernel, Gemm) and kernel.merged_rank}
    specs = zip(list(layer.named_parameters()), [p for p in spec.parameters if p.name not in added], strict=True)
    for (name, _), parameter in specs:
        module, shape = parameter.name.removesuffix(".weight"), added.get(parameter.name.replace(".weight", _A))
        path, _, last = name.removesuffix(".weight").rpartition(".")
        parent = layer.get_submodule(path)
        original = parent.get_submodule(last) if module != parameter.name else parent
        blocks = added.get(parameter.name.replace(".weight", _ROTATION))
        if blocks is not None:
            setattr(parent, last, OftLinear(original, blocks[0]))  # type: ignore[arg-type]
        elif shape is not None and isinstance(original, nn.Embedding):
            setattr(parent, last, LoraEmbedding(original, shape[0]))
        elif shape is not None and len(parameter.shape) == _EXPERT_DIMS:
            weight = original.get_parameter("weight")
            setattr(parent, last, LoraGroupedLinear(weight, shape[0] // len(weight)))
        elif shape is not None and module in merged:
            setattr(parent, last, LoraMergedLinear(original, shape[0]))  # type: ignore[arg-type]
        elif shape is not None:
            has_magnitude = parameter.name.replace(".weight", _MAGNITUDE) in added
            made = DoraLinear(original, shape[0]) if has_magnitude else LoraLinear(original, shape[0], dropout)  # type: ignore[arg-type]
            setattr(parent, last, made)
        elif f"{module}.original_module.weight" in added:
            original.add_module("original_module", copy.deepcopy(original))


def freeze(layer: nn.Module, spec: LayerSpec, dtype: torch.dtype) -> None:
    """Freezes parameters that are not trained, and casts them to the precision in which they are used."""
    for (path, parameter), said in zip(list(layer.named_parameters()), spec.parameters, strict=True):
        if said.frozen:
            owner, _, name = path.rpartition(".")
            frozen = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            layer.get_submodule(owner).register_parameter(name, frozen)


def trained_parameters(module: nn.Module) -> list[Any]:
    """Parameters that require gradients, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
