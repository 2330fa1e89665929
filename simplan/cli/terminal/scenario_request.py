"""The argument SCENARIO and the options that override its keys, for all commands that take a scenario."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplan.cli.terminal import completion
from simplan.cli.terminal.options import number_of, opened, whole_number_of
from simplan.errors import Problem, SpecError

if TYPE_CHECKING:
    from simplan.scenario import Scenario, SearchScenario
    from simplan.scenario.source import Source
    from simplan.search import SearchSpace

NO_SCENARIO = Path()
"""Value of SCENARIO that is not given."""
_NUM_MICROBATCHES = "num_microbatches"
_GLOBAL_BATCH_TOKENS = "global_batch_tokens"
_FEW = 2
"""Options of a similar spelling that an error lists."""
_BATCHES = (_NUM_MICROBATCHES, _GLOBAL_BATCH_TOKENS)
"""Keys from which the global batch size follows, given the plan."""


def _devices(text: str | int) -> int | str:
    """A number of devices; or the name of devices, which may say their number.

    Raises:
        typer.BadParameter: It is neither.
    """
    from simplan.catalog.spelling import NamedNodes, find_nodes

    name = str(text)
    nodes = find_nodes(name)
    if any(map(str.isalpha, name)) and (isinstance(nodes, NamedNodes) or nodes.candidates):
        return name  # one of several is refused where clusters are read
    return whole_number_of(text, 'or number and kind, e.g. "8x A100 80GB"')


def _interval(text: str) -> float | str:
    """Seconds between checkpoints, or ``best``.

    Raises:
        typer.BadParameter: It is neither.
    """
    return text if text == "best" else number_of(text)


@dataclass(frozen=True, slots=True)
class Override:
    """An option that overrides one key of a scenario.

    Attributes:
        names: Names of the option, the first one in errors.
        key: Dotted key.
        kind: Type of the value; float for a number with a suffix, such as 1M; object for what ``parse`` returns.
        help: Noun phrase.
        complete: Names for shell completion.
        parse: Reads the text of a number or word.
        minimum: Smallest whole number.
    """

    names: tuple[str, ...]
    key: str
    kind: type[int] | type[str] | type[float] | type[object]
    help: str
    complete: Callable[[str], list[str]] | None = None
    parse: Callable[[str], Any] | None = None
    minimum: int = 1

    @property
    def parameter(self) -> inspect.Parameter:
        """Parameter of a command's function."""
        if self.kind is int:
            option = typer.Option(*self.names, metavar="N", min=self.minimum, help=self.help)
        elif self.kind is float:
            option = typer.Option(*self.names, metavar="N", parser=number_of, help=self.help)
        elif self.kind is object:
            option = typer.Option(*self.names, metavar="N", parser=self.parse, help=self.help)
        else:
            option = typer.Option(*self.names, metavar="NAME", help=self.help, autocompletion=self.complete)
        return _keyword(self.key.replace(".", "_"), Annotated[self.kind | None, option])


