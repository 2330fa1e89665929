"""Loss in chunks: memory of one chunk's logits, equal compute, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.dry_run.memory_tracker import StorageTracker
from simplan.errors import NotModelledError
from simplan.job import Job
from simplan.model.recompute import recomputation
from simplan.predict import predict
from simplan.program.memory.footprint import layer_footprint
from simplan.rules import check_job
from tests.jobs import job_of, tiny_model

VOCAB, TOKENS, HIDDEN = 8192, 1024, 64
MODEL = tiny_model(
    "llama",
    num_hidden_layers=2,
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    vocab_size=VOCAB,
    seq_len=TOKENS,
    tied_embeddings=False,
)


def chunked(software: str, plan: Any = None) -> Job:
    job = job_of(MODEL, plan, software=software, precision="fp32", num_microbatches=1)
    return job.with_changes({"software.loss": "chunked"})


class _Chunks(torch.autograd.Function):
    """torchtitan's ChunkedLossWrapper: each chunk's backward follows its loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, targets: Any, num_chunks: int, added: Any) -> Any:
        grads, total = [], torch.zeros(())
        for part, wanted in zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True):
            with torch.enable_grad():
                leaf, head = part.detach().requires_grad_(), weight.detach().requires_grad_()
                loss = torch.nn.functional.cross_entropy(leaf @ head.T, wanted, reduction="sum") / len(targets)
            of_part, of_head = torch.autograd.grad(loss, (leaf, head))
            grads.append(of_part)
            added += of_head
            total += loss.detach()
            del of_head, loss
        ctx.save_for_backward(torch.cat(grads), added)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return *ctx.saved_tensors, None, None, None


def test_peak_of_the_head_is_that_of_torchtitans_loop() -> None:
    """Head and loss alone, by torch's allocations; weights and their gradient are there before."""
    job = chunked("torch")
    head = job.software.layers_of(MODEL, job.plan)[-1]
    found = layer_footprint(head, 1, job.software.state(job.training, job.plan), recomputation(head, "none"))
    worst = max(sum(point) for point in (*found.forward, *found.backward))
    predicted = found.activations + found.logits + worst
    weight, added = torch.randn(VOCAB, HIDDEN, requires_grad=True), torch.zeros(VOCAB, HIDDEN)
    norm = torch.nn.RMSNorm(HIDDEN)
    tracker = StorageTracker()
    with tracker.counting():
        hidden, targets = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randint(VOCAB, (TOKENS,))
        loss = _Chunks.apply(norm(hidden), weight, targets, 8, added)  # type: ignore[no-untyped-call]
        torch.autograd.backward(loss)
    measured = tracker.peak_bytes - weight.nbytes - added.nbytes  # which the tracker sees when they are used
    assert predicted == pytest.approx(measured, rel=0.05)


def test_step_time_is_that_of_the_whole_loss() -> None:
    job = chunked("torch")
    assert predict(job).step_time_s == pytest.approx(predict(job.with_changes({"software.loss": "whole"})).step_time_s)


@pytest.mark.parametrize(("software", "plan"), [("torch", {"pp": 2, "schedule": "1f1b"}), ("torchtitan", {"tp": 2})])
def test_pipelines_and_split_heads_are_refused(software: str, plan: dict[str, Any]) -> None:
    with pytest.raises(NotModelledError, match=r"software.loss = chunked: is not modeled yet with"):
        check_job(chunked(software, plan))
