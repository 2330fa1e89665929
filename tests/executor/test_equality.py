"""Losses and gradients of every strategy against one process that knows nothing of plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.data import make_batch
from executor.model import build_stage, cross_entropy
from simplan.program.job import Job

RELATIVE = 1e-9


def one_process(job: Job, num_steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Mean loss and gradients of each step: one mean over all microbatches of all ranks, then AdamW."""
    model = build_stage(job.model, range(len(job.model.layers)), torch.float64, torch.device("cpu"), job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_samples = job.training.global_batch_size
    num_parts = num_samples // job.plan.microbatch_size
    losses, gradients = [], []
    for step in range(num_steps):
        tokens, targets = make_batch(
            job.model.vocab_size,
            job.model.seq_len,
            seed=job.seed,
            step=step,
            first_sample=0,
            num_samples=num_samples,
        )
        parts = [
            cross_entropy(model(x), y) for x, y in zip(tokens.chunk(num_parts), targets.chunk(num_parts), strict=True)
        ]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, gradients


def largest_relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_losses_and_gradients_equal_one_process(finished_run: Any) -> None:
    job = finished_run.job
    num_steps = job.num_warmup_steps + job.num_steps
    losses, gradients = one_process(job, num_steps)
    assert finished_run.measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        seen = set()
        for rank in range(job.plan.num_devices):
            file = finished_run.out_dir / f"gradients.rank{rank}.step{step}.pt"
            for name, found in torch.load(file).items():
                # Of a tied weight on two stages, the head's copy is the embedding's tensor.
                name = name if name in wanted else "layers.0.wte.weight"
                assert largest_relative_difference(found, wanted[name]) < RELATIVE, (step, rank, name)
                seen.add(name)
        assert seen == set(wanted)