OVERRIDES = (
    Override(
        ("--model",),
        "model.preset",
        str,
        "Model preset, or a config.json, for a file that names no model.",
        completion.models,
    ),
    Override(("--cluster",), "cluster.preset", str, "Cluster preset.", completion.clusters),
    Override(("--device",), "cluster.device", str, "Device, for nodes that are no preset.", completion.devices),
    Override(("--devices-per-node", "--gpus-per-node"), "cluster.devices_per_node", int, "Devices of such a node."),
    Override(
        ("--gbit-per-node",),
        "cluster.inter_link_gbit_per_node",
        int,
        "InfiniBand or RoCE of a node in Gbit/s; for 10 GbE with TCP: --set cluster.inter_link=tcp-10gbit.",
    ),
    Override(("--num-nodes",), "cluster.num_nodes", int, "Number of nodes."),
    Override(
        ("--num-devices", "--gpus"),
        "cluster.num_devices",
        object,
        'Number of devices, instead of nodes; or number and kind, e.g. "8x A100 80GB", instead of --cluster.',
        parse=_devices,
    ),
    Override(("--software",), "software", str, "Framework profile.", completion.software),
    Override(("--seq-len",), "model.seq_len", int, "Tokens per sequence."),
    Override(("--global-batch-size",), "training.global_batch_size", int, "Sequences per optimizer step."),
    Override(
        ("--global-batch-tokens",),
        _GLOBAL_BATCH_TOKENS,
        float,
        "Tokens per optimizer step, e.g. 4M, instead of sequences; rounded to a batch that the plan divides.",
    ),
    Override(("--precision",), "training.precision", str, "Precision, e.g. bf16 or fp8.", completion.precisions),
    Override(
        ("--task",),
        "training.task",
        str,
        "Purpose of the run: pretrain, sft, lora, dpo, kto, orpo, simpo, reward, asft.",
    ),
    Override(
        ("--quantize",),
        "training.base_weights.format",
        str,
        "Format of frozen weights below adapters (QLoRA), e.g. nf4 or int8.",
    ),
    Override(("--tp",), "plan.tp", int, "Tensor-parallel degree."),
    Override(("--pp",), "plan.pp", int, "Pipeline-parallel degree."),
    Override(("--cp",), "plan.cp", int, "Context-parallel degree."),
    Override(("--ep",), "plan.ep", int, "Expert-parallel degree."),
    Override(("--dp-shard",), "plan.dp_shard", int, "Shards of ZeRO or FSDP."),
    Override(("--dp-replicate",), "plan.dp_replicate", int, "Data-parallel replicas."),
    Override(("--schedule",), "plan.schedule", str, "Pipeline schedule.", completion.schedules),
    Override(("--virtual-stages",), "plan.virtual_stages", int, "Stages per pipeline rank."),
    Override(("--microbatch-size",), "plan.microbatch_size", int, "Sequences per microbatch."),
    Override(
        ("--placement",),
        "plan.placement",
        str,
        "Axes from innermost to outermost, e.g. tp,pp,dp; network; or a hostfile, or a CSV file of ranks.",
    ),
    Override(
        ("--num-microbatches",),
        _NUM_MICROBATCHES,
        int,
        "Microbatches of a data-parallel rank, instead of the global batch size.",
    ),
    Override(
        ("--lora-rank", "--lora"), "model.lora_rank", int, "Rank of LoRA adapters, for a model that is fine-tuned."
    ),
    Override(("--recompute",), "plan.recompute", str, "Activation recomputation.", completion.recomputations),
)
"""Options for the keys that are typed most; ``--set`` overrides all others."""
RUN_OVERRIDES = (
    Override(("--tokens",), "run.num_tokens", float, "Tokens of the run, e.g. 1e12 or 1T."),
    Override(("--steps",), "run.num_steps", int, "Optimizer steps of the run, instead of tokens."),
    Override(
        ("--reliability",), "reliability.preset", str, "Published failure rates (simplan show reliability).",
        completion.reliability,
    ),
    Override(("--mtbf-h",), "reliability.device_mtbf_h", float, "Hours of one device between failures."),
    Override(("--detection-s",), "reliability.detection_s", float, "Seconds until a failure is noticed."),
    Override(
        ("--checkpoint-every-s",), "checkpoint.interval_s", object,
        "Seconds of training between checkpoints, or best.", parse=_interval,
    ),
    Override(("--checkpoint-s",), "checkpoint.blocking_s", float, "Seconds that training waits for a checkpoint."),
    Override(
        ("--storage-bytes-per-s",), "checkpoint.storage_bytes_per_s", float,
        "Bandwidth of writing to the storage, e.g. 200B, instead of --checkpoint-s.",
    ),
    Override(("--policy",), "recovery.policy", str, "Recovery: restart, shrink or continue."),
    Override(("--restart-s",), "recovery.restart_s", float, "Seconds of a restart, without the load of a checkpoint."),
    Override(("--spares",), "recovery.spares", int, "Nodes that wait for a lost one.", minimum=0),
    Override(("--repair-h",), "recovery.repair_h", float, "Hours until a lost node is a spare."),
    Override(("--price",), "price.device_hour", float, "Price per device and hour in any currency."),
)  # fmt: skip
"""Options for keys of a whole run."""
_ALL = (*OVERRIDES, *RUN_OVERRIDES)


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """A scenario as the command line asks for it: SCENARIO and its overrides.

    Attributes:
        source: Value of SCENARIO.
        overrides: Dotted key -> value.
        names: Override -> name in errors.
        write: File for the scenario with its overrides; None for none.
        framework: Format of a framework's file; None to find it by content.
    """

    source: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    write: Path | None = None
    framework: str | None = None

    @property
    def is_file(self) -> bool:
        """True if SCENARIO is a scenario file rather than a model."""
        return self.source.exists() and not self.source.is_dir() and self.source.suffix != ".json"

    def argument(self, *, without: str = "") -> str:
        """SCENARIO and its options for a suggested command.

        Args:
            without: Section whose overrides are left out.
        """
        from simplan.io import as_argument

        named = self._in_catalog_names()
        kept = {key: value for key, value in named.overrides.items() if not without or key.split(".")[0] != without}
        options = (_option(key, named.names[key], value) for key, value in kept.items())
        framework = [f"--from {shlex.quote(self.framework)}"] if self.framework is not None else []
        return " ".join([as_argument(named.source), *framework, *options])

    def _in_catalog_names(self) -> ScenarioRequest:
        """Copy with the names of the catalog."""
        from simplan.scenario.names import model_named, overrides_with_catalog_names

        order = {override.key: place for place, override in enumerate(_ALL)}
        named_overrides = overrides_with_catalog_names(self.overrides)
        overrides = {
            key: named_overrides[key] for key in sorted(named_overrides, key=lambda key: order.get(key, len(order)))
        }
        source = self.source if self.source.exists() else Path(model_named(str(self.source)) or self.source)
        return replace(self, source=source, overrides=overrides, names=self._names_of(overrides))

    def _names_of(self, overrides: Mapping[str, Any]) -> dict[str, str]:
        """Names of overrides in errors and suggestions; of new ones, the options for them."""
        known = {override.key: override.names[0] for override in _ALL}
        options = {name: override.key for override in _ALL for name in override.names}
        typed = {key: name for key, name in self.names.items() if options.get(name, key) == key}
        return {key: typed.get(key) or known.get(key, key) for key in overrides}

    def with_overrides(self, changes: Mapping[str, Any]) -> ScenarioRequest:
        """Copy with more overrides, which replace those of the same keys, and with the names of the catalog."""
        replaced = "cluster.num_nodes" if "cluster.num_devices" in changes else ""
        before = self._in_catalog_names().overrides
        overrides = {key: value for key, value in before.items() if key != replaced} | dict(changes)
        return replace(self, overrides=overrides, names=self._names_of(overrides))

    def with_batch(self, global_batch_size: int) -> ScenarioRequest:
        """Copy that says the batch of its scenario, if that depends on the plan."""
        if self.is_file and not self.overrides.keys() & {*_BATCHES}:
            return self
        others = {key: value for key, value in self.overrides.items() if key not in _BATCHES}
        request = replace(self, overrides=others)
        return request.with_overrides({"training.global_batch_size": global_batch_size})

    def scenario(self) -> Scenario:
        """The scenario; writes it to the file of ``--write-scenario``.

        Raises:
            SpecError: See ``simplan.scenario.scenario_from``; or the file cannot be written.
        """
        return self.read()[0]

    def read(self) -> tuple[Scenario, Source]:
        """The scenario and its document; writes it to the file of ``--write-scenario``.

        Raises:
            SpecError: See ``scenario``.
        """
        from simplan.scenario.source import read_source

        if (captured := self._captured()) is not None:
            return captured.read()
        source = read_source(str(self.source), self.overrides, self.names, framework=self.framework)
        scenario = source.scenario()
        self._write(source)
        return scenario, source

    def _captured(self) -> ScenarioRequest | None:
        """Request of the captured model of a config.json that simplan has no family for; None for other sources."""
        if self.source.suffix != ".json":
            return None
        from simplan.cli.capture.command import captured_config

        file = captured_config(self.source, self.overrides.get("model.seq_len"))
        if file is None:
            return None
        others = {key: value for key, value in self.overrides.items() if key != "model.seq_len"}
        return replace(self, source=file, overrides=others)

    def search(self, *, from_current: bool = False) -> SearchScenario:
        """The search; writes it to the file of ``--write-scenario``.

        Args:
            from_current: True to start from the plan of SCENARIO; if SCENARIO has none, from the best plan with the
                options of a plan.

        Raises:
            SpecError: See ``scenario``; or there is no plan to start from.
        """
        from simplan.scenario.source import read_source

        if (captured := self._captured()) is not None:
            return captured.search(from_current=from_current)
        if from_current and not self._has_plan:
            if self.is_file and not any(key.startswith("plan.") for key in self.overrides):
                rule, fix = "compares with a plan, and SCENARIO has none", "give the options of one, e.g. --tp 8"
                raise SpecError(Problem(field="--from-current", value=str(self.source), rule=rule, fix=fix))
            current = read_source(str(self.source), self.overrides, self.names).scenario()
            others = {key: value for key, value in self.overrides.items() if not key.startswith("plan.")}
            request = replace(self, overrides=others).with_batch(current.job.training.global_batch_size)
            return request.search().starting_from(current, request._space_of(self))
        overrides = self.overrides_for(searches=True)
        source = read_source(
            str(self.source), *overrides, searches=True, from_current=from_current, framework=self.framework
        )
        search = source.search()
        self._write(source)
        return search

    def _space_of(self, options: ScenarioRequest) -> SearchSpace | None:
        """Space of the plans that have the options of a plan; None for options that no search varies."""
        from simplan.search import SearchSpace

        fixed = {key.removeprefix("plan."): key for key in options.overrides if key.startswith("plan.")}
        values = {name: options.overrides[key] for name, key in fixed.items()}
        if not fixed.keys() <= SearchSpace.model_fields.keys() or any(isinstance(v, list) for v in values.values()):
            return None
        overrides = {**self.overrides, **{f"search.{name}": value for name, value in values.items()}}
        names = {**self.names, **{f"search.{name}": options.names[key] for name, key in fixed.items()}}
        return replace(self, overrides=overrides, names=names).search().space

    def overrides_for(self, *, searches: bool) -> tuple[dict[str, Any], dict[str, str]]:
        """Overrides and their names for one plan, or for a search, where options of a plan are ranges.

        Raises:
            SpecError: ``--set`` gives a key of the plan, for a search.
        """
        from simplan.scenario.collecting import IN_SAVED_PLAN
        from simplan.search import SearchSpace

        overrides, names = {}, {}
        for key, value in self.overrides.items():
            section, _, name = key.partition(".")
            moved = key
            if searches and section == "plan":
                in_search = name in SearchSpace.model_fields
                if self.names[key] == key:
                    rule = "is about one plan, and a search has ranges of plans"
                    fix = f"set search.{name}" if in_search else f"set {key} {IN_SAVED_PLAN}"
                    raise SpecError(Problem(field=key, rule=rule, fix=fix))
                moved = f"search.{name}" if in_search else key
            overrides[moved], names[moved] = value, self.names[key]
        return overrides, names

    @property
    def _has_plan(self) -> bool:
        """False for a model, and for a scenario file with ``search`` in place of ``plan``."""
        from simplan.io import read_yaml

        if not self.is_file:
            return False
        if self.source.suffix not in (".yaml", ".yml"):
            return True
        data = read_yaml(self.source).data
        return not isinstance(data, dict) or "plan" in data or "search" not in data

    def _write(self, source: Source) -> None:
        if self.write is None:
            return
        from simplan.cli.terminal.output import say
        from simplan.io import write_text

        if self.write.exists() and self.source.exists() and self.write.samefile(self.source):
            rule, fix = "is SCENARIO itself", "name another file"
            raise SpecError(Problem(field="--write-scenario", value=str(self.write), rule=rule, fix=fix))
        command = f"simplan predict {self.argument()}" if self.overrides or not self.is_file else ""
        write_text(self.write, source.text(self.write.resolve().parent, f"As of: {command}" if command else ""))
        say(f"wrote {self.write}")


