"""Sizes of a transformer on one tensor- and context-parallel rank, and its tensor-parallel communication.

Tensor parallelism is Megatron's (Shoeybi et al. 2019): the first matrix of a pair is split by columns, the second by
rows. Without sequence parallelism, forward all-reduces outputs of the second, and backward all-reduces input gradients
of the first. With sequence parallelism (Korthikanti et al. 2022), tokens are all-gathered before the first and
reduce-scattered after the second. torch's DTensor saves the gathered tokens for backward. Megatron-LM saves each rank's
own tokens and gathers them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from simplan.model.layer import CollectiveKind, Gemm, LayerCollective, Operator, ParameterSpec, Pointwise, Role, Tensor

if TYPE_CHECKING:  # the model unfolds into layers and so imports this module
    from simplan.model.model import ModelSpec
    from simplan.plan.shard import Shard

_K = CollectiveKind


class RankShare(NamedTuple):
    """Sizes on one rank, for one sequence.

    Attributes:
        tokens: Tokens where matrices are applied.
        own_tokens: Tokens where norms and residuals are computed: fewer with sequence parallelism.
        hidden: Hidden size, unsplit.
        heads, kv_heads, head_dim: Query heads, key and value heads, and width of a head.
        intermediate: Columns of the MLP.
        vocab: Rows of the embedding, or classes of a model without one.
        documents: Lengths of the documents packed into a sequence, or of the parts of them that the ranks of a ring
            have; empty for one document.
    """

    shard: Shard
    tokens: int
    own_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    documents: tuple[int, ...] = ()

    @property
    def q(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Columns of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def hidden_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the hidden states between layers."""
        return ((self.own_tokens, self.hidden),)

    @property
    def logits_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the logits."""
        return ((self.tokens, self.vocab),)

    @property
    def partial(self) -> bool:
        """True if parameters outside of matmul pairs have partial gradients (sequence parallelism)."""
        return self.shard.sequence_parallel

    @property
    def suffix(self) -> str:
        """Description of the split in a layer's key; empty for an unsplit layer."""
        shard = self.shard
        parts = []
        if shard.tp > 1:
            parts += [f",tp{shard.tp}", ",sp" if shard.sequence_parallel else ""]
        if shard.cp > 1:
            parts.append(f",cp{shard.cp}:{shard.cp_comm}")
        return "".join(parts)


def share_of(model: ModelSpec, shard: Shard) -> RankShare:
    """The sizes of a model on one rank; the degrees divide what they split."""
    tp, tokens = shard.tp, model.seq_len // shard.cp
    vocab = model.vocab_size or model.num_classes
    for size in (model.num_attention_heads, model.num_key_value_heads, model.intermediate_size, vocab):
        assert size % tp == 0, (size, tp)
    assert shard.cp == 1 or model.seq_len % (2 * shard.cp) == 0
    split_tokens = tp if shard.sequence_parallel else 1
    assert tokens % split_tokens == 0
    return RankShare(
        shard,
        tokens,
        tokens // split_tokens,
        model.hidden_size,
        model.num_attention_heads // tp,
        model.num_key_value_heads // tp,
        model.head_dim,
        model.intermediate_size // tp,
        vocab // tp,
        _documents(model, shard),
    )


