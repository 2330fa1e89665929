"""Python code that trains with Unsloth, or TRL and PEFT: scripts and notebooks, read without running them.

::

    model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.1-8B", max_seq_length=max_seq_length)
    model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing="unsloth")
    trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2))

Calls count, with plain values of names that are assigned before. Sources of Unsloth's defaults: unslothai/unsloth at
015bdef, unsloth/models/llama.py (``from_pretrained``, ``get_peft_model``), models/_utils.py
(``apply_unsloth_gradient_checkpointing``), models/rl.py (``replacements``: defaults of TRL's configurations), and
models/vision.py (full fine-tuning in 16 bits); BitsAndBytesConfig of transformers 5.23.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from simplan.document import MAX_DIGITS, has_absurd_number, whole_number
from simplan.errors import SpecError, file_error
from simplan.interop.configuration import Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks.hugging_face import names
from simplan.interop.frameworks.hugging_face.keys import table, whole
from simplan.interop.frameworks.hugging_face.preference import OF_PROGRAMS
from simplan.interop.frameworks.hugging_face.tools import UNSLOTH

_SUFFIXES = (".py", ".ipynb")
_FIX = "write the value itself, or give the settings as YAML"
_UNSLOTH_MODELS = ("FastLanguageModel", "FastModel")
_IMAGES = ("FastVisionModel", "FastTextModel", "FastSentenceTransformer", "FastDiffusionModel")
_TRAINERS = re.compile(r"(Unsloth)?(\w*?)Trainer$")
_CONFIGURATIONS = re.compile(r"(?:Unsloth)?(SFT|DPO|KTO|ORPO|CPO|Reward)Config$|(?:Unsloth|Seq2Seq)?TrainingArguments$")
_TASKS = {"SFT": "", "DPO": "dpo", "KTO": "kto", "ORPO": "orpo", "CPO": "cpo", "Reward": "reward"}
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported")
_LENGTHS = ("max_seq_length", "max_length", "model_max_length")
_HARMLESS = re.compile(
    r"(output|logging|log|save|eval|hub|lr|learning_rate|warmup|weight_decay|adam|seed|data|report_to|run_name|"
    r"num_train_epochs|max_steps|load_best|metric|push_to|remove_unused|label|resume|do|disable_tqdm|project|trackio)(_|$)"
)
"""Beginnings of names of arguments of a configuration that change neither time nor memory, whatever they are."""
_NUM_OFFLOADED = 512
"""Tokens from which on Unsloth moves inputs of blocks to the host; below, it only recomputes."""
_MAX_NESTED = 50
_MAX_POWER = 64
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip


class _Unknown:
    """A value that only running the code would give."""


_UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that counts.

    Attributes:
        name: Function or class, without the module.
        owner: Class of a method; empty for others.
        values: Arguments by name; ``_UNKNOWN`` for values that are not plain. Positional ones are ``0``, ``1``, ...
        is_certain: False under a condition that the code does not decide.
    """

    name: str
    owner: str
    line: int | None
    values: Mapping[str, Any]
    is_certain: bool = True


@dataclass(frozen=True, slots=True)
class PythonRun:
    """Settings of a training that Python code starts.

    Attributes:
        tool: ``UNSLOTH``, or empty.
        settings: Settings by their names in TrainingArguments or the arguments of TRL's scripts.
        task: Words on the call that makes it supervised fine-tuning; empty for none.
        preference: Task of preference training, and the call; None for others.
        is_trl: The defaults are those of TRL's configurations.
        refused: Name, rule and fix of what is not modeled.
    """

    tool: str
    settings: tuple[tuple[str, Setting], ...]
    task: str
    preference: tuple[str, str] | None
    is_trl: bool
    refused: tuple[tuple[str, str, str], ...] = ()


def has_training(file: ConfigFile) -> bool:
    """True for Python code with a trainer of TRL or transformers."""
    if file.path.suffix not in _SUFFIXES or "Trainer" not in file.text:
        return False
    try:
        return any(_trainer_of(call) is not None for call in _calls(file))
    except SpecError:
        return False


