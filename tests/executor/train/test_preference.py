"""Preference training: ranks against one process with the papers' formulas, and torch's account against predictions."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import kl_div, log_softmax, logsigmoid, softmax
from torch.utils.flop_counter import FlopCounterMode

from executor.distributed.mesh import ParallelDims
from executor.models.lora import DoraLinear, LoraEmbedding, LoraLinear
from executor.models.model import build_stage
from executor.train.data import model_batch
from executor.train.loss import cross_entropy
from executor.train.preference import preference_loss
from simplan import catalog
from simplan.job import Job
from simplan.model.model import ModelSpec
from simplan.model.recompute import Recomputation
from simplan.plan.plan import ParallelPlan
from simplan.program.memory.footprint import layer_footprint
from simplan.runs.run_spec import RunSpec
from simplan.training import PreferenceSpec, Task, TrainingSpec
from tests.executor.conftest import LLAMA, MICROBATCH_SIZE, NUM_MICROBATCHES, make_job, make_model
from tests.executor.distributed.test_level2 import assert_issued_as_predicted
from tests.executor.dry_run.accounting import account, job_of, predicted_peak
from tests.executor.train.reference_optimizers import reference_optimizer
from tests.executor.train.test_equality import RELATIVE, run_in_float64
from tests.program.memory.test_optimizer_states import LargestSum
from tests.support.slow import slow_except

SECOND = PreferenceSpec(reference="second_model")
CASES: dict[str, tuple[Task, dict[str, Any], dict[str, Any], PreferenceSpec | None]] = {
    "dpo-adapters-off-fsdp2": ("dpo", {"dp_shard": 2}, {**LLAMA, "lora_rank": 4}, None),
    "dpo-second-model-fsdp2": ("dpo", {"dp_shard": 2}, LLAMA, None),
    "dpo-second-model-tied-fsdp2": ("dpo", {"dp_shard": 2}, {}, None),
    "dpo-second-model-whole-fsdp2": (
        "dpo",
        {"dp_shard": 2},
        LLAMA,
        PreferenceSpec(reference="second_model", reference_sharded=False),
    ),
    "dpo-dora-off-ddp2": ("dpo", {"dp_replicate": 2}, {**LLAMA, "lora_rank": 4, "lora_dora": True}, None),
    "dpo-adapters-off-ddp2": ("dpo", {"dp_replicate": 2}, {**LLAMA, "lora_rank": 4}, None),
    "dpo-second-model-of-adapters-ddp2": ("dpo", {"dp_replicate": 2}, {**LLAMA, "lora_rank": 4}, SECOND),
    "dpo-recomputed-zero2-2": ("dpo", {"dp_shard": 2, "zero_stage": 2, "recompute": "full"}, LLAMA, None),
    "kto-second-model-ddp2": ("kto", {"dp_replicate": 2}, LLAMA, None),
    "kto-second-model-fsdp2": ("kto", {"dp_shard": 2}, LLAMA, None),
    "kto-second-model-tied-fsdp2": ("kto", {"dp_shard": 2, "recompute": "full"}, {}, None),
    "dpo-adapters-off-embedding-fsdp2": (
        "dpo",
        {"dp_shard": 2},
        {**LLAMA, "lora_rank": 4, "lora_targets": ("embedding", "all")},
        None,
    ),
    "kto-adapters-off-fsdp2": ("kto", {"dp_shard": 2}, {**LLAMA, "lora_rank": 4}, None),
    "orpo-fsdp2": ("orpo", {"dp_shard": 2}, LLAMA, None),
    "orpo-adapters-ddp2": ("orpo", {"dp_replicate": 2}, {"lora_rank": 4}, None),
    "simpo-ddp2": ("simpo", {"dp_replicate": 2, "bucket_bytes": 40_000}, {}, None),
    "asft-fsdp2": ("asft", {"dp_shard": 2}, LLAMA, None),
    "asft-ddp2": ("asft", {"dp_replicate": 2}, {}, None),
    "reward-fsdp2-tied": ("reward", {"dp_shard": 2}, {**LLAMA, "tied_embeddings": True}, None),
    "reward-adapters-ddp2": ("reward", {"dp_replicate": 2}, {**LLAMA, "lora_rank": 4}, None),
}
"""Task, plan, model and reference of runs on two ranks."""


def job_for(task: Task, plan: dict[str, Any], model: dict[str, Any], preference: PreferenceSpec | None) -> RunSpec:
    batch = NUM_MICROBATCHES * MICROBATCH_SIZE * 2
    training = TrainingSpec(global_batch_size=batch, precision="fp32", task=task, preference=preference)
    return make_job(model=make_model(**model), plan=plan, training=training, dtype="fp64")


@pytest.mark.parametrize("name", slow_except(["dpo-adapters-off-ddp2"], CASES))
def test_ranks_equal_one_process_with_the_formulas(name: str, tmp_path: Path) -> None:
    """Losses and gradients of every step, and what is issued: gathers of the passes among it."""
    job = job_for(*CASES[name])
    run = run_in_float64(job, tmp_path)
    losses, gradients = one_process(job, job.num_all_steps)
    assert run.measurement.losses == pytest.approx(losses, rel=RELATIVE)
    for step, wanted in enumerate(gradients):
        for rank in range(2):
            of_rank = torch.load(tmp_path / f"gradients.rank{rank}.step{step}.pt")
            assert of_rank.keys() == wanted.keys()
            for key, gradient in of_rank.items():
                largest = float(wanted[key].abs().max())
                assert float((gradient - wanted[key]).abs().max()) < RELATIVE * largest, (step, rank, key)
    assert_issued_as_predicted(run)


def one_process(job: RunSpec, num_steps: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Mean loss and gradients of each step, one sequence after the other."""
    spec, layers = job.model, range(len(job.model.layers))
    model = build_stage(spec, layers, torch.float64, torch.device("cpu"), job.seed)
    optimizer = reference_optimizer(job.training, list(model.parameters()), [])
    per_sample, size = job.training.sequences_per_sample, job.plan.microbatch_size
    if job.training.reference(has_adapters=spec.lora_rank > 0) == "second_model":
        compared = build_stage(spec.without_training, layers, torch.float64, torch.device("cpu"), job.seed)
    else:  # B = 0 is no adapter, and magnitudes of rows are those of W
        compared = copy.deepcopy(model)
        for module in compared.modules():
            if isinstance(module, LoraLinear | LoraEmbedding):
                nn.init.zeros_(module.lora_b.weight)
            if isinstance(module, DoraLinear):
                module.magnitude.data = torch.linalg.norm(module.weight, dim=1)
    losses, gradients = [], []
    for step in range(num_steps):
        number = job.training.global_batch_size * per_sample
        tokens, targets = model_batch(spec, seed=job.seed, step=step, first_sample=0, num_samples=number)
        parts = []
        for first in range(0, number, size * per_sample):
            part = slice(first, first + size * per_sample)
            parts.append(loss_of(job, model, compared, tokens[part], targets[part]))
        loss = torch.stack(parts).mean()
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return losses, gradients


