"""What must hold where several documents share a sequence."""

from __future__ import annotations

from collections.abc import Iterator

from simplan.errors import Problem
from simplan.spec.model import ModelSpec
from simplan.spec.models import FAMILIES
from simplan.spec.plan import ParallelPlan
from simplan.spec.software import SoftwareSpec

__all__ = ["document_rules", "unmodelled_documents"]

_FIELD = "model.document_lengths"


def document_rules(model: ModelSpec) -> Iterator[Problem]:
    """Documents that cannot share a sequence."""
    lengths = model.document_lengths
    if not lengths:
        if model.packs is not None:
            rule = "says where documents were drawn from, and there is no document_lengths"
            yield Problem(field="model.packs", rule=rule, fix="remove it")
        return
    total, most = sum(lengths), model.max_position_embeddings
    if total > model.seq_len:
        yield Problem(
            field=_FIELD,
            value=_shown(lengths),
            rule=f"has {total} tokens, and a sequence has seq_len = {model.seq_len}",
            fix=f"use shorter documents, or model.seq_len = {total}",
        )
    elif FAMILIES[model.family].position_rows and max(model.segments) > most:
        what = "a document" if max(lengths) > most else "the padding"
        yield Problem(
            field=_FIELD,
            value=_shown(lengths),
            rule=f"{what} has {max(model.segments)} tokens, and max_position_embeddings = {most}",
            fix=f"set model.max_position_embeddings to {max(model.segments)}",
        )
    if max(lengths) == 1:
        yield Problem(
            field=_FIELD,
            value=_shown(lengths),
            rule="has no document of two tokens, of which one could be predicted from the other",
            fix="use longer documents",
        )


def unmodelled_documents(model: ModelSpec, plan: ParallelPlan, software: SoftwareSpec) -> Iterator[Problem]:
    """Splits and frameworks for which packed sequences are not modelled."""
    if not model.document_lengths:
        return
    if plan.cp > 1:
        yield _not_modelled("plan.cp", plan.cp, "context parallelism of several documents in a sequence", "use 1")
    if software.packed_attention is None:
        what = f"attention of several documents in a sequence with {software.id}"
        yield _not_modelled(_FIELD, _shown(model.document_lengths), what, "remove it")


def _not_modelled(field: str, value: object, what: str, fix: str) -> Problem:
    return Problem(field=field, value=str(value), rule=f"{what} is not modelled yet", fix=fix)


def _shown(lengths: tuple[int, ...]) -> str:
    return str(list(lengths)) if len(lengths) <= 6 else f"[{lengths[0]}, {lengths[1]}, ..., {lengths[-1]}]"
