"""Techniques that simplan does not model are named so, instead of "is not a known key" with all keys."""

from __future__ import annotations

import pytest

from simplan.errors import NotModelledError, SpecError, did_you_mean
from simplan.scenario.collecting import _OTHER_WORDS, _SECTIONS
from simplan.scenario.text import parse_scenario, parse_search
from simplan.unmodeled import _BY_WORD, _RECORDS
from tests.support.problems import says

SECTIONS = {
    "model": "preset: gpt2-124m",
    "cluster": "preset: dgx-h100",
    "training": "global_batch_size: 8",
    "plan": "dp_replicate: 8",
}


def refusal(section: str, line: str) -> SpecError:
    """Error of a scenario with one more line in a section; of the top level for an empty section."""
    text = "".join(f"{name}: {{{keys}{f', {line}' * (name == section)}}}\n" for name, keys in SECTIONS.items())
    with pytest.raises(SpecError) as caught:
        parse_scenario(text + f"{line}\n" * (not section))
    return caught.value


@pytest.mark.parametrize(
    ("section", "line", "sentence"),
    [
        ("plan", "zeroplusplus: true",
         "plan.zeroplusplus: ... ZeRO (ZeRO++) is not modeled ... use plan.compression with plan.dp_replicate"),
        ("plan", "schedule: pipedream", 'plan.schedule = "pipedream": ... not modeled'),
    ],
)  # fmt: skip
def test_technique_that_is_not_modeled_is_named(section: str, line: str, sentence: str) -> None:
    error = refusal(section, line)
    assert isinstance(error, NotModelledError)
    [problem] = error.problems
    assert says(problem.sentence(), sentence)
    assert problem.line is not None


def test_search_with_a_technique_that_is_not_modeled_names_it() -> None:
    text = "".join(f"{name}: {{{keys}}}\n" for name, keys in SECTIONS.items() if name != "plan")
    with pytest.raises(NotModelledError, match="an asynchronous pipeline is not modeled yet"):
        parse_search(text + "search: {pipedream: true}\n")


@pytest.mark.parametrize("name", ["grokadamw", "ademamix_8bit", "soap", "shampoo"])
def test_optimizer_that_is_not_modeled_is_named(name: str) -> None:
    [problem] = refusal("training", f"optimizer: {name}").problems
    assert problem.rule.startswith("is an optimizer that is not modeled yet")


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("local_sgd", "local_sgd"),
        ("post_local_sgd", "local_sgd"),
        ("diloco", "diloco"),
        ("streaming_diloco", "streaming_diloco"),
        ("hogwild", "hogwild"),
        ("ssp", "parameter_server and staleness"),
        ("async_ps", "parameter_server and staleness"),
    ],
)
def test_name_of_a_replication_leads_to_its_kind(word: str, kind: str) -> None:
    (problem,) = refusal("training", f"{word}: true").problems
    assert problem.fix == f"write plan.replication, with kind: {kind}"


@pytest.mark.parametrize("word", ["parameter_server", "parameter_servers", "num_ps"])
def test_parameter_server_is_an_algorithm_of_the_all_reduce(word: str) -> None:
    [problem] = refusal("plan", f"{word}: 2").problems
    assert problem.fix == "write plan.collectives, with all_reduce: parameter_server"


def test_network_cards_of_a_node_are_no_devices() -> None:
    [problem] = refusal("cluster", "nics: 1").problems
    assert problem.fix == "write cluster.nics_per_node"
    assert "did you mean" not in did_you_mean("nics_per_node", ["devices_per_node", "num_nodes"])


def test_words_of_techniques_are_no_keys_of_simplan() -> None:
    keys = {key for spec in _SECTIONS.values() for key in spec.model_fields}
    others = {word for words in _OTHER_WORDS.values() for word in words.split()}
    assert not _BY_WORD.keys() & (keys | others)
    assert len(_BY_WORD) == sum(len(record.words.split()) for record in _RECORDS)


@pytest.mark.parametrize(
    ("word", "kind"), [("powersgd", "powersgd"), ("onebit_adam", "one_bit_adam"), ("topk_compression", "top_k")]
)
def test_name_of_a_compression_leads_to_its_kind(word: str, kind: str) -> None:
    (problem,) = refusal("training", f"{word}: true").problems
    assert problem.fix == f"write plan.compression, with kind: {kind}"
