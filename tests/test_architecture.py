"""The layout as rules: imports point one way, and torch stays out of simplan."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from simplan import catalog
from simplan.model.families import FAMILIES
from simplan.plan.plan import ParallelPlan
from simplan.plan.shard import Shard
from tests.support.sources import ROOT, nodes, python_files

# Lowest first: a module may import what stands on a lower line, and within its own entry.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("units", "errors", "children", "jit", "documentation"),
    ("document",),
    ("problems",),
    ("io",),
    ("base", "wording"),
    ("plan",),
    ("model",),
    ("unmodeled",),
    ("optimizers",),
    ("training",),
    ("software",),
    ("cluster",),
    ("catalog",),
    ("job",),
    ("rules",),
    ("program",),
    ("runs",),
    ("cost",),
    ("network",),
    ("sim",),
    ("prediction",),
    ("predict",),
    ("search", "validate", "accuracy", "explain", "goodput"),
    ("interop", "report"),
    ("scenario",),
    ("api",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
EXECUTOR_MAY_IMPORT = (
    "simplan.base",
    "simplan.wording",
    "simplan.plan",
    "simplan.model",
    "simplan.optimizers",
    "simplan.training",
    "simplan.software",
    "simplan.cluster",
    "simplan.catalog",
    "simplan.job",
    "simplan.runs",
    "simplan.rules",
    "simplan.program",
    "simplan.errors",
    "simplan.units",
    "simplan.io",
    "simplan.children",
    "simplan.cost.calibration.format",
)
NEVER_IN_SIMPLAN = {"torch", "streamlit", "plotly", "executor", "app", "fit"}
IN_WORKERS = ("app.figures", "app.fitting", "app.jobs", "app.predictions", "app.uploads")
"""Modules of the dashboard that its worker processes import."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names of everything a file imports, wherever in the file, ``from a import b`` as ``a.b``.

    Except in methods named ``report``, which give a result the text that its command prints.
    """
    reports = {
        id(part)
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef) and node.name == "report"
        for part in ast.walk(node)
    }
    for node in nodes(source):
        if id(node) in reports:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def simplan_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module of simplan must not import."""
    package = module.split(".")[1] if "." in module else None
    wrong = []
    for name in imports_of(source, module, is_package=is_package):
        top, _, rest = name.partition(".")
        if top in NEVER_IN_SIMPLAN:
            wrong.append(f"{module} imports {name}: simplan never imports {top}")
        elif top == "simplan":
            target = rest.split(".")[0]
            if target not in LEVEL:
                continue  # a name of simplan/__init__.py, such as __version__
            if package is None or (target != package and LEVEL[target] >= LEVEL[package]):
                wrong.append(f"{module} imports {name}: {target} is not below {package or 'simplan'}")
    return wrong


def executor_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module of the executor must not import."""
    return [
        f"{module} imports {name}: the executor may import {', '.join(EXECUTOR_MAY_IMPORT)} only"
        for name in imports_of(source, module, is_package=is_package)
        if name.split(".")[0] in ("simplan", "app")
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in EXECUTOR_MAY_IMPORT)
    ]


def violations_in(package: str, violations: Callable[..., list[str]]) -> list[str]:
    """All that its modules must not import."""
    return [
        wrong
        for path in python_files(package)
        for wrong in violations(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    ]


def test_simplan_imports_point_one_way() -> None:
    modules = [module.split(".") for module in map(module_name, python_files("simplan"))]
    assert {parts[1] for parts in modules if len(parts) > 1} <= LEVEL.keys(), "no place in the order of layers"
    assert violations_in("simplan", simplan_violations) == []


IN_CIRCLES = {"catalog", "cli", "cluster", "interop", "model", "plan"}
"""Packages whose modules import each other, most for annotations alone."""


def test_modules_of_a_package_import_each_other_in_one_direction() -> None:
    """Imports inside functions and for annotations count, too."""
    files = {module_name(path): path for path in python_files("simplan")}
    circles = TopologicalSorter[str]()
    for module, path in files.items():
        names = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
        known = {name if name in files else name.rpartition(".")[0] for name in names} & files.keys()
        package = module.split(".")[1:2]
        if path.name != "__init__.py" and not IN_CIRCLES.intersection(package):
            circles.add(
                module, *(imported for imported in known if imported.split(".")[1:2] == package and imported != module)
            )
    circles.prepare()  # raises for a circle


def test_the_executor_knows_only_what_it_runs() -> None:
    assert violations_in("executor", executor_violations) == []


def test_parallelism_and_models_know_no_trainer() -> None:
    """What splits a model, and what sums its gradients, is asked by the trainer; not the other way round."""
    imported = {
        (module_name(path), name)
        for path in python_files("executor/distributed", "executor/models")
        for name in imports_of(path.read_text(), module_name(path))
    }
    assert not [pair for pair in sorted(imported) if pair[1].startswith("executor.train")]


def app_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Packages that a module of the dashboard must not import; for modules of worker processes, Streamlit is one."""
    wrong = {"executor", "torch", "fit", *(("streamlit",) if module.startswith(IN_WORKERS) else ())}
    imports = imports_of(source, module, is_package=is_package)
    return [f"{module} imports {name}" for name in imports if name.split(".")[0] in wrong]


def test_the_dashboard_knows_simplan_alone() -> None:
    assert violations_in("app", app_violations) == []


