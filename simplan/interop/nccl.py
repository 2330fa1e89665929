"""``NCCL_ALGO`` of a launch script as ``plan.collectives``, in both directions.

Its syntax, by function since NCCL 2.24, is that of ``parseList`` in NCCL's source: ``allreduce:tree;allgather:ring``.
"""

from __future__ import annotations

from collections.abc import Mapping

from simplan.interop.configuration import Reading, Setting
from simplan.interop.frameworks.shell import Word, own_line
from simplan.interop.writing import Writing

VARIABLE = "NCCL_ALGO"
_FUNCTIONS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}
_ALGORITHMS = ("ring", "tree", "nvls")
_NVLS_OF_ALL_REDUCE = "nvls,nvlstree"  # across nodes, a tree joins the NVLink switches


def write_nccl_algo(writing: Writing) -> None:
    """Write prescribed algorithms as a setting ``NCCL_ALGO``, if there are any.

    Raises:
        NotModelledError: An algorithm is none of NCCL's.
    """
    collectives, words = writing.value("plan.collectives"), []
    for kind, algorithm in () if collectives is None else collectives.prescribed():
        if kind == "all_to_all" and algorithm == "pairwise":
            continue  # NCCL has no other
        if kind not in _FUNCTIONS or algorithm not in _ALGORITHMS:
            writing.refuse(
                "plan.collectives", f"{VARIABLE} has no {algorithm}: use ring, tree or nvls, or leave it out"
            )
        is_nvls = (kind, algorithm) == ("all_reduce", "nvls")
        words.append(f"{_FUNCTIONS[kind]}:{_NVLS_OF_ALL_REDUCE if is_nvls else algorithm}")
    if words:
        writing.set(VARIABLE, ";".join(words), "plan.collectives")


def nccl_settings(environment: Mapping[str, Word]) -> tuple[Setting, ...]:
    """``NCCL_ALGO`` of the environment of a command as a setting; none if it is not set."""
    word = environment.get(VARIABLE)
    if word is None:
        return ()
    return (Setting(VARIABLE, word.text, own_line(word.line)),)


def read_nccl_algo(reading: Reading) -> None:
    """Put the algorithms that a script prescribes; a choice between several is NCCL's."""
    if VARIABLE not in reading:
        return
    kinds = {function: kind for kind, function in _FUNCTIONS.items()}
    algorithms: dict[str, str] = {}
    for entry in str(reading.value(VARIABLE)).lower().split(";"):
        function, _, listed = entry.rpartition(":")
        algorithm = "nvls" if listed == _NVLS_OF_ALL_REDUCE else listed
        of = [kinds[function]] if function in kinds else [] if function else [*_FUNCTIONS]
        if not of or algorithm not in _ALGORITHMS:
            reading.not_modeled(VARIABLE, "NCCL chooses algorithms by size")
            return
        algorithms |= {kind: algorithm for kind in of if algorithm != "tree" or kind == "all_reduce"}
    if algorithms:
        reading.put("plan.collectives", algorithms, VARIABLE)