def takes_scenario(
    *, writes: bool = False, required: bool = True, whole_run: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator of a command whose first parameter is a ``ScenarioRequest``: adds SCENARIO and the options.

    Args:
        writes: True for ``--write-scenario``.
        required: False to pass ``NO_SCENARIO`` if SCENARIO is not given.
        whole_run: True for the options of a whole run.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        first, *rest = signature.parameters.values()
        options = (override.parameter for override in (_ALL if whole_run else OVERRIDES))
        added = [*options, _keyword("set", _SET), _keyword("from_format", _FROM)]
        if writes:
            added.append(_keyword("write_scenario", _WRITE))

        @wraps(command)
        def with_request(**arguments: Any) -> int:
            values = {parameter.name: arguments.pop(parameter.name) for parameter in added}
            request = _request(arguments.pop(first.name), values)
            return command(request, **arguments)

        default = inspect.Parameter.empty if required else NO_SCENARIO
        argument = inspect.Parameter(first.name, inspect.Parameter.KEYWORD_ONLY, annotation=_SCENARIO, default=default)
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in rest]
        parameters = [argument, *keywords, *added]
        with_request.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_request

    return decorate


_SCENARIO = Annotated[
    Path,
    typer.Argument(
        metavar="SCENARIO",
        help="Scenario file (YAML), - for standard input; a model: a name of `simplan show models`, or a config.json "
        "of Hugging Face or its folder; or the launch script or configuration of a framework.",
        callback=opened,
        autocompletion=completion.scenarios,
    ),
]
_SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override of any key of the scenario, e.g. plan.recompute=full; repeatable.",
        autocompletion=completion.keys,
    ),
]
_FROM = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="NAME",
        help="Format of SCENARIO, if it is a framework's file (default: by its content).",
        autocompletion=completion.formats,
    ),
]
_WRITE = Annotated[
    Path | None,
    typer.Option("--write-scenario", metavar="FILE", help="File for the scenario with all overrides (default: none)."),
]