def read_python(file: ConfigFile) -> PythonRun:
    """The training of a script or notebook.

    Raises:
        SpecError: The code does not parse, trains several times, or has a value that matters and is not plain.
    """
    calls = [*_calls(file)]
    trainers = [call for call in calls if _trainer_of(call) is not None]
    if len({call.name for call in trainers}) > 1 or len(trainers) > 1:
        lines = " and ".join(str(call.line) for call in trainers)
        raise file_error(file.name, f"trains several times, in lines {lines}", "leave one trainer", trainers[1].line)
    (trainer,) = trainers
    kind = _trainer_of(trainer)
    before = calls[: calls.index(trainer) + 1]
    models = [call for call in before if call.name == "from_pretrained" and not call.owner.endswith("Tokenizer")]
    is_unsloth = any(call.owner in (*_UNSLOTH_MODELS, *_IMAGES) for call in models)
    refused = [_refused_model(call) for call in models if call.owner in _IMAGES]
    if kind not in {*_TASKS, "", "Seq2Seq"}:
        rule = "belongs to reinforcement learning, distillation or another loss, which is not modeled yet"
        refused.append((trainer.name, rule, "predict an update of its policy as sft"))
    if refused:
        return PythonRun(UNSLOTH if is_unsloth else "", (), "", None, is_trl=False, refused=tuple(refused))
    chosen = [*models[:1], *(call for call in before if call.name in ("get_peft_model", "LoraConfig"))]
    configurations = [call for call in before if _CONFIGURATIONS.match(call.name)]
    chosen += [call for call in before if call.name == "BitsAndBytesConfig"][:1] + configurations[-1:] + [trainer]
    settings = dict(_settings(chosen, file))
    of_trl = any(match[1] for call in configurations[-1:] if (match := _CONFIGURATIONS.match(call.name)))
    if is_unsloth:
        _complete(settings, configurations[-1:], is_preference=bool(_TASKS.get(kind or "")))
    elif any(call.name == "BitsAndBytesConfig" for call in chosen):
        _add(settings, "bnb_4bit_quant_type", "fp4", "the default of BitsAndBytesConfig")
    _choose_length(settings)
    word = f"{trainer.name} trains, in line {trainer.line}"
    task = OF_PROGRAMS.get(_TASKS.get(kind or "", ""))
    return PythonRun(
        UNSLOTH if is_unsloth else "",
        tuple(settings.items()),
        word if kind == "SFT" else "",
        None if task is None else (task, word),
        of_trl and not is_unsloth,
    )


def _trainer_of(call: _Call) -> str | None:
    """Kind of a trainer (``SFT``, ``DPO``; empty for that of transformers); None for other calls."""
    match = _TRAINERS.match(call.name)
    if match is None or call.owner or call.name.startswith("Patch"):  # PatchDPOTrainer() trains nothing
        return None
    return match[2] or ("SFT" if match[1] else "")


def _refused_model(call: _Call) -> tuple[str, str, str]:
    return call.owner, "is for models of images, sound or embeddings, which are not modeled yet", ""


def _settings(calls: Iterable[_Call], file: ConfigFile) -> Iterator[tuple[str, Setting]]:
    """Settings of calls by their names in TrainingArguments."""
    of_calls, harmless = table("python"), table("python_no_effect")
    for call in calls:
        renamed: Mapping[str, str | None] = of_calls.get(call.name, {})
        for argument, value in call.values.items():
            name = renamed.get(argument, argument)
            if isinstance(value, str) and argument in ("0", "model") and _TRAINERS.match(call.name):
                name = "model_name_or_path"  # TRL's trainers load a model by its name
            if value is None or name is None or (argument.isdigit() and name == argument):
                continue
            if name == "model_init_kwargs" and isinstance(value, dict):
                inside = _Call("from_pretrained", "", call.line, value, call.is_certain)
                yield from _settings([inside], file)
                continue
            shown = f"{call.name}: {argument if not argument.isdigit() else name}"
            if isinstance(value, _Unknown) or not call.is_certain:
                if name in harmless or _HARMLESS.match(name) or name == "ref_model":
                    value = True
                else:
                    why = "is no plain value" if call.is_certain else "stands under a condition that no value decides"
                    raise file_error(file.name, f"{shown} {why}, and simplan runs nothing", _FIX, call.line)
            yield name, Setting(shown, value, call.line)


def _add(settings: dict[str, Setting], key: str, value: Any, origin: str) -> None:
    """Add a default, whose origin stands in place of a name."""
    if key not in settings:
        settings[key] = Setting(f"{origin}: {key}", value)


