"""Synthetic samples that do not depend on the plan: sample i of step n is the same for one process and any split."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch import Generator, Tensor

from simplan.model.families import FAMILIES
from simplan.model.model import ModelSpec
from simplan.plan.shard import Shard
from simplan.training import DataName, successor_probabilities

IGNORED = -100
"""Target of a token without a loss, the ignore_index of torch's cross-entropy."""

_MASKED_SHARE = 0.15  # Devlin et al. 2019, section 3.1
_MASK_TOKEN = 0
_START_TOKEN = 0
_FLAT_HEAD = 2.7  # of word frequencies by rank (Mandelbrot 1953)


def make_batch(
    vocab_size: int, seq_len: int, *, seed: int, step: int, first_sample: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, (num_samples, seq_len) int64 each, of consecutive samples of one step.

    Args:
        vocab_size: Number of tokens of the vocabulary, which are sampled uniformly.
        first_sample: Index in the global batch of the first requested sample.
    """

    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        sample = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
        return sample[:-1], sample[1:]

    return _stacked(draw, seed, step, first_sample, num_samples)


def markov_batch(
    vocab_size: int,
    seq_len: int,
    *,
    seed: int,
    step: int,
    first_sample: int,
    num_samples: int,
    starts: Collection[int] = (0,),
) -> tuple[Tensor, Tensor]:
    """As ``make_batch``, with tokens of a Markov chain of order 2 that depends on the vocabulary and the seed.

    A token and the parity of the token before it allow ``NUM_SUCCESSORS`` tokens, with ``successor_probabilities``.
    Successors are sampled by their frequency, which follows Zipf's law, so that tokens are as unequal as words.

    Args:
        starts: Positions of tokens that no token precedes: those that begin a sequence or a packed document. Their
            successors are those after an even token.
    """
    probabilities = torch.tensor(successor_probabilities(vocab_size))

    def draw(generator: Generator) -> tuple[Tensor, Tensor]:
        first = torch.multinomial(_frequencies(vocab_size), 1, generator=generator)
        return first, torch.multinomial(probabilities, seq_len, replacement=True, generator=generator)

    first, ranks = _stacked(draw, seed, step, first_sample, num_samples)
    successors = _successors(vocab_size, seed)
    tokens = [first[:, 0]]
    parity = torch.zeros_like(tokens[0])
    for position in range(seq_len):
        if position in starts:
            parity = torch.zeros_like(parity)
        tokens.append(successors[parity, tokens[-1], ranks[:, position]])
        parity = tokens[-2] % 2
    return torch.stack(tokens[:-1], dim=1), torch.stack(tokens[1:], dim=1)


def _frequencies(vocab_size: int) -> Tensor:
    return 1.0 / (torch.arange(vocab_size) + 1 + _FLAT_HEAD)


@lru_cache(maxsize=1)
def _successors(vocab_size: int, seed: int) -> Tensor:
    """Different tokens that follow each context, (parity, vocab_size, successors), sampled without replacement."""
    num_contexts, num_successors = 2 * vocab_size, len(successor_probabilities(vocab_size))
    generator = torch.Generator().manual_seed(-1 - seed)  # samples have the seeds from 0 on
    frequencies = _frequencies(vocab_size)
    successors = torch.full((num_contexts, num_successors), -1)
    for rank in range(num_successors):
        missing = torch.arange(num_contexts)
        while len(missing):
            drawn = torch.multinomial(frequencies, len(missing), replacement=True, generator=generator)
            is_new = (successors[missing] != drawn[:, None]).all(dim=1)
            successors[missing[is_new], rank] = drawn[is_new]
            missing = missing[~is_new]
    return successors.view(2, vocab_size, num_successors)


@lru_cache(maxsize=1)
def _waves(image_size: int, num_classes: int) -> Tensor:
    """Periods of each class's grating along the height and width of an image, (num_classes, 2), the longest first."""
    max_frequency = (image_size - 1) // 2
    periods = range(-max_frequency, max_frequency + 1)
    waves = [
        (y, x) for y in range(max_frequency + 1) for x in periods if (y, x) > (0, 0)
    ]  # its inverse is the same wave
    return torch.tensor(sorted(waves, key=lambda wave: (math.hypot(*wave), wave))[:num_classes])


def model_batch(
    spec: ModelSpec, *, seed: int, step: int, first_sample: int, num_samples: int, data: DataName = "random"
) -> tuple[Tensor, Tensor]:
    """Inputs of a model, and targets of its head.

    Language models get tokens as in ``make_batch``. Packed documents have the same positions in every sequence; targets
    of padding (ordinary tokens) and of the last tokens of documents are ``IGNORED``. Masked language models have the
    same number of masked tokens in every sequence; all other targets are ``IGNORED``. Encoder-decoder models get the
    tokens of both, encoder first; the decoder's tokens are the targets, shifted by one. Vision models get images
    (num_samples, channels, height, width) in FP32 and their classes (num_samples, 1) int64.

    Args:
        seed, step, first_sample, num_samples: See ``make_batch``.
        data: ``markov`` for tokens of ``markov_batch``. ``gratings`` for images that show the class: a sinusoidal
            grating of amplitude 1 and random phase, plus noise of standard deviation 1.
    """

    def masked(generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(spec.vocab_size, (spec.seq_len,), generator=generator)
        num_masked = max(1, round(_MASKED_SHARE * spec.seq_len))
        places = torch.randperm(spec.seq_len, generator=generator)[:num_masked]
        targets = torch.full_like(tokens, IGNORED)
        targets[places] = tokens[places]
        return tokens.index_fill(0, places, _MASK_TOKEN), targets

    def pair(generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(spec.vocab_size, (spec.seq_len,), generator=generator)
        targets = torch.randint(spec.vocab_size, (spec.decoder_seq_len,), generator=generator)
        return torch.cat((tokens, targets.roll(1).index_fill(0, torch.tensor([0]), _START_TOKEN))), targets

    def image(generator: Generator) -> tuple[Tensor, Tensor]:
        shape = (spec.num_channels, spec.image_size, spec.image_size)
        noise = torch.randn(shape, generator=generator)
        label = torch.randint(spec.num_classes, (1,), generator=generator)
        if data == "random":
            return noise, label
        phase = torch.rand(1, generator=generator)
        along_y, along_x = _waves(spec.image_size, spec.num_classes)[label[0]]
        places = torch.arange(spec.image_size) / spec.image_size
        return noise + torch.cos(math.tau * (along_y * places[:, None] + along_x * places + phase)), label

    match FAMILIES[spec.family].task:
        case "next_token":
            starts = accumulate(spec.document_lengths, initial=0)
            batch = partial(markov_batch, starts=frozenset(starts)) if data == "markov" else make_batch
            tokens, targets = batch(
                spec.vocab_size,
                spec.seq_len,
                seed=seed,
                step=step,
                first_sample=first_sample,
                num_samples=num_samples,
            )
            if spec.document_lengths:
                targets.masked_fill_(~_has_target(spec), IGNORED)
            return tokens, targets
        case "masked_token":
            return _stacked(masked, seed, step, first_sample, num_samples)
        case "target_tokens":
            return _stacked(pair, seed, step, first_sample, num_samples)
        case "class":
            return _stacked(image, seed, step, first_sample, num_samples)
        case "own":
            raise ValueError("CapturedData makes the batches of captured models")


def in_pairs(samples: Tensor, microbatch_size: int) -> Tensor:
    """Consecutive pairs of sequences, by microbatch the chosen ones first.

    >>> in_pairs(torch.arange(8), 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]

    Args:
        samples: (2 * pairs, ...)
        microbatch_size: Pairs of a microbatch.
    """
    return samples.view(-1, microbatch_size, 2, *samples.shape[1:]).transpose(1, 2).flatten(0, 2)


def _has_target(spec: ModelSpec) -> Tensor:
    """Mask of tokens that are followed by a token of the same document, (seq_len) bool; False for padding."""
    has_target = torch.zeros(spec.seq_len, dtype=torch.bool)
    start = 0
    for length in spec.document_lengths:
        has_target[start : start + length - 1] = True
        start += length
    return has_target


def input_shape(spec: ModelSpec, shard: Shard) -> tuple[int, ...]:
    """Shape of one rank's part of a sample: tokens, tokens of encoder and decoder, or an image."""
    match FAMILIES[spec.family].inputs:
        case "tokens":
            return (spec.seq_len // shard.cp,)
        case "token_pairs":
            return (spec.seq_len + spec.decoder_seq_len,)
        case "images":
            return spec.num_channels, spec.image_size, spec.image_size
        case "captured":
            raise ValueError("pipelines of captured models are refused")


def _stacked(
    draw: Callable[[Generator], tuple[Tensor, Tensor]], seed: int, step: int, first_sample: int, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Consecutive samples, each sampled with a separate generator."""
    samples = [
        draw(torch.Generator().manual_seed((seed * 100_003 + step) * 1_000_003 + sample))
        for sample in range(first_sample, first_sample + num_samples)
    ]
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)