def usage_error(error: Any) -> str:
    """Message about bad usage; an unknown option that is a framework's name of a key has the option of simplan.

    An option of scenarios given to ``simplan report``, which reads documents, has the commands that take it.

    Args:
        error: Exception of typer with ``format_message``.
    """
    from simplan.scenario.collecting import where_keys_belong

    typed, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "info_name", "")
    if command == "report" and (typed == "--set" or any(typed in override.names for override in _ALL)):
        commands = f"simplan predict SCENARIO {typed} VALUE -o plan.json; simplan report plan.json"
        return f"{error.message}: a report shows what other commands wrote; run `{commands}`"
    word = typed.lstrip("-").replace("-", "_")
    key, comma, _ = where_keys_belong("", searches=False).get(word, "").partition(",")
    key = _NUM_MICROBATCHES if comma else key
    known = {name for param in error.ctx.command.params for name in param.opts} if getattr(error, "ctx", None) else ()
    option = next(
        (override.names[0] for override in _ALL if override.key == key and override.names[0] in known), "--set"
    )
    near = error.possibilities or () if key else ()
    if not key or ":" in key or option not in known or (option in near and len(near) <= _FEW):
        return str(error.format_message())
    written = f"--set {key}=VALUE" if option == "--set" else option
    return f"{error.message}; write {written}"


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _request(source: Path, values: Mapping[str, Any]) -> ScenarioRequest:
    """Request of SCENARIO and the values of its options, None for options that are not given."""
    overrides, names = overrides_of(values)
    return ScenarioRequest(source, overrides, names, values.get("write_scenario"), values.get("from_format"))