def _complete(settings: dict[str, Setting], configurations: list[_Call], *, is_preference: bool) -> None:
    """Add Unsloth's defaults, and its words as those of others."""
    value = {key: setting.value for key, setting in settings.items()}
    is_full = bool(value.get("full_finetuning"))
    if configurations and not configurations[0].name.endswith("TrainingArguments"):
        for key, default in (("per_device_train_batch_size", 4), ("gradient_accumulation_steps", 2)):
            _add(settings, key, default, "the default of Unsloth")
        _add(settings, "optim", "adamw_8bit", "the default of Unsloth")
    _add(settings, "max_seq_length", 2048, "the default of Unsloth")
    halves = [key for key in ("bf16", "fp16") if value.get(key) is True]
    if not halves:
        is_half = str(value.get("torch_dtype", "")).rpartition(".")[2] == "float16"
        _add_over(settings, "fp16" if is_half else "bf16", True, "the type of the weights")
    few = "load_in_8bit" if value.get("load_in_8bit") else "load_in_4bit"
    wide = is_full or any(value.get(key) for key in ("load_in_16bit", "load_in_fp8"))
    if wide or (few == "load_in_8bit"):
        _add_over(settings, "load_in_4bit", False, "another type")
    elif value.get("load_in_4bit", True):
        _add(settings, "load_in_4bit", True, "the default of Unsloth")
        _add(settings, "bnb_4bit_use_double_quant", True, "Unsloth's BitsAndBytesConfig")
    if is_full:
        if not value.get("float32_mixed_precision"):
            _add(settings, "pure_bf16", True, "Unsloth's full fine-tuning")
    else:
        _add(settings, "lora_r", 16, "the default of Unsloth")
        usual = [
            *(names.AROUND["self_attn"] if value.get("finetune_attention_modules", True) else ()),
            *(names.AROUND["mlp"] if value.get("finetune_mlp_modules", True) else ()),
        ]
        _add(settings, "lora_target_modules", usual, "the default of Unsloth")
    settings.pop("gradient_checkpointing", None)  # of the configuration; the model has its own
    setting = settings.pop(
        "use_gradient_checkpointing", Setting("the default of Unsloth: gradient checkpointing", "unsloth")
    )
    lengths = [number for key in _LENGTHS if (number := whole(settings[key].value if key in settings else None))]
    if setting.value == "unsloth" and min(lengths, default=0) >= _NUM_OFFLOADED and not is_preference:
        settings["activation_offloading"] = Setting(setting.key, "unsloth", setting.line)
    else:
        settings["gradient_checkpointing"] = Setting(setting.key, setting.value is not False, setting.line)


def _add_over(settings: dict[str, Setting], key: str, value: Any, origin: str) -> None:
    old = settings.get(key)
    settings[key] = Setting(f"{origin}: {key}" if old is None else old.key, value, None if old is None else old.line)


def _choose_length(settings: dict[str, Setting]) -> None:
    """Keep the shortest of several lengths, to which sequences are cut."""
    known = [
        (number, key) for key in _LENGTHS if key in settings and (number := whole(settings[key].value)) is not None
    ]
    for _, key in sorted(known)[1:]:
        del settings[key]


# Code


def _calls(file: ConfigFile) -> Iterator[_Call]:
    """Calls of a file that may count, in the order of the code."""
    reader = _Reader()
    for tree, first in _trees(file):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and has_absurd_number(node.value):
                raise file_error(file.name, "the file has a number of many digits", f"use at most {MAX_DIGITS} digits")
        try:
            reader.run(tree.body, has_lines=first)
        except RecursionError:
            raise file_error(file.name, "the code is nested too deeply", "flatten it") from None
    yield from reader.calls


