"""Command ``python -m benchmarks.architectures``: capture every architecture that the installed transformers knows.

Each is captured with its usual widths and few layers, and compared with transformers' own number of parameters and
with torch's own counters. The page goes to docs/reference/architectures.md. Takes half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from executor.capture.capture import Batch, fake_module, fake_tensor, loss_of, model_from_module
from executor.capture.hugging_face import batch_of, module_of_config
from executor.capture.trace import as_on_gpus
from executor.capture.values import NEEDS_VALUES
from simplan.errors import SpecError
from simplan.model.captured.layers import captured_layers
from simplan.model.layer import Gemm, LayerSpec
from simplan.model.model import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
SEQ_LEN = 16
NUM_SAMPLES = 5
_LIMIT_S = 120
_NUM_LAYERS, _NUM_LAYERS_OF_KINDS = 2, 4
_NUM_EXPERTS = 16
_SAVED, _FLOPS = 0.01, 0.005  # relative differences that are no difference
_FEW = 0.01  # of the parameters
_DEPTH = re.compile(
    r"(num_|n_)?((hidden|encoder|decoder|enc|dec|text|vision|speech|audio|block|trunk|qformer|backbone)_)?"
    r"(pred_num_hidden_)?(layers?|num_layers|depth)"
)
_OF_EXPERTS = re.compile(r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts")
_PART = re.compile(r"(?<!_to)_(text|vision|audio|encoder|decoder|model|qformer|tokenizer|backbone|wrapper|timestamp)$")
_OF_FEATURES = frozenset({"out_features", "out_indices", "stage_names", "_out_features", "_out_indices"})
OVERRIDES: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 50_265},
    "deepseek_v2": {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "llama4": {"vision_config": {
        "hidden_size": 1408, "intermediate_size": 5632, "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
        "vision_output_dim": 4096, "projector_input_dim": 4096, "projector_output_dim": 4096,
    }},
    "detr": {"use_timm_backbone": False, "backbone": None, "backbone_config": {"model_type": "resnet"}},
    "conditional_detr": {"use_timm_backbone": False, "backbone": None, "backbone_config": {"model_type": "resnet"}},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"axial_pos_shape": [4, 4]},
}  # fmt: skip
"""Keys that complete default configurations, from published ones."""


@dataclass(frozen=True)
class Judged:
    """One architecture.

    Attributes:
        kind: ``model_type``.
        refused: Why it was not captured; empty if it was.
        is_built: transformers builds it from the configuration.
        module: Name of the class.
        num_parameters: Of transformers.
        has_all: The capture has as many parameters.
        num_blocks: Repeated modules that became layers.
        unused: Fraction of the parameters that take no part in the loss.
        saved, forward, backward: Relative differences of saved bytes and of FLOPs of matmuls; None if torch counts 0.
    """

    kind: str
    refused: str = ""
    is_built: bool = True
    module: str = ""
    num_parameters: int = 0
    has_all: bool = False
    num_blocks: int = 0
    unused: float = 0.0
    saved: float | None = None
    forward: float | None = None
    backward: float | None = None

    @property
    def is_exact(self) -> bool:
        """True if parameters, saved bytes and FLOPs are those of transformers and torch."""
        counted = self.saved, self.forward, self.backward
        limits = zip(counted, (_SAVED, _FLOPS, _FLOPS), strict=True)
        return self.has_all and all(value is not None and abs(value) <= limit for value, limit in limits)


def small_config(kind: str) -> dict[str, Any]:
    """The default configuration of a ``model_type``, with few layers and experts, and without dropout."""
    import transformers

    data: dict[str, Any] = transformers.CONFIG_MAPPING[kind]().to_dict() | {"model_type": kind}
    _merge(data, OVERRIDES.get(kind, {}))
    _shrink(data)
    return data


def _merge(data: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _shrink(data: dict[str, Any]) -> None:
    keys = [key for key, value in data.items() if _is_number(value) and _DEPTH.fullmatch(str(key))]
    depth = max((data[key] for key in keys), default=0)
    has_kinds = any(isinstance(v, list) and len(v) == depth and len(set(map(str, v))) > 1 for v in data.values())
    wanted = _NUM_LAYERS_OF_KINDS if has_kinds else _NUM_LAYERS
    for key, value in [*data.items()]:
        if key == "per_layer_config" and isinstance(value, dict):
            data[key] = {layer: setting for layer, setting in value.items() if int(layer) < wanted}
        elif isinstance(value, dict):
            _shrink(value)
        elif key in keys:
            data[key] = min(wanted, value)
        elif key in _OF_FEATURES:
            del data[key]
        elif _is_number(value) and _OF_EXPERTS.fullmatch(str(key)):
            data[key] = min(_NUM_EXPERTS, value)
        elif isinstance(value, list) and depth > wanted and len(value) == depth:
            data[key] = value[:wanted]
        elif key == "depths":
            data[key] = [min(_NUM_LAYERS, number) for number in value]
        elif isinstance(value, float) and "drop" in str(key):
            data[key] = 0.0
    for key in ("decoder_start_token_id", "pad_token_id"):
        if "vocab_size" in data and data.get(key) is None:
            data[key] = 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def judged(module: nn.Module, batch: Batch, kind: str = "") -> Judged:
    """Captures a module in FP32, and compares with torch's counters on tensors without data.

    Raises:
        SpecError: The module cannot be captured.
    """
    captured = model_from_module(module, batch, precisions=("fp32",))
    layers = captured_layers(captured)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    try:
        saved, forward, backward = counted_by_torch(module, batch)
    except NEEDS_VALUES:  # torch has no counters for a batch with values and weights without
        saved = forward = backward = 0
    matmuls = [kernel for layer in layers for kernel in layer.kernels if isinstance(kernel, Gemm)]
    return Judged(
        kind=kind,
        module=type(module).__name__,
        num_parameters=num_parameters,
        has_all=ModelSpec(name=kind, family="captured", captured=captured).num_parameters == num_parameters,
        num_blocks=sum(1 for name in captured.modules if name),
        unused=sum(prod(parameter.shape) for parameter in captured.unused) / num_parameters,
        saved=_difference(saved_bytes(layers), saved),
        forward=_difference(NUM_SAMPLES * sum(kernel.flops for kernel in matmuls), forward),
        backward=_difference(NUM_SAMPLES * sum(kernel.flops * kernel.backward_matmuls for kernel in matmuls), backward),
    )


def _difference(ours: int, theirs: int) -> float | None:
    return ours / theirs - 1 if theirs else None


def saved_bytes(layers: Sequence[LayerSpec]) -> int:
    """Bytes that layers save for backward in FP32, of all samples."""
    total = 0
    for layer in layers:
        roots = layer.storages(4, 4)
        kept = {roots[tensor.name].name: roots[tensor.name] for tensor in layer.saved if not tensor.elsewhere}
        total += sum(
            tensor.num_bytes(4, 4) * (1 if tensor.per_microbatch else NUM_SAMPLES)
            for tensor in kept.values()
            if not tensor.elsewhere
        )
    return total


def counted_by_torch(module: nn.Module, batch: Batch) -> tuple[int, int, int]:
    """Bytes that autograd saves, without weights and the batch, and FLOPs of forward and of backward; 0 for unknown."""
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpus():
        fake = fake_module(module, torch.float32).train()
        inputs = tree_map(lambda leaf: fake_tensor(leaf, torch.float32) if isinstance(leaf, Tensor) else leaf, batch(5))
        known = {_storage(t) for t in (*fake.parameters(), *fake.buffers(), *tree_leaves(inputs)) if _is_tensor(t)}
        kept: WeakSet[_Saved] = WeakSet()

        def pack(tensor: Tensor) -> _Saved:
            kept.add(saved := _Saved(tensor.untyped_storage()))
            return saved

        def loss() -> Tensor:
            return loss_of(fake(**inputs) if isinstance(inputs, dict) else fake(*inputs), None)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            total = loss()
        sizes = {saved.storage._cdata: saved.storage.nbytes() for saved in kept}
        num_bytes = sum(size for storage, size in sizes.items() if storage not in known)
        del total
        forward, backward = (FlopCounterMode(display=False, custom_mapping=_FORMULAS) for _ in range(2))
        with forward:
            total = loss()
        try:
            with backward:
                total.backward()  # type: ignore[no-untyped-call]
        except Exception:  # of masks in the place of indices, whose number is unknown
            return num_bytes, forward.get_total_flops(), 0
    return num_bytes, forward.get_total_flops(), backward.get_total_flops()


class _Saved:
    """The memory of a tensor that a node of the autograd graph keeps; it ends with the node."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _grouped_flops(left: Sequence[int], right: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * prod(left) * right[-1]  # each row meets one of the matrices, and each inner element one row and column


