"""Samples that can be learned: their entropy, their independence of the split, and what real runs make of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor.run import run_job
from executor.train.data import IGNORED, model_batch
from simplan.model.model import ModelSpec
from simplan.runs.measurement import Measurement
from simplan.training import DataName, TrainingSpec, least_loss
from simplan.validate.losses import LossCurve
from tests.executor.conftest import make_job, make_model

LM = make_model(vocab_size=16, seq_len=64)
VIT = ModelSpec(
    family="vit",
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    image_size=16,
    patch_size=4,
    num_classes=20,
)

NUM_STEPS = 120


def sequences(spec: ModelSpec, num_samples: int) -> NDArray[np.int64]:
    """All tokens, (num_samples, seq_len + 1)."""
    tokens, targets = model_batch(spec, seed=3, step=0, first_sample=0, num_samples=num_samples, data="markov")
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return torch.cat((tokens, targets[:, -1:]), dim=1).numpy()


def conditional_entropy(contexts: NDArray[np.int64], following: NDArray[np.int64]) -> float:
    """Entropy of what follows a context, by counting, in nats."""

    def entropy(values: NDArray[np.int64]) -> float:
        counts = np.unique(values, return_counts=True)[1]
        return float(-np.sum(counts * np.log(counts / counts.sum())) / counts.sum())

    return entropy(contexts * 1000 + following) - entropy(contexts)


def test_entropy_rate_is_that_of_many_samples() -> None:
    """By counting pairs of tokens and what follows them; one token tells less, and none still less."""
    tokens = sequences(LM, 6000)
    before, token, following = tokens[:, :-2].ravel(), tokens[:, 1:-1].ravel(), tokens[:, 2:].ravel()
    rate = least_loss("markov", LM.vocab_size)
    assert rate is not None
    by_order = [conditional_entropy(contexts, following) for contexts in (0 * token, token, before * 100 + token)]
    assert by_order[2] == pytest.approx(rate, abs=0.005)
    assert by_order[0] > by_order[1] + 0.3
    assert by_order[1] > by_order[2] + 0.3
    counts = np.sort(np.bincount(tokens.ravel()))
    assert counts[-1] > 4 * counts[0], "tokens are as unequal as words"


def test_first_tokens_of_documents_have_few_successors() -> None:
    """The least loss is that of all positions: no token before a document decides about it."""
    spec = make_model(vocab_size=16, document_lengths=(10, 14))
    tokens, targets = model_batch(spec, seed=3, step=0, first_sample=0, num_samples=2000, data="markov")
    assert (targets[:, [9, 23]] == IGNORED).all()
    assert (tokens >= 0).all()
    successors = [
        {(token, target) for token, target in zip(tokens[:, at].tolist(), targets[:, at].tolist(), strict=True)}
        for at in (0, 10, 11)
    ]
    assert len(successors[0]) == 4 * spec.vocab_size < len(successors[2])
    assert successors[1] <= successors[0]


@pytest.mark.parametrize(("spec", "data"), [(LM, "markov"), (VIT, "gratings")])
def test_samples_do_not_depend_on_the_split(spec: ModelSpec, data: DataName) -> None:
    def batch(first: int, num: int, seed: int = 1, step: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        return model_batch(spec, seed=seed, step=step, first_sample=first, num_samples=num, data=data)

    whole = batch(0, 8)
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([batch(0, 3)[index], batch(3, 4)[index], batch(7, 1)[index]]))
    for other in (batch(0, 8, seed=2), batch(0, 8, step=6), batch(8, 8)):
        assert not torch.equal(whole[0], other[0])


def test_gratings_show_their_class() -> None:
    """The peak of an image's spectrum, which each class has elsewhere."""
    images, labels = model_batch(VIT, seed=0, step=0, first_sample=0, num_samples=400, data="gratings")
    power = np.abs(np.fft.rfft2(images.sum(dim=1).numpy())) ** 2
    power[:, 0, 0] = power[:, 9:, 0] = 0  # means, and inverses of the waves before
    peaks: dict[int, set[int]] = {}
    for label, peak in zip(labels[:, 0].tolist(), power.reshape(400, -1).argmax(axis=1).tolist(), strict=True):
        peaks.setdefault(label, set()).add(peak)
    assert len(peaks) == VIT.num_classes
    assert all(len(of_class) == 1 for of_class in peaks.values())
    assert len(set.union(*peaks.values())) == VIT.num_classes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    """Two ranks with whole gradients, and with FP16 gradients."""
    model = make_model(vocab_size=16, seq_len=32, hidden_size=64)
    training = TrainingSpec(global_batch_size=16, precision="fp32", data="markov")
    return {
        name: run_job(
            make_job(
                dp=2,
                model=model,
                training=training,
                plan={"dp_replicate": 2, **plan},
                num_steps=NUM_STEPS,
                num_warmup_steps=0,
            ),
            tmp_path_factory.mktemp(name),
        )
        for name, plan in (("whole", {}), ("fp16", {"compression": "fp16"}))
    }


@pytest.mark.slow
def test_loss_falls_towards_the_entropy(runs: dict[str, Measurement]) -> None:
    run = runs["whole"]
    curve = LossCurve.of(run)
    assert curve is not None
    uniform = math.log(16)
    assert curve.losses[0] == pytest.approx(uniform, abs=0.1)
    assert curve.least_loss < curve.losses[-1] < curve.least_loss + 0.5 * (uniform - curve.least_loss)
    assert curve.num_samples == tuple(range(16, 16 * (NUM_STEPS + 1), 16))
    assert [point.loss for point in run.loss_curve] == list(run.losses)
    assert curve.seconds[-1] == pytest.approx(sum(run.step_times_s))


@pytest.mark.slow
def test_fp16_gradients_cost_no_samples(runs: dict[str, Measurement]) -> None:
    """Within 0.0001 nats of whole gradients, throughout."""
    whole, fp16 = (np.array(run.losses) for run in runs.values())
    assert np.abs(whole - fp16).max() < 1e-4
    assert not np.array_equal(whole, fp16)