def _trees(file: ConfigFile) -> Iterator[tuple[ast.Module, bool]]:
    """Syntax trees of a script, or of the cells of a notebook; True with each whose lines are those of the file."""
    if file.path.suffix != ".ipynb":
        yield _parsed(file.text, file, ""), True
        return
    try:
        notebook = json.loads(file.text, parse_int=whole_number)
    except (ValueError, RecursionError):
        raise file_error(file.name, "this is no notebook: it is no JSON", "save it again") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    for number, cell in enumerate(cells if isinstance(cells, list) else (), start=1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            text = "".join(map(str, source)) if isinstance(source, list) else str(source)
            yield _parsed(_without_magic(text), file, f"cell {number}: "), False


def _without_magic(text: str) -> str:
    """Code of a cell whose commands of IPython and of the shell do nothing."""
    return re.sub(r"(?m)^([ \t]*)[%!](?:[^\n\\]|\\[\s\S])*$", r"\1pass", text)


def _parsed(text: str, file: ConfigFile, where: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) and not where else None
        raise file_error(file.name, f"{where}this is not Python", "check the code", line) from None


@dataclass(slots=True)
class _Reader:
    """Values of names, and calls that may count, statement by statement."""

    calls: list[_Call] = field(default_factory=list)
    _names: dict[str, Any] = field(default_factory=dict)
    _is_certain: bool = True
    _has_lines: bool = True
    _depth: int = 0

    def run(self, statements: Iterable[ast.stmt], *, has_lines: bool) -> None:
        """Follow statements of a module."""
        self._has_lines = has_lines
        self._follow(statements)

    def _follow(self, statements: Iterable[ast.stmt]) -> None:
        self._depth += 1
        if self._depth > _MAX_NESTED:
            raise RecursionError
        for statement in statements:
            self._statement(statement)
        self._depth -= 1

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self._branch(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            value = _UNKNOWN if node.value is None else self._value(node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, value)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, _UNKNOWN)
        elif isinstance(node, ast.Expr | ast.Return) and node.value is not None:
            self._value(node.value)
        elif isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.With):
            if isinstance(node, ast.For):
                self._assign(node.target, _UNKNOWN)
            if isinstance(node, ast.FunctionDef):
                for argument in (*node.args.args, *node.args.kwonlyargs):
                    self._names[argument.arg] = _UNKNOWN
            self._follow(node.body)
        elif isinstance(node, ast.Try):
            self._follow(node.body)

    def _branch(self, node: ast.If) -> None:
        test = True if ast.unparse(node.test).startswith("__name__ ==") else self._value(node.test)
        if not isinstance(test, _Unknown):
            self._follow(node.body if test else node.orelse)
            return
        was_certain, before = self._is_certain, dict(self._names)
        self._is_certain = False
        for body in (node.body, node.orelse):
            self._follow(body)
        self._is_certain = was_certain
        changed = [name for name, value in self._names.items() if name not in before or before[name] is not value]
        self._names |= dict.fromkeys(changed, _UNKNOWN)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for element in target.elts:
                self._assign(element, _UNKNOWN)

    def _value(self, node: ast.expr) -> Any:
        """Value of an expression; ``_UNKNOWN`` for one that only running would give."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._names.get(node.id, _UNKNOWN)
            case ast.List() | ast.Tuple() | ast.Set():
                return self._all([self._value(element) for element in node.elts])
            case ast.Dict():
                return self._mapping(node)
            case ast.UnaryOp(op=ast.Not()):
                value = self._value(node.operand)
                return value if isinstance(value, _Unknown) else not value
            case ast.UnaryOp(op=ast.USub()):
                value = self._value(node.operand)
                return -value if isinstance(value, int | float) else _UNKNOWN
            case ast.BinOp():
                return _combined(type(node.op), self._value(node.left), self._value(node.right))
            case ast.Compare(ops=[only], comparators=[other]):
                return _combined(type(only), self._value(node.left), self._value(other))
            case ast.IfExp():
                test = self._value(node.test)
                return test if isinstance(test, _Unknown) else self._value(node.body if test else node.orelse)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Call():
                return self._called(node)
        return _UNKNOWN

    def _all(self, values: list[Any]) -> Any:
        return _UNKNOWN if any(isinstance(value, _Unknown) for value in values) else values

    def _mapping(self, node: ast.Dict) -> Any:
        keys = self._all([_UNKNOWN if key is None else self._value(key) for key in node.keys])
        values = self._all([self._value(item) for item in node.values])
        if isinstance(keys, _Unknown) or isinstance(values, _Unknown):
            return _UNKNOWN
        return dict(zip(map(str, keys), values, strict=True))

    def _called(self, node: ast.Call) -> Any:
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            self._value(node.func.value)  # SFTTrainer(...).train()
        values = {str(place): self._value(argument) for place, argument in enumerate(node.args)}
        for keyword in node.keywords:
            value = self._value(keyword.value)
            if keyword.arg is not None:
                values[keyword.arg] = value
            elif isinstance(value, dict):
                values |= {str(key): item for key, item in value.items()}
            else:
                values["**"] = _UNKNOWN
        if name in _SUPPORTED:
            return True
        if name == "dict" and not owner and not any(isinstance(value, _Unknown) for value in values.values()):
            return values
        owner_name = owner.rpartition(".")[2]
        is_model = name == "from_pretrained" and not owner_name.endswith(("Tokenizer", "Processor", "Config"))
        counts = is_model or name in ("get_peft_model", "LoraConfig", "BitsAndBytesConfig")
        if counts or _TRAINERS.match(name) or _CONFIGURATIONS.match(name):
            line = node.lineno if self._has_lines else None
            is_class = bool(_TRAINERS.match(name) or _CONFIGURATIONS.match(name)) and not owner_name[:1].isupper()
            self.calls.append(_Call(name, "" if is_class else owner_name, line, values, self._is_certain))
        return _UNKNOWN


def _combined(kind: type, left: Any, right: Any) -> Any:
    """Result of an operation on two plain values."""
    known = _OPERATORS.get(kind)
    if known is None or isinstance(left, _Unknown) or isinstance(right, _Unknown):
        return _UNKNOWN
    if kind in (ast.Eq, ast.NotEq):
        return known(left, right)
    numbers = all(isinstance(number, int | float) and abs(number) < 10**MAX_DIGITS for number in (left, right))
    if not numbers or (kind is ast.Pow and abs(right) > _MAX_POWER):
        return _UNKNOWN
    try:
        return known(left, right)
    except (ArithmeticError, ValueError):
        return _UNKNOWN