def _convolution_flops(
    gradient: Sequence[int], image: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """FLOPs by shapes: torch's own formula counts grouped convolutions as often as they have groups."""
    transposed, mask = args[4], args[7]
    pixels = prod(image[2:]) if transposed else prod(gradient[2:])
    return 2 * image[0] * pixels * prod(weight) * (bool(mask[0]) + bool(mask[1]))


_FORMULAS = {
    torch.ops.aten._grouped_mm: _grouped_flops,
    torch.ops.aten.convolution_backward: _convolution_flops,
}


def judged_kind(kind: str) -> Judged:
    """Builds and judges one architecture."""
    try:
        module, config = module_of_config(small_config(kind))
    except Exception as error:
        return Judged(kind, refused=_first_line(error), is_built=False)
    try:
        return judged(module, batch_of(module, config, SEQ_LEN), kind)
    except SpecError as error:
        return Judged(kind, refused=_first_line(error), module=type(module).__name__)


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"\S*/site-packages/", "", text.rpartition("; ")[0] or text)


def whole_models() -> tuple[str, ...]:
    """Each ``model_type`` that has a model, and is no part of another one."""
    import transformers

    known = {config.model_type for config in transformers.AutoModel._model_mapping}
    written = {config.model_type for config in transformers.AutoModelForCausalLM._model_mapping}
    return tuple(sorted(kind for kind in known if kind in written or not _PART.search(kind)))


