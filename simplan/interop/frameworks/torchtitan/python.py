"""Configurations of version 0.3 in Python: functions that assign plain values, read without running them.

::

    def mine():
        config = llama3_8b()  # of torchtitan, or of the same file
        config.parallelism.tensor_parallel_degree = 8
        config.activation_checkpoint = FullAC.Config()
        config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
        return config
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simplan.document import MAX_DIGITS, has_absurd_number
from simplan.errors import did_you_mean, file_error
from simplan.interop.configuration import Setting
from simplan.interop.frameworks.torchtitan.settings import facts

_SECTIONS = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
_CHECKPOINTING = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
_CONVERTERS = {
    "Float8LinearConverter": ("quantize.linear.float8", {"recipe_name": "rowwise"}),
    "Float8GroupedExpertsConverter": ("quantize.grouped_mm.float8", {}),
    "MXFP8LinearConverter": ("quantize.linear.mx", {}),
    "MXFP8GroupedExpertsConverter": ("quantize.grouped_mm.mx", {}),
}
"""Classes of torchtitan.components.quantization -> converter before version 0.3, and other defaults."""
_CHUNKED_LOSSES = ("ChunkedLossWrapper", "ChunkedCELoss")
_WITHOUT_EFFECT = (
    "metrics",
    "profiler",
    "lr_scheduler",
    "dataloader",
    "checkpoint",
    "validator",
    "comm",
    "debug",
)
_MAX_CALLS = 8
_FIX = "write config.SECTION.KEY = VALUE with plain values, or give the settings as arguments"


def read_function(text: str, file: str, name: str, module: str) -> tuple[str, tuple[Setting, ...]]:
    """Read one configuration of a Python file.

    Args:
        text: Content of the file.
        file: Its name in errors.
        name: Name of the function.
        module: Name of the module, for errors.

    Returns:
        Model, and settings by their canonical keys, torchtitan's own configuration first.

    Raises:
        SpecError: The file has no such function, or the function does more than assign values.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise file_error(file, "this is not Python", "name a module with torchtitan's configurations", line) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and has_absurd_number(node.value):
            fix = f"use at most {MAX_DIGITS} digits"
            raise file_error(file, "the file has a number of many digits", fix, node.lineno)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        raise file_error(file, f"{module} has no function {name}", did_you_mean(name, functions))
    function = _Function(file, functions, _imported(tree))
    try:
        function.run(functions[name])
    except RecursionError:  # ast.unparse
        raise file_error(file, f"{name} is nested too deeply", _FIX, functions[name].lineno) from None
    return function.model, tuple(function.settings.values())