def loss_of(job: RunSpec, model: nn.Module, compared: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Loss of consecutive pairs or examples; ``compared`` is the reference model."""
    task, half = job.training.task, tokens.shape[1] // 2
    beta = 0.1

    def by_token(of: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return log_softmax(of(x[None]), -1)[0].gather(1, y[:, None])[:, 0]

    def completion(of: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return by_token(of, x, y)[half:].sum()

    def reference(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return completion(compared, x, y)

    if task == "kto":
        others = range(-1, len(tokens) - 1)
        wrong = [(torch.cat((tokens[i, :half], tokens[j, half:])), torch.cat((targets[i, :half], targets[j, half:])))
                 for i, j in enumerate(others)]  # fmt: skip
        with torch.no_grad():
            terms = [completion(model, *pair) - reference(*pair) for pair in wrong]
        divergence = max(0.0, math.fsum(map(float, terms)) / len(terms))
        ratios = [completion(model, x, y) - reference(x, y) for x, y in zip(tokens, targets, strict=True)]
        signs = [1 if i % 2 == 0 else -1 for i in range(len(ratios))]
        losses = [1 - torch.sigmoid(beta * s * (r - divergence)) for s, r in zip(signs, ratios, strict=True)]
        return torch.stack(losses).mean()
    if task == "asft":
        terms = []
        for x, y in zip(tokens, targets, strict=True):
            trained, other = log_softmax(model(x[None])[0], -1), log_softmax(compared(x[None])[0], -1).detach()
            of_targets = trained.gather(1, y[:, None])[:, 0]
            apart = (other.exp() * (other - trained)).sum(-1)
            terms.append((-of_targets * of_targets.detach().exp() + beta * apart).mean())
        return torch.stack(terms).mean()
    losses, nll = [], torch.zeros((), dtype=torch.float64)
    for first in range(0, len(tokens), 2):
        (chosen, rejected), (y_chosen, y_rejected) = tokens[first : first + 2], targets[first : first + 2]
        if task == "reward":
            losses.append(-logsigmoid(model(chosen[None])[0, -1, 0] - model(rejected[None])[0, -1, 0]))
            continue
        of_chosen, of_rejected = completion(model, chosen, y_chosen), completion(model, rejected, y_rejected)
        if task == "dpo":
            margin = of_chosen - reference(chosen, y_chosen) - of_rejected + reference(rejected, y_rejected)
            losses.append(-logsigmoid(beta * margin))
        elif task == "simpo":
            losses.append(-logsigmoid(2.0 * (of_chosen - of_rejected) / half - 1.0))
        else:
            p, q = torch.exp(of_chosen / half), torch.exp(of_rejected / half)
            losses.append(-beta * logsigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q))))
            nll = nll - by_token(model, chosen, y_chosen).sum() / targets[::2].numel()
    return torch.stack(losses).mean() + nll


SMALL: dict[str, Any] = {
    "family": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 4000,
    "seq_len": 128,
    "tied_embeddings": False,
}
PEAKS: dict[str, tuple[Task, dict[str, Any], int, str, dict[str, Any]]] = {
    "dpo, adapters off, fsdp2": ("dpo", {"dp_shard": 2}, 8, "bf16", {}),
    "dpo, second model, fsdp2": ("dpo", {"dp_shard": 2}, 0, "bf16", {}),
    "dpo, second model, ddp2": ("dpo", {"dp_replicate": 2}, 0, "fp32", {}),
    "dpo, second model under autocast": ("dpo", {}, 0, "bf16", {}),
    "dpo, second model of adapters, fsdp2": ("dpo", {"dp_shard": 2}, 8, "bf16", {"preference": SECOND}),
    "dpo, precomputed": ("dpo", {}, 8, "bf16", {"preference": PreferenceSpec(reference="precomputed")}),
    "dpo, adapters off, recomputed": ("dpo", {"recompute": "full"}, 8, "bf16", {}),
    "kto, second model, fsdp2": ("kto", {"dp_shard": 2}, 0, "fp32", {}),
    "kto, adapters off": ("kto", {}, 8, "bf16", {}),
    "orpo, fsdp2": ("orpo", {"dp_shard": 2}, 0, "bf16", {}),
    "simpo": ("simpo", {}, 8, "fp32", {}),
    "asft, fsdp2": ("asft", {"dp_shard": 2}, 0, "bf16", {}),
    "asft, ddp2": ("asft", {"dp_replicate": 2}, 0, "fp32", {}),
    "reward, adapters": ("reward", {}, 8, "fp32", {}),
    "reward, ddp2": ("reward", {"dp_replicate": 2}, 0, "bf16", {}),
}
"""Task, plan, rank of adapters, precision and keys of the training."""


@pytest.mark.parametrize("name", slow_except([*PEAKS][:1], PEAKS))
def test_peak_is_that_of_torch(name: str) -> None:
    """To 0.2 percent, which indices, masks and log-probabilities of tokens are that no prediction counts."""
    task, plan, rank, precision, fields = PEAKS[name]
    model = ModelSpec(**SMALL, lora_rank=rank)
    job = job_of(model, {"microbatch_size": 4, **plan}, 2, precision, task=task, **fields)
    assert predicted_peak(job, 0).total_bytes == pytest.approx(account(job, 0).total_bytes, rel=2e-3)


def test_logits_in_chunks_leave_none_next_to_the_reference() -> None:
    """Log-probabilities chunk by chunk, with logits that backward recomputes; the rest as in the chunks of others."""
    job = job_of(ModelSpec(**SMALL, lora_rank=8), {"microbatch_size": 4}, 1, "bf16", task="dpo")
    whole = predicted_peak(job, 0).total_bytes
    job = job.model_copy(update={"software": catalog.software("torch").model_copy(update={"loss": "recomputed"})})
    peak_bytes = account(job, 0).total_bytes
    assert predicted_peak(job, 0).total_bytes == pytest.approx(peak_bytes, rel=0.03)
    assert peak_bytes < 0.6 * whole


@pytest.mark.parametrize("task", ["dpo", "kto", "orpo", "simpo", "reward"])
@pytest.mark.parametrize("rank", [0, 8])
def test_model_flops_are_those_that_torch_counts(task: Task, rank: int) -> None:
    """FLOPs of a step, with the passes of the reference and of mismatched completions."""
    meta = torch.device("meta")
    job = job_of(ModelSpec(**SMALL, lora_rank=rank), {}, 1, "fp32", task=task)
    said = Job(job.model, catalog.cluster("dgx-h100", 1), job.training, job.plan, job.software)
    layers = range(len(job.model.layers))
    stage = build_stage(job.model, layers, torch.float32, meta, seed=0)
    loss = preference_loss(job, cross_entropy, meta, ParallelDims(), None)
    tokens, targets = model_batch(job.model, seed=0, step=0, first_sample=0, num_samples=said.sequences_per_step)
    with FlopCounterMode(display=False) as counter:
        loss(stage, tokens.to(meta), targets.to(meta)).backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() == pytest.approx(said.flops_per_step(full_attention=True), rel=5e-3)


def test_divergence_keeps_and_takes_what_torch_does() -> None:
    """The loss of ASFT as LLaMA-Factory writes it (train/trainer_utils.py, ``asft_loss_func``), of BF16 logits."""
    tokens, vocabulary, width = 64, 512, 32
    model = ModelSpec(
        family="llama", num_hidden_layers=1, hidden_size=width, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, vocab_size=vocabulary, seq_len=tokens, objective="divergence",
    )  # fmt: skip
    software, plan = catalog.software("accelerate"), ParallelPlan()
    state = software.state(TrainingSpec(global_batch_size=1, precision="bf16", pure_bf16=True), plan)
    head = software.layers_of(model, plan)[-1]
    predicted = layer_footprint(head, 2, state, Recomputation(frozenset(tensor.name for tensor in head.saved)))

    hidden = torch.randn(2, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, requires_grad=True)
    reference = torch.randn(2, tokens, vocabulary, dtype=torch.bfloat16)
    targets = torch.arange(2 * (tokens - 1))
    memory = LargestSum([hidden, weight, reference, targets])
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() >= 2 * (tokens - 1) * vocabulary:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), memory:
        full_logits = hidden @ weight.t()
        logits = full_logits.float()
        trained, other = (of_model[:, :-1].contiguous().flatten(0, 1) for of_model in (logits, reference))
        entropy = torch_cross_entropy(trained, targets, reduction="none")
        log_probs, probs = log_softmax(trained, dim=-1), softmax(other, dim=-1)
        divergence = kl_div(log_probs, probs, reduction="none").sum(-1)
        loss = (entropy * torch.exp(-entropy).detach()).mean() + 0.1 * divergence.mean()
        assert sum(saved.values()) == pytest.approx(predicted.logits, rel=0.02)
        most_elements = max(sum(point) for point in predicted.forward) + predicted.logits
        assert memory.most_bytes == pytest.approx(most_elements, rel=0.02)
        del loss
