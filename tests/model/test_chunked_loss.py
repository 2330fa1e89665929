"""Loss in chunks: its memory next to torch's, its time next to published ones, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.dry_run.memory_tracker import StorageTracker
from executor.models.embedding_and_head import OutputHead
from executor.train.loss import LossInChunks
from simplan import catalog
from simplan.errors import SpecError
from simplan.job import Job
from simplan.model.implementations.loss_in_chunks import LossMode
from simplan.model.kernel import LayerCollective
from simplan.model.model import ModelSpec
from simplan.model.recompute import recomputation
from simplan.predict import build_program, cost_model, predict
from simplan.program.memory.footprint import layer_footprint
from simplan.program.program import LayerWork, MemoryCategory, Phase
from simplan.rules import check_job
from tests.jobs import job_of, tiny_model

VOCAB, TOKENS, HIDDEN = 8192, 1024, 64


def model(tokens: int = TOKENS, vocab: int = VOCAB, hidden: int = HIDDEN) -> ModelSpec:
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": vocab, "seq_len": tokens}
    return tiny_model("llama", num_hidden_layers=2, tied_embeddings=False, **sizes)


def with_loss(software: str, loss: str, spec: ModelSpec, plan: Any = None, **training: Any) -> Job:
    job = job_of(spec, plan, software=software, num_microbatches=1, **training)
    return job.with_changes({"software.loss": loss})


class _Head(OutputHead):
    leaves_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lm_head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)


def torchtitans_loop(head: _Head, hidden: Tensor, targets: Tensor) -> Tensor:
    """ChunkedLossWrapper: each chunk's backward adds to the weight's gradient; hidden states' are joined in FP32."""
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    for part, wanted, grad in zip(hidden.chunk(8), targets.chunk(8), of_hidden.chunk(8), strict=True):
        leaf = part.detach().requires_grad_()
        logits = head.lm_head(leaf)
        loss = nn.functional.cross_entropy(logits.float(), wanted, reduction="sum") / len(targets)
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        grad.copy_(leaf.grad)
        leaf.grad = None
        del loss
    return hidden, of_hidden.to(hidden.dtype)  # type: ignore[return-value]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("software", "loss"), [("torch", "chunked"), ("torch", "recomputed"), ("torchtitan", "chunked")]
)
def test_peak_of_head_is_torchs(software: str, loss: LossMode, precision: str) -> None:
    """Head and loss alone, by torch's allocations; weights and their gradients are there before."""
    job = with_loss(software, loss, model(), precision=precision)
    layer = job.software.layers_of(job.model, job.plan)[-1]
    footprint = layer_footprint(layer, 1, job.software.state(job.training, job.plan), recomputation(layer, "none"))
    predicted = (
        footprint.activations
        + footprint.logits
        + max(sum(point) for point in (*footprint.forward, *footprint.backward))
    )
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    if precision == "bf16":
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    head = _Head()
    weight = head.lm_head.weight
    weight.grad = torch.zeros_like(weight)
    tracker = StorageTracker()
    with tracker.counting():
        weight.grad.add_(weight.detach(), alpha=0)  # the tracker sees what is used
        hidden, targets = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (TOKENS,))
        with autocast():
            normed = head(hidden)
            if software == "torchtitan":
                torch.autograd.backward(*torchtitans_loop(head, normed, targets))
        if software == "torch":
            torch.autograd.backward(LossInChunks(head, job.software.chunked_losses[loss], autocast)(normed, targets))
    measured = tracker.peak_bytes - weight.nbytes - weight.grad.nbytes
    assert predicted == pytest.approx(measured, rel=0.05)


def head_s(software: str, loss: str, tokens: int, vocab: int, hidden: int) -> float:
    """Seconds of forward and backward of the head on an H100 with weights in BF16."""
    job = with_loss(software, loss, model(tokens, vocab, hidden), precision="bf16", pure_bf16=True)
    job = Job(job.model, catalog.cluster("dgx-h100", 1), job.training, job.plan, job.software)
    layer, cost = job.software.layers_of(job.model, job.plan)[-1], cost_model(job, None)
    kernels = {Phase.FORWARD: None, Phase.BACKWARD: None, Phase.RECOMPUTE: recomputation(layer, "none").kernels}
    phases = [(phase, kept) for phase, kept in kernels.items() if kept is None or kept]
    return sum(cost.compute(LayerWork(layer, phase, 1, 0, kept)).seconds for phase, kept in phases)