def overrides_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Overrides by key, and their names in errors.

    Args:
        values: Name of a parameter -> value of its option, None if not given.

    Raises:
        SpecError: ``--set`` is no KEY=VALUE, or a key is given twice.
    """
    overrides: dict[str, Any] = {}
    names: dict[str, str] = {}
    for override in _ALL:
        value = values.get(override.parameter.name)
        if value is not None:
            key = override.key
            if key == "model.preset" and Path(value).exists():
                path = _config_of(Path(value))
                key, value = "model.file" if _is_capture(path) else "model.hf_config", str(path)
            if key == "cluster.num_devices" and isinstance(value, str):
                key = "cluster.preset"
                if key in overrides:
                    rule, fix = f"names devices, and {names[key]} does so, too", "give a number"
                    raise SpecError(Problem(field=override.names[-1], value=value, rule=rule, fix=fix))
                names[key] = override.names[-1]
            whole = isinstance(value, float) and value.is_integer()
            overrides[key] = int(value) if whole else value
            names.setdefault(key, override.names[0])
    for text in values.get("set") or ():
        key, value = _key_and_value(text)
        if key in overrides:
            twice = names[key] if names[key] != key else "--set"
            raise SpecError(Problem(field=key, rule=f"is given twice, also with {twice}", fix="give one of the two"))
        overrides[key], names[key] = value, key
    return overrides, names


def _config_of(path: Path) -> Path:
    """Absolute path of the ``config.json`` of a file or folder."""
    return (path / "config.json" if path.is_dir() else path).resolve()


def _is_capture(path: Path) -> bool:
    """True for the file of a captured model."""
    from simplan.io import MAX_JSON_BYTES, is_file, parse_json, read_text
    from simplan.model.captured.file import FORMAT, is_captured

    if path.suffix != ".json" or not is_file(path):
        return False
    text = read_text(path, MAX_JSON_BYTES)
    return FORMAT in text and is_captured(parse_json(text, str(path)))


def _key_and_value(text: str) -> tuple[str, Any]:
    from simplan.document import parse_yaml

    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")) or not value.strip():
        fix = "write e.g. --set plan.tp=4 or --set model.num_hidden_layers=40"
        raise SpecError(Problem(field="--set", value=text, rule="must be KEY=VALUE", fix=fix))
    if key == "name":
        return key, value
    data = parse_yaml(f"value: {value}\n", f"--set {key}").data
    if not isinstance(data, dict) or data.keys() != {"value"}:
        raise SpecError(Problem(field="--set", value=text, rule="must be KEY=VALUE with one value"))
    return key, data["value"]


def _option(key: str, name: str, value: Any) -> str:
    from simplan.scenario.writing import flow_text

    if name.startswith("--"):
        return f"{name} {shlex.quote(str(value))}"
    text = value if key == "name" else flow_text(value)
    return f"--set {shlex.quote(f'{key}={text}')}"