def _imported(tree: ast.Module) -> Mapping[str, str]:
    """Imported name -> module that it comes from."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in nodes for alias in node.names}


@dataclass(slots=True)
class _Function:
    """Settings that a function makes.

    Attributes:
        model: Module of torchtitan whose model it is.
        settings: Canonical key -> setting.
    """

    file: str
    functions: Mapping[str, ast.FunctionDef]
    imported: Mapping[str, str]
    model: str = ""
    settings: dict[str, Setting] = field(default_factory=dict)
    _calls: int = 0

    def run(self, function: ast.FunctionDef) -> None:
        """Follow the statements of a function."""
        for statement in function.body:
            if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass | ast.Assert):
                continue
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # docstring
            if isinstance(statement, ast.Return):
                if isinstance(statement.value, ast.Call):
                    self._start(statement.value)
                return
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise self._refused(statement)
            self._assign(statement.targets[0], statement.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        path = ast.unparse(target).split(".")
        if isinstance(target, ast.Name):
            if isinstance(value, ast.Call):
                self._start(value)
            return
        if not isinstance(target, ast.Attribute) or not all(part.isidentifier() for part in path):
            raise self._refused(target)
        self._set(".".join(path[1:]), value)

    def _start(self, call: ast.Call) -> None:
        """Follow a call that makes a whole configuration, or a part that is assigned below."""
        name = ast.unparse(call.func)
        if name in self.functions and self._calls < _MAX_CALLS:
            self._calls += 1
            self.run(self.functions[name])
        elif (known := _known(name)) is not None:
            self.model, values = known
            self.settings |= {key: Setting(key, value) for key, value in values.items()}
        elif name.endswith("Trainer.Config"):
            for keyword in call.keywords:
                self._set(str(keyword.arg), keyword.value)
        elif name == "model_registry":
            self._set("model_spec", call)
        else:
            raise self._refused(call)

    def _set(self, key: str, value: ast.expr) -> None:
        name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if key == "activation_checkpoint":
            mode = _CHECKPOINTING.get(name.split(".")[0]) if name else "none"
            self._put("activation_checkpoint.mode", mode or name, value)
        elif key == "model_spec":
            if isinstance(value, ast.Call):
                self._model(value)
        elif key == "loss" and isinstance(value, ast.Call):
            chunked = name.split(".")[0] in _CHUNKED_LOSSES
            self._put("loss", "chunked" if chunked else "cross_entropy", value)
            for number in (keyword.value for keyword in value.keywords if keyword.arg == "num_chunks"):
                self._put("loss.num_chunks", self._literal(number), value)
        elif isinstance(value, ast.Call) and _SECTIONS.get(name) == key:
            for old_key in [old_key for old_key in self.settings if old_key.startswith(f"{key}.")]:
                del self.settings[old_key]
            for keyword in value.keywords:
                self._set(f"{key}.{keyword.arg}", keyword.value)
        elif key.split(".")[0] in _WITHOUT_EFFECT or key in ("optimizer", "hf_assets_path"):
            return
        else:
            self._put(key, self._literal(value), value)

    def _model(self, call: ast.Call) -> None:
        """Settings of a call of a model's registry."""
        name = ast.unparse(call.func)
        if not name.endswith("model_registry") or not call.args:
            raise self._refused(call)
        module = self.imported.get(name, "").rpartition(".")[2]
        self.model = module if module in facts().models else self.model
        self._put("model.flavor", self._literal(call.args[0]), call)
        for keyword in call.keywords:
            if keyword.arg == "converters" and isinstance(keyword.value, ast.List):
                self._converters(keyword.value)
            elif keyword.arg == "moe_comm_backend":
                self._put("parallelism.expert_parallel_comm_backend", self._literal(keyword.value), call)
            elif keyword.arg != "attn_backend":
                raise self._refused(keyword.value)

    def _converters(self, converters: ast.List) -> None:
        names = []
        for converter in converters.elts:
            known = (
                _CONVERTERS.get(ast.unparse(converter.func).split(".")[0]) if isinstance(converter, ast.Call) else None
            )
            if known is None or not isinstance(converter, ast.Call):
                raise self._refused(converter)
            name, defaults = known
            names.append(name)
            arguments = {str(keyword.arg): keyword.value for keyword in converter.keywords}
            for key, default in defaults.items():
                self._put(f"{name}.{key}", default, converter)
            for key, value in arguments.items():
                if key != "model_compile_enabled":
                    self._put(f"{name}.{key}", self._literal(value), converter)
        self._put("model.converters", names, converters)

    def _put(self, key: str, value: Any, node: ast.expr) -> None:
        self.settings.pop(key, None)
        self.settings[key] = Setting(key, value, node.lineno)

    def _literal(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise self._refused(node) from None

    def _refused(self, node: ast.stmt | ast.expr) -> Exception:
        written = ast.unparse(node).partition("\n")[0][:60]
        return file_error(self.file, f"{written} is not a plain value, and simplan runs nothing", _FIX, node.lineno)


def _known(name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Module and settings of a configuration of torchtitan, by the last part of its name."""
    last_name = name.rpartition(".")[2]
    return next(
        ((module, named[last_name]) for module, named in facts().configurations.items() if last_name in named), None
    )