def test_time_of_head_is_as_published() -> None:
    """One H100, BF16, 16,384 tokens x 248,320 x 2,048: huggingface/trl pull request 6858 (2026-08-21), loss_bench."""
    sizes = 16_384, 248_320, 2_048
    assert head_s("transformers", "whole", *sizes) == pytest.approx(0.137, rel=0.1)
    assert head_s("transformers", "fused", *sizes) == pytest.approx(0.32116, rel=0.1)


def test_recomputed_chunks_cost_as_published() -> None:
    """256 tokens per chunk: 1.74 to 1.87 times the whole loss in huggingface/trl pull request 5575 (2026-04-17)."""
    sizes = 8192, 151_936, 2_048
    assert 1.6 < head_s("transformers", "chunked", *sizes) / head_s("transformers", "whole", *sizes) < 2.2


@pytest.mark.parametrize("loss", ["chunked", "recomputed", "fused"])
def test_flops_of_chunks_are_of_the_whole_loss(loss: str) -> None:
    """The last stage of a pipeline has all of it in forward, unless backward recomputes."""
    job = with_loss("torch", loss, model(), {"pp": 2, "schedule": "gpipe"}, precision="fp32")
    chunked, whole = predict(job), predict(job.with_changes({"software.loss": "whole"}))
    assert chunked.mfu is not None
    assert whole.mfu is not None
    assert chunked.step_time_s * chunked.mfu == pytest.approx(whole.step_time_s * whole.mfu)
    assert chunked.step_time_s > whole.step_time_s  # more launches, and sums of gradients
    assert (chunked.hfu == chunked.mfu) == (loss != "recomputed")


REFUSED = {
    "software.loss = chunked: is not modeled yet with tp = 2 for torch": ("torch", "chunked", {"tp": 2}, TOKENS),
    "software.loss = fused: is not modeled yet for torchtitan": ("torchtitan", "fused", {}, TOKENS),
    "software.loss = chunked: is not modeled yet for megatron-core": ("megatron-core", "chunked", {}, TOKENS),
    "software.loss = recomputed: is not modeled yet in recomputed chunks with schedule = zb-h1": (
        *("torch", "recomputed"),
        {"pp": 2, "schedule": "zb-h1"},
        TOKENS,
    ),
    "plan.microbatch_size = 1: gives a rank 1,020 tokens per microbatch, whose loss has 8 equal chunks": (
        "torchtitan",
        "chunked",
        {},
        TOKENS - 4,
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_other_losses_are_refused(sentence: str) -> None:
    software, loss, plan, tokens = REFUSED[sentence]
    with pytest.raises(SpecError) as caught:
        check_job(with_loss(software, loss, model(tokens), plan, precision="bf16"))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("plan", [{"dp_shard": 2}, {"pp": 2, "dp_shard": 2, "zero_stage": 2, "schedule": "1f1b"}])
def test_fsdp_holds_sum_of_chunks_in_fp32(plan: dict[str, Any]) -> None:
    """torch adds unreduced gradients of chunks in the precision of the reduction; those of blocks come later."""
    job = with_loss("torchtitan", "chunked", model(vocab=16 * VOCAB), plan, precision="bf16")
    program = build_program(predict(job))
    rank = program.ranks[-1]
    held = 0
    for op in (program.ops[index] for index in program.by_rank[rank]):
        gradients = [effect for effect in op.memory if effect.category is MemoryCategory.GRADIENTS]
        if any(effect.category is MemoryCategory.LOGITS for effect in op.memory):
            break
        held += sum(effect.after_bytes for effect in gradients)
    assert held == pytest.approx(4 * 16 * VOCAB * HIDDEN, rel=0.01)


def test_each_chunk_of_split_vocabularies_is_reduced() -> None:
    """torchtitan's parallel loss: three all-reduces per chunk, and hidden states once."""
    job = with_loss("torchtitan", "chunked", model(), {"tp": 2}, precision="bf16")
    check_job(job)
    whole = job.with_changes({"software.loss": "whole"})
    chunked_head, whole_head = (
        job_of_head.software.layers_of(job_of_head.model, job_of_head.plan)[-1] for job_of_head in (job, whole)
    )
    of_chunks = [k.elements for k in chunked_head.kernels if isinstance(k, LayerCollective)]
    of_whole = [k.elements for k in whole_head.kernels if isinstance(k, LayerCollective)]
    assert sum(of_chunks) == sum(of_whole)
    assert len(of_chunks) == len(of_whole) + 3 * 7