def all_judged(kinds: Iterable[str], num_processes: int = 2) -> Iterator[Judged]:
    """Judges each in a process of its own."""
    waiting, running = list(kinds), dict[int, tuple[str, int]]()
    while waiting or running:
        while waiting and len(running) < num_processes:
            reads, writes = os.pipe()
            kind = waiting.pop(0)
            child = os.fork()
            if not child:
                _child(kind, writes)
            os.close(writes)
            running[child] = kind, reads
        child, status = os.wait()
        kind, reads = running.pop(child)
        with os.fdopen(reads) as file:
            text = file.read()
        yield Judged(**json.loads(text)) if not status else Judged(kind, refused=f"took more than {_LIMIT_S} s")


def _child(kind: str, writes: int) -> None:
    signal.alarm(_LIMIT_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.write(writes, json.dumps(asdict(judged_kind(kind))).encode())
    os._exit(0)


_HEAD = """\
# Captured architectures

`python -m benchmarks.architectures` captures every model of transformers {transformers} that is no part of another one,
with torch {torch}, and writes this page. Each has the widths of its default configuration, and few layers and experts.

Of {tried} architectures that transformers builds from their default configuration, **{captured} are captured**:
{same} with exactly as many parameters as transformers counts, {exact} with all of what torch counts itself: bytes saved
for backward within 1 %, and FLOPs of matmuls and convolutions within 0.5 %, forward and backward. {refused} are
refused, with the line that does not go; {unbuilt} more need other keys or packages than a default configuration has.

torch counts no FLOPs for attention on CPUs, and counts gradients of grouped convolutions wrongly; the latter are
counted by their shapes. Bytes are those that autograd still keeps when forward has ended.

"""


def page(judgments: Sequence[Judged], transformers: str, torch_version: str) -> str:
    """Text of the page."""
    captured = [judged for judged in judgments if not judged.refused]
    exact = [judged for judged in captured if judged.is_exact]
    refused = [judged for judged in judgments if judged.refused and judged.is_built]
    unbuilt = [judged for judged in judgments if not judged.is_built]
    head = _HEAD.format(
        transformers=transformers,
        torch=torch_version,
        tried=len(captured) + len(refused),
        captured=len(captured),
        same=sum(judged.has_all for judged in captured),
        exact=len(exact),
        refused=len(refused),
        unbuilt=len(unbuilt),
    )
    texts = [judged for judged in exact if judged.unused > _FEW]
    others = [judged for judged in captured if not judged.is_exact]
    parts = [
        "## Captured",
        _words(judged for judged in exact if judged.unused <= _FEW),
        "With a part that takes no part, such as the tower of a vision-language model whose images differ in size, and "
        "which is given texts alone:",
        _words(texts),
        "## Captured, and counted differently",
        "Backward FLOPs are left out where torch's own backward needs values.\n",
        "| architecture | saved bytes | forward FLOPs | backward FLOPs |\n|---|---:|---:|---:|",
        *(f"| `{o.kind}` | {_percent(o.saved)} | {_percent(o.forward)} | {_percent(o.backward)} |" for o in others),
        "\n## Refused",
        "A batch of your own often helps: [capture the module](../how-to/your-own-model.md) that a function makes.\n",
        "| architecture | why |\n|---|---|",
        *(f"| `{judged.kind}` | {_cell(judged.refused)} |" for judged in refused),
        "\n## Not built from the default configuration",
        _words(unbuilt),
    ]
    return head + "\n".join(parts).rstrip() + "\n"


def _cell(text: str) -> str:
    """Text with lines of source, which Markdown must not take for cells, links or emphasis."""
    return re.sub(r"(?=[|*\[\]])", r"\\", text)


def _words(some: Iterable[Judged]) -> str:
    return (
        "\n" + textwrap.fill(", ".join(f"`{judgment.kind}`" for judgment in some), 120, break_on_hyphens=False) + "\n"
    )


def _percent(difference: float | None) -> str:
    return "" if difference is None else f"{100 * difference:+.1f} %"


def main(kinds: Sequence[str]) -> None:
    """Judges the named architectures and prints them, or all and writes the page."""
    import transformers

    torch.set_num_threads(1)
    judgments = []
    for judgment in all_judged(kinds or whole_models()):  # in the order in which they end
        print(json.dumps(asdict(judgment)), flush=True)
        judgments.append(judgment)
    if not kinds:
        PAGE.write_text(
            page(sorted(judgments, key=lambda judgment: judgment.kind), transformers.__version__, torch.__version__)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