@pytest.mark.parametrize(
    ("violations", "module", "source"),
    [
        (simplan_violations, "simplan.plan.plan", "from simplan.program.action import Action"),
        (simplan_violations, "simplan.plan.plan", "def f():\n    from ..predict import predict"),
        (simplan_violations, "simplan.cost.compute.kernels", "import simplan.sim.engine"),
        (simplan_violations, "simplan.report.text", "from simplan import cli"),
        (simplan_violations, "simplan.validate.compare", "from simplan.search import best"),
        (simplan_violations, "simplan.cli.run", "import torch.distributed"),
        (simplan_violations, "simplan.cli.run", "import executor.launch"),
        (simplan_violations, "simplan", "from simplan.errors import SpecError"),
        (executor_violations, "executor.rank", "from simplan.sim import engine"),
        (executor_violations, "executor.rank", "from simplan.cost import compute"),
        (executor_violations, "executor.rank", "import simplan"),
        (app_violations, "app.views.plan", "import executor.run"),
        (app_violations, "app.state", "import torch"),
        (app_violations, "app.figures.x", "import streamlit"),
    ],
)
def test_a_wrong_arrow_is_found(violations: Callable[[str, str], list[str]], module: str, source: str) -> None:
    assert violations(source, module)


def test_import_simplan_brings_no_torch_and_no_rich() -> None:
    program = (
        "import sys, simplan.cli; "
        "print(*sorted({'torch', 'rich', 'numpy', 'numba', 'simpy', 'executor'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert process.stdout.split() == []


def test_small_commands_bring_no_numba() -> None:
    """Its import takes longer than they do."""
    run = "main(['--help']); main(['predict', 'scenarios/1f1b.yaml'])"
    program = f"import sys; from simplan.cli import main; {run}; print('numba' in sys.modules, file=sys.stderr)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert process.stderr.split() == ["False"]


def test_a_plain_prediction_is_read_in_seventy_files() -> None:
    """What a job has not, such as experts, pipelines or offloading, is no code of its prediction."""
    program = """
import sys
from simplan import make_job
from simplan.predict import predict
job, files = make_job("llama3-8b", num_nodes=2, dp_shard=16, global_batch_size=32), set()
sys.setprofile(lambda frame, event, _: event == "call" and files.add(frame.f_code.co_filename))
predict(job)
sys.setprofile(None)
print(*sorted(file for file in files if "simplan" in file and not file.endswith("__init__.py")))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    files = [file for file in process.stdout.split() if Path(file).is_relative_to(ROOT)]
    assert 60 < len(files) <= 70, files


MAX_MODULES = 16  # of a folder, so that its list is read at a glance


def test_no_folder_has_too_many_modules() -> None:
    modules: Counter[Path] = Counter()
    for path in python_files("simplan", "executor", "app", "fit", "tests"):
        if path.name != "__init__.py":
            modules[path.parent.relative_to(ROOT)] += 1
    assert {str(folder): number for folder, number in modules.items() if number > MAX_MODULES} == {}


# Names of operators that general modules use for something else: a kind of layer, a field, a measured kernel, a role.
OTHER_WORDS = frozenset({
    "add", "attention", "cat", "cross_entropy", "gelu", "head", "images", "input", "lm_head", "log-probabilities",
    "logits", "norm", "qkv", "relu", "rotary", "routing", "scale", "shared_expert_gate", "silu_multiply", "split",
    "transform", "v", "wte",
})  # fmt: skip


def test_no_general_module_names_an_operator_of_a_model() -> None:
    """What a family calls its operators, tensors and parameters is known where families are built, and nowhere else.

    Others ask for kinds of kernels, for what reads and makes a tensor, and for ``Role``.
    """
    names: set[str] = set()
    for model in map(catalog.model, catalog.names("models")):
        for layer in FAMILIES[model.family].layers(model, Shard()):
            names |= {kernel.name for kernel in layer.kernels} | {*layer.tensors}
            names |= {parameter.name for parameter in layer.parameters}
    assert {"router", "residual1", "kv_b", "conv1", "norm1 output", "experts_down.weight"} <= names
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in python_files("simplan")
        if not path.is_relative_to(ROOT / "simplan/model")
        for node in nodes(path.read_text())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names - OTHER_WORDS
    ]
    assert not named


def test_every_option_of_a_plan_is_read_where_steps_are_made_or_priced() -> None:
    """An option that nothing reads would be accepted without a word."""
    made = [
        *python_files("simplan/program", "simplan/predict", "simplan/cost"),
        *(ROOT / f"simplan/{name}/{name}.py" for name in ("plan", "software")),
    ]
    read = {node.attr for path in made for node in nodes(path.read_text()) if isinstance(node, ast.Attribute)}
    assert set(ParallelPlan.model_fields) <= read


@pytest.mark.slow
def test_only_plans_with_compression_load_it() -> None:
    """Who does not ask for it pays nothing, neither in a prediction nor on a rank."""
    code = (
        "import sys, simplan; simplan.predict('gpt2-124m', cluster='dgx-h100', dp_replicate=8); "
        "import executor.distributed.ddp; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name for name in done.stdout.split() if name.endswith(".compression")}
    assert loaded <= {"simplan.plan.compression"}  # the keys


def test_a_rank_loads_what_its_plan_needs() -> None:
    """A DDP run on one machine loads no module of another family, axis or kind of checkpoint (once 75 modules).

    Without torchao, which only float8 needs.
    """
    code = (
        "import sys; sys.modules['torchao'] = None; import executor.worker, executor.distributed.ddp; "
        "print(*sys.modules); import executor.train.trainer, executor.run, executor.checks"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.split() if name.partition(".")[0] == "executor"]
    assert len(loaded) <= 37, loaded


def test_a_class_name_has_one_meaning() -> None:
    """Public classes of simplan, the executor and the dashboard have names of their own."""
    modules: dict[str, list[str]] = {}
    for path in python_files("simplan", "executor", "app"):
        for node in nodes(path.read_text()):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module_name(path))
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}
