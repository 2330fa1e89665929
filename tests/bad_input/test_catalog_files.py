"""Entries that users add to the catalog: whatever is wrong in one is a sentence about its file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from simplan import catalog
from simplan.cli.listing import listing
from simplan.errors import SpecError

WRONG: tuple[Any, ...] = (None, "50 MiB", -1, 1.5, True, [], {}, [{}], {"x": 1})

READ: dict[str, Callable[[str], object]] = {
    "devices": catalog.device,
    "links": lambda name: catalog.link(name),
    "clusters": lambda name: catalog.make_cluster(catalog.node(name), 16),
    "topologies": lambda name: (catalog.topology(name), catalog.topology_source(name)),
    "models": lambda name: (catalog.model(name), catalog.published_parameters(name)),
    "reliability": lambda name: (catalog.about("reliability", name), listing("reliability")),
    "spot_zones": lambda name: catalog.about("spot_zones", name),
    "software": lambda name: catalog.software(name),
}
ENTRIES = (
    ("devices", "devices", "h100-sxm-80gb"),
    ("links", "links", "nvlink2"),
    ("clusters", "clusters", "dgx-h100"),
    ("topologies", "topologies", None),
    ("models", "models", "deepseek-v3"),
    ("reliability", "reliability", "llama3-2024"),
    ("spot_zones", "spot_zones", None),
    ("software", "software/torch", "torch"),
    ("software", "software/torchtitan", "torchtitan"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys inside of a value; of a list, those of its first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    copied = copy.deepcopy(data)
    holder = copied
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return copied


def damaged(entry: Any) -> Iterator[tuple[str, Any]]:
    """Copies with each key of a wrong type or absent, and with an unknown key in every mapping."""
    for number, path in enumerate(places(entry)):
        for wrong in WRONG[number % 2 :: 2]:  # every key has half of them, and its neighbors the others
            yield f"{path} = {wrong!r}", changed(entry, path, wrong)
        *around, last = path
        holder = copy.deepcopy(entry)
        inside = holder
        for key in around:
            inside = inside[key]
        del inside[last]
        yield f"no {path}", holder
    for path in ((), *places(entry)):
        inside = entry
        for key in path:
            inside = inside[key]
        if isinstance(inside, dict):
            yield f"unknown key in {path}", changed(entry, (*path, "buckit_bytes"), 1)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Any], None]]:
    """Puts other content in place of a file of the catalog."""
    real, caches = (
        catalog._parsed,
        [getattr(catalog, name) for name in ("device", "link", "node", "topology", "model", "software")],
    )

    def replace(file: str, data: Any) -> None:
        for cached in (*caches, real):
            if cached is not real:
                cached.cache_clear()
        monkeypatch.setattr(catalog, "_parsed", lambda name: data if name == file else real(name))

    yield replace
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(("kind", "file", "name"), ENTRIES, ids=[file for _, file, _ in ENTRIES])
def test_damaged_entry_is_read_or_refused(
    kind: str, file: str, name: str | None, replaced: Callable[[str, Any], None]
) -> None:
    """An entry with any key wrong, absent or unknown is read, or refused by a sentence that names its file."""
    whole = catalog._parsed(file)
    name = name or next(iter(whole[kind]))
    entry = whole if kind == "software" else whole[kind][name]
    failures, refused = [], 0
    for what, wrong in damaged(entry):
        replaced(file, wrong if kind == "software" else whole | {kind: whole[kind] | {name: wrong}})
        try:
            READ[kind](name)
        except SpecError as error:
            refused += 1
            if not str(error).startswith("simplan/catalog/") or not all(p.rule for p in error.problems):
                failures.append(f"{what}: {error}")
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__} {error}")
    assert not failures, failures[:20]
    assert refused


PROFILES = {
    "like: torhc": 'like = "torhc": is no profile of the catalog; did you mean torch?',
    "like: mine": "like = mine: is a profile that differs from this one itself; name another one, or remove like",
    "like: torch\nbuckit_bytes: 1": "buckit_bytes: is not a known key; did you mean bucket_bytes",
    "like: torch\nbucket_bytes: 50 MiB": 'bucket_bytes = "50 MiB": must be a whole number; write 52428800: it is a '
    "number of bytes",
    "like: torch\nsources:": "sources = null: must be a mapping (key: value); give a value or remove the key",
    "like: deepspeed\nbucket_bytes: 1000": "bucket_bytes = 1000: is about reducing gradients while backward runs, and "
    "grad_overlap = false reduces all of them after it; remove it, or use grad_overlap: true",
    "like: deepspeed\ngrad_overlap: true": "bucket_bytes: is missing, and gradients are reduced while backward runs",
    "like: [torch": "this is not YAML",
    "- torch": '["torch"]: must be a mapping',
}


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Reads a profile of the user's own, ``mine``; returns its error, or nothing."""
    known, folder = (*catalog._software_names(), "mine"), resources.files("simplan.catalog")

    class Files:
        """The folder of the catalog with one more profile."""

        def joinpath(self, *names: str) -> Any:
            return tmp_path / "mine.yaml" if names[-1] == "mine.yaml" else folder.joinpath(*names)

    def read(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        monkeypatch.setattr(catalog, "_software_names", lambda: known)
        monkeypatch.setattr("simplan.catalog.resources.files", lambda _: Files())
        try:
            catalog._parsed.cache_clear()
            catalog.software.cache_clear()
            catalog.software("mine")
        except SpecError as error:
            return str(error)
        return ""

    yield read
    for cached in (catalog.software, catalog._parsed):
        cached.cache_clear()


@pytest.mark.parametrize("text", PROFILES)
def test_wrong_profile_of_a_user_is_refused_in_a_sentence(text: str, profile: Callable[[str], str]) -> None:
    """A profile that is misspelt, contradicts itself or is no profile is named with its key and the nearest fix."""
    assert PROFILES[text] in profile(text)
    assert profile(text).startswith("simplan/catalog/software/mine.yaml:")


def test_profile_is_executed_only_if_it_says_so_itself(profile: Callable[[str], str]) -> None:
    """A profile like torch is not executed as torch, for it may differ in what is executed."""
    for text, executable in (("like: torch", False), ("like: torch\nexecutable: true", True)):
        assert profile(f"{text}\nzero_stages: [0, 1]") == ""
        assert catalog.software("mine").executable is executable


@pytest.mark.parametrize("base", ["torchtitan", "torch"])
def test_profile_keeps_its_own_reserve_under_the_rates_of_another(base: str, profile: Callable[[str], str]) -> None:
    """Keys of a user's profile count, also where the profile named in ``like`` has ``rates_of``."""
    keys = ("reserve_fraction", "compiled_reserve_fraction")
    own = "reserve_fraction: 0.3\nsources: {reserve_fraction: our fork}"
    assert profile(f"like: {base}\n{own}") == ""
    mine, other = catalog.software("mine"), catalog.software(base)
    assert [getattr(mine, key) for key in keys] == [0.3, other.compiled_reserve_fraction]
    assert mine.sources["reserve_fraction"] == "our fork"
    assert mine.sources[keys[1]] == other.sources[keys[1]]
    assert profile(f"like: megatron-core\nrates_of: torchtitan-2024\n{own}") == ""
    assert catalog.software("mine").reserve_fraction == 0.3


def test_source_of_another_profile_is_not_shown_for_a_changed_value(profile: Callable[[str], str]) -> None:
    """Nor the versions of the other profile: `pytest tests/catalog` asks for both."""
    assert profile("like: torch\nbucket_bytes: 1048577\nfirst_bucket_bytes: 1048576") == ""
    mine, torch = catalog.software("mine"), catalog.software("torch")
    assert "bucket_bytes" not in mine.sources
    assert mine.sources["first_bucket_bytes"] == torch.sources["first_bucket_bytes"]  # the same value
    assert mine.stands_for == "" != torch.stands_for


def test_preset_of_failures_says_where_each_rate_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user reads what to add, before any test."""
    whole = catalog._parsed("reliability")
    entry = {
        "description": "ours",
        "causes": [{"name": "disk", "per": "node", "mtbf_h": 1000}, {"name": "fan", "per": "node", "mtbf_h": 9000}],
        "sources": {"causes.disk": "tickets"},
    }
    refusals: tuple[tuple[dict[str, str], str], ...] = (
        ({}, "reliability.mine.fitted_on: is missing; add fitted_on: ..."),
        ({"fitted_on": "tickets"}, "reliability.mine.sources.causes.fan: is missing; add causes.fan: ..."),
        ({"fitted_on": "tickets"}, "reliability.mine.sources.scope: is missing; add scope: ..."),
    )
    for more, sentence in refusals:
        presets = whole | {"reliability": whole["reliability"] | {"mine": entry | more}}
        monkeypatch.setattr(catalog, "_parsed", lambda name, presets=presets: presets)
        with pytest.raises(SpecError) as caught:
            catalog.reliability("mine")
        assert sentence in str(caught.value)
