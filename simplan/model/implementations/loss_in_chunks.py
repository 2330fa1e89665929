"""A head whose logits exist for one chunk of tokens at a time: output projection and loss run chunk by chunk.

The backward of a chunk follows its loss, so that forward computes the gradients of hidden states and of the weight,
which backward hands on (torchtitan's ChunkedLossWrapper, Liger's fused linear cross-entropy). Or backward recomputes
the logits of each chunk (TRL's chunked_nll). Or autograd keeps for all chunks what their losses save, and backward goes
from chunk to chunk (torchtune's LinearCrossEntropyLoss).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Self

from pydantic import model_validator

from simplan.base import Count, Spec
from simplan.model.kernel import LOSS, Chunks, Gemm, Kernel, LayerCollective, Pointwise
from simplan.model.layer import Operator, Tensor
from simplan.model.parts.part import FP32_BYTES

LossMode = Literal["whole", "chunked", "recomputed", "fused"]


class ChunkedLoss(Spec):
    """Output projection and loss in chunks of tokens, as a framework or a kernel library computes them.

    Attributes:
        num_chunks: Number of equal chunks of a microbatch; None for one of the others.
        chunk_tokens: Tokens per chunk, of all sequences of a microbatch; None for one of the others.
        sequences: Whole sequences per chunk; None for one of the others. Without any of the three, a chunk has about
            tokens x hidden size / vocabulary tokens, rounded up to a power of two.
        equal: The number of tokens has to be a multiple of the number of chunks.
        chunk_bytes: Bytes of FP32 logits per chunk, at most; more than one chunk are a multiple of four (Unsloth). None
            for one of the others.
        recomputed: Backward recomputes the logits of each chunk; else forward computes all gradients.
        kept: Autograd keeps what the losses of all chunks save, and backward computes gradients chunk by chunk.
        fused: One kernel computes a chunk's loss, and replaces its logits by their gradients.
        in_place: Gradients of the weight are added to the parameter's gradient in forward; else backward returns them.
        wide_gradients: Gradients of hidden states are collected in FP32 and then cast.
        tensor_parallel: The vocabulary can be split over tensor-parallel ranks.
    """

    num_chunks: Count | None = None
    chunk_tokens: Count | None = None
    sequences: Count | None = None
    chunk_bytes: Count | None = None
    equal: bool = False
    recomputed: bool = False
    kept: bool = False
    fused: bool = False
    in_place: bool = False
    wide_gradients: bool = False
    tensor_parallel: bool = False

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        given = [name for name in ("num_chunks", "chunk_tokens", "sequences", "chunk_bytes") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"has {' and '.join(given)}; keep one of them")
        return self

    def chunks_of(self, head: Gemm) -> Chunks:
        """Returns the chunks of an output projection."""
        shrink = -(-head.n // head.k)
        kinds = {"in_forward": not (self.recomputed or self.kept), "in_place": self.in_place, "fused": self.fused}
        size = self.chunk_tokens if self.sequences is None else self.sequences * head.m
        most = None if self.chunk_bytes is None else self.chunk_bytes // (FP32_BYTES * head.n)
        return Chunks(head.m, self.num_chunks, size, shrink, fours_of=most, **kinds)

    @property
    def words(self) -> str:
        """The chunks as text: ``8 chunks, recomputed``."""
        size = f"chunks of {self.chunk_tokens} tokens" if self.chunk_tokens else "chunks"
        size = f"chunks of {self.sequences} sequences" if self.sequences else size
        size = f"chunks of {self.chunk_bytes} bytes" if self.chunk_bytes else size
        kinds = {"recomputed": self.recomputed, "kept": self.kept, "fused": self.fused, "in place": self.in_place}
        kinds["FP32 gradients"] = self.wide_gradients
        number = f"{self.num_chunks} {size}" if self.num_chunks else size
        return ", ".join([number, *(word for word, is_so in kinds.items() if is_so)])


def with_loss_in_chunks(operators: Sequence[Operator], chunked: ChunkedLoss) -> Iterator[Operator]:
    """Operators of a head with output projection and loss in chunks."""
    first = next((i for i, o in enumerate(operators) if isinstance(o.kernel, Gemm) and o.makes[0].logits), None)
    if first is None:  # a head of scores
        yield from operators
        return
    head = operators[first].kernel
    assert isinstance(head, Gemm)
    chunks = chunked.chunks_of(head)
    parts = [_of_chunk(operator, chunks) for operator in operators[first:]]
    if chunked.fused:  # the kernel reads the logits as they are
        parts = [part for part in parts if not part.is_cast]
    yield from operators[:first]
    if chunked.kept:
        yield from _kept(operators[first:], head, chunks)
        return
    if chunked.recomputed:
        total = Tensor(
            "gradient of the weight by earlier chunks", head.weight_elements, None, True, per_microbatch=True
        )
        cast = _weight_gradient(head, fused=False)[1:]
        for part in parts if head.trained else ():
            added = (total, *cast) if part is parts[0] else (total,)
            yield replace(part, backward_scratch=(*part.backward_scratch, *added))
        yield from () if head.trained else parts
        return
    yield from _in_forward(parts, head, chunks, chunked)


def _of_chunk(operator: Operator, chunks: Chunks) -> Operator:
    def parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(replace(tensor, chunks=chunks) if tensor.logits else tensor for tensor in tensors)

    kernel: Kernel | None = operator.kernel
    if isinstance(kernel, Gemm | Pointwise):
        kernel = replace(kernel, chunks=chunks)
    return replace(
        operator,
        kernel=kernel,
        makes=parts(operator.makes),
        forward_scratch=parts(operator.forward_scratch),
        backward_scratch=parts(operator.backward_scratch),
    )


def _kept(operators: Sequence[Operator], head: Gemm, chunks: Chunks) -> Iterator[Operator]:
    """Operators whose saved tensors stay whole, and whose other tensors and gradients are of one chunk.

    Autograd pads the gradient of each chunk of hidden states, and adds it to those of later chunks, as it does with
    gradients of the weight. The losses of other chunks are saved until then.
    """
    saved = {name for operator in operators for name in operator.saves}
    logits = operators[0].makes[0]
    kept = [tensor for operator in operators for tensor in operator.makes if tensor.name in saved and tensor.logits]
    for operator in operators:
        part = _of_chunk(operator, chunks)
        makes = tuple(
            replace(tensor, gradient_chunks=chunks) if tensor.name in saved else one
            for tensor, one in zip(operator.makes, part.makes, strict=True)
        )
        scratch: tuple[Tensor, ...] = ()
        if operator is operators[0]:
            scratch = (Tensor("gradients of hidden states by a chunk", head.m * head.k),)
            if chunks.number is not None:
                others = chunks.number - 1 - head.trained  # after the first one, or the second with its second gradient
                scratch += tuple(replace(tensor, elements=tensor.elements * others // chunks.number) for tensor in kept)
            if head.trained:
                scratch += (
                    Tensor("gradient of the weight by later chunks", head.weight_elements, per_microbatch=True),
                )
        held: tuple[Tensor, ...] = ()
        if operator.kernel is not None and operator.kernel.name == LOSS:  # by the loop and by the function of a chunk
            held += () if head.trained else (Tensor("hidden states of all chunks", head.m * head.k),)
            held += () if logits.name in saved else (replace(logits, logits=False, chunks=chunks),)
        yield replace(
            part,
            makes=makes,
            forward_scratch=(*part.forward_scratch, *held),
            backward_scratch=(*part.backward_scratch, *scratch),
        )


def _in_forward(parts: Sequence[Operator], head: Gemm, chunks: Chunks, chunked: ChunkedLoss) -> Iterator[Operator]:
    """The loop over chunks, of which autograd sees the last operator alone: it returns gradients that exist already."""
    matmul, loss = parts[0], next(o for o in parts if o.kernel is not None and o.kernel.name == LOSS)
    (hidden,), (logits,) = matmul.reads, matmul.makes
    gradient = Tensor("gradients of hidden states", head.m * head.k)
    wide = Tensor("gradients of hidden states in FP32", gradient.elements, FP32_BYTES)
    weight = Tensor("gradient of the weight", head.weight_elements, residual=True, per_microbatch=True)
    returned = (weight,) if head.trained and not chunked.in_place else ()
    collected = (wide,) if chunked.wide_gradients else (gradient,)
    for operator in parts:
        detached = replace(operator, saves=(), saves_for=(), parameters=(), backward_scratch=(), detached=True)
        if operator is matmul:
            yield replace(detached, makes=(logits, *collected, *returned))
        elif isinstance(operator.kernel, LayerCollective):
            number = chunks.number or 1
            yield from [replace(detached, kernel=_of_all(operator.kernel, number))] * number
        else:
            yield replace(detached, reads=(logits.name,)) if operator is loss and chunked.fused else detached
    last = logits.name
    if not chunked.fused:
        for operator in _gradients_of_logits(loss, logits, chunks):
            yield operator
            last = operator.makes[0].name
    names, made = tuple(tensor.name for tensor in collected), (gradient,) if chunked.wide_gradients else ()
    own = _weight_gradient(head, fused=chunked.fused) if head.trained else ()
    if not chunked.fused:  # the gradients of logits are gone when that of the weight is cast
        yield Operator(reads=(last,), forward_scratch=own[:1], detached=True)
        last = hidden
    yield Operator(reads=(last, *names), makes=made, forward_scratch=own, detached=True)
    yield Operator(
        reads=(hidden,),
        saves=tuple(tensor.name for tensor in (gradient, *returned)),
        parameters=matmul.parameters if head.trained else (),
    )


def _of_all(kernel: LayerCollective, number: int) -> LayerCollective:
    """The collective of one of ``number`` chunks."""
    return replace(kernel, elements=-(-kernel.elements // number))


def _gradients_of_logits(loss: Operator, logits: Tensor, chunks: Chunks) -> Iterator[Operator]:
    """Gradients that the backward of a chunk's loss makes: torch's loss consists of two functions, with one each."""
    source, made = loss.reads[0], Tensor("gradients of logits", logits.elements, logits=True, chunks=chunks)
    if not loss.makes:  # one kernel makes them from the logits
        yield Operator(reads=(source,), makes=(made,), detached=True)
        return
    (kept,) = loss.makes
    of_kept = replace(kept, name="gradients of log-probabilities")
    wide = replace(kept, name="gradients of logits in FP32")
    yield Operator(reads=(kept.name,), makes=(of_kept,), detached=True)
    yield Operator(reads=(kept.name, of_kept.name), makes=(wide,), detached=True)
    yield Operator(reads=(wide.name,), makes=(made,), is_cast=True, detached=True)


def _weight_gradient(head: Gemm, *, fused: bool) -> tuple[Tensor, ...]:
    """Gradients of the weight by one chunk: as its matmul writes it, and in the precision in which it is added."""
    own = Tensor("gradient of the weight by a chunk", head.weight_elements, per_microbatch=True)
    cast = replace(own, name=f"{own.name}, cast", widened=True)
    return own, replace(cast, bytes_per_element=FP32_BYTES) if fused else replace(cast, residual=True)