def _documents(model: ModelSpec, shard: Shard) -> tuple[int, ...]:
    """Documents of a rank's attention: in a ring, its part of each."""
    if len(model.segments) == 1:
        return ()
    parts = shard.cp if shard.cp_comm == "ring" else 1
    return tuple(length // parts for length in model.document_lengths)


def for_columns(source: str, share: RankShare, rows: int = 0, width: int = 0) -> tuple[tuple[Operator, ...], str]:
    """The input of column-parallel matrices, with the tokens of all tensor-parallel ranks.

    Returns the operators before the matrices, and the name of the tensor that the matrices read.

    Args:
        source: Name of the tensor with a rank's own tokens.
        rows: Rows of the input, of one sequence; 0 for ``share.tokens``.
        width: Elements of a row; 0 for the hidden size.
    """
    elements = (rows or share.tokens) * (width or share.hidden)
    if share.shard.tp == 1:
        return (), source
    split = share.shard.sequence_parallel
    made = Tensor(f"gathered {source}" if split else f"{source} of all ranks", elements)
    forward, backward = (_K.ALL_GATHER, _K.REDUCE_SCATTER) if split else (None, _K.ALL_REDUCE)
    collective = LayerCollective(source, "tp", forward, backward, elements)
    operator = Operator(kernel=collective, reads=(source,), makes=(made,), in_place=not split, passes=not split)
    return (operator,), made.name


def regathered(operators: Sequence[Operator]) -> Iterator[Operator]:
    """Operators of a layer whose matmuls save a rank's own tokens; backward gathers the others again (Megatron-LM)."""
    sources: dict[str, LayerCollective] = {}
    last: dict[str, int] = {}
    trained: set[str] = set()
    for index, operator in enumerate(operators):
        kernel = operator.kernel
        if (
            isinstance(kernel, LayerCollective)
            and (kernel.axis, kernel.forward) == ("tp", _K.ALL_GATHER)
            and operator.reads
        ):
            sources[operator.makes[0].name] = kernel
        elif isinstance(kernel, Gemm) and operator.reads[0] in sources:
            last[operator.reads[0]] = index
            trained.update(operator.reads[:1] if kernel.trained else ())
    for index, operator in enumerate(operators):
        name = operator.reads[0] if operator.reads else ""
        if name not in last or not isinstance(operator.kernel, Gemm):
            yield operator
            continue
        gather = sources[name]
        yield replace(operator, saves=tuple(gather.name if saved == name else saved for saved in operator.saves))
        if index == last[name] and name in trained:
            kernel = LayerCollective(f"{gather.name} again", "tp", None, _K.ALL_GATHER, gather.elements)
            yield Operator(kernel=kernel, regathers=name)


def sum_of_rows(source: str, result: str, share: RankShare, *, residual: bool = False) -> Operator:
    """The sum over ranks of the partial results ``source`` of a row-parallel matrix or embedding."""
    elements, own = share.tokens * share.hidden, share.own_tokens * share.hidden
    summed = Tensor(result, own, residual=residual)
    split = share.shard.sequence_parallel
    forward, backward = (_K.REDUCE_SCATTER, _K.ALL_GATHER) if split else (_K.ALL_REDUCE, None)
    collective = LayerCollective(result, "tp", forward, backward, elements, residual=residual)
    return Operator(kernel=collective, reads=(source,), makes=(summed,), in_place=not split, passes=not split)


def biases_after_sums(
    operators: Sequence[Operator], parameters: Sequence[ParameterSpec]
) -> tuple[tuple[Operator, ...], tuple[ParameterSpec, ...]]:
    """Biases of matrices split by rows, added once to the sum over ranks (Megatron-LM's RowParallelLinear).

    With sequence parallelism, each rank adds the bias to its own tokens, so that gradients are partial.
    """
    biases: dict[str, str] = {}  # by name of a rank's partial result
    partial: set[str] = set()
    found: list[Operator] = []
    for operator in operators:
        kernel = operator.kernel
        if isinstance(kernel, Gemm) and Role.ROW_PARALLEL in operator.roles and len(operator.parameters) > 1:
            (made,) = operator.makes
            if any(made.name in other.reads and isinstance(other.kernel, LayerCollective) for other in operators):
                biases[made.name], *weights = operator.parameters
                operator = replace(operator, parameters=tuple(weights))
        bias = biases.get(operator.reads[0]) if isinstance(kernel, LayerCollective) and operator.reads else None
        if bias is None:
            found.append(operator)
            continue
        assert isinstance(kernel, LayerCollective)
        (result,) = operator.makes
        summed = replace(result, name=f"{result.name} without bias")
        added = Operator(
            kernel=Pointwise(f"{result.name} bias", result.elements, result.elements),
            reads=(summed.name,),
            makes=(result,),
            parameters=(bias,),
            passes=True,
            roles=operator.roles,
        )
        found += [replace(operator, makes=(summed,)), added]
        if kernel.forward is _K.REDUCE_SCATTER:
            partial.add(bias)
    return tuple(found), tuple(replace(p, partial_gradient=p.partial_gradient or p.name in partial) for p in parameters)
