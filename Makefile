# Every target makes .venv and installs what it needs by itself; the second run finds it there.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo gpu faults failures netbench test test-all test-browser screenshots lint bench release-check accuracy-gate outputs architectures losses fit docs clean

help:
	@echo "make demo      calibrate, predict, run and compare a small GPT on this machine (under five minutes)"
	@echo "make gpu       calibrate, run and rehearse scenarios on one CUDA device, and report (under nine minutes)"
	@echo "make test      lint, types, the tests that are not slow, and the checked scenarios"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-browser  the dashboard in a real browser (installs playwright; uses chromium of the system, or its own)"
	@echo "make screenshots   docs/screenshots: pages of the dashboard, as the documentation shows them"
	@echo "make outputs   the outputs that pages of the documentation show (half an hour)"
	@echo "make accuracy-gate   accuracy on published runs against benchmarks/accuracy.json (two minutes)"
	@echo "make release-check   build sdist and wheel, and use them in clean environments of each Python here (ten minutes)"
	@echo "make bench     the numbers of the benchmark table"
	@echo "make faults    break real runs, and write docs/reference/faults.md: what each said and left (ten minutes)"
	@echo "make failures  jobs with drawn failures on hosts, and benchmarks/FAILURES.md (root; half an hour; resumes)"
	@echo "make architectures   capture what transformers knows, and write docs/reference/architectures.md (half an hour)"
	@echo "make losses    train a small model in several ways, and write docs/reference/losses.md (half an hour; resumes)"
	@echo "make netbench  real collectives and steps on hosts with shaped links (root; half an hour; resumes)"
	@echo "make fit       the catalog's constants again, fitted on published measurements"
	@echo "make docs      the documentation site, in site/"
	@echo "make lint      ruff and mypy only"
	@echo "make clean     remove .venv, caches, demo-out, gpu-out and site"

demo: $(READY)
	$(BIN)/simplan demo

gpu: $(READY)
	$(BIN)/simplan suite scenarios/one-gpu -o gpu-out

# Scenarios first: one process compiles the simulators for the workers of pytest, which would each do it.
test: lint
	$(BIN)/simplan check scenarios
	$(BIN)/pytest -n auto -m "not slow"

test-all: lint
	$(BIN)/simplan check scenarios
	$(BIN)/pytest -n auto

test-browser: .venv/.browser
	$(BIN)/pytest tests/browser

screenshots: .venv/.browser
	$(BIN)/python -m tests.browser.screenshots docs/screenshots

.venv/.browser: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@command -v chromium >/dev/null || $(BIN)/python -m playwright install --with-deps chromium
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

accuracy-gate: $(READY)
	$(BIN)/python -m benchmarks.accuracy_gate

outputs: $(READY)
	$(BIN)/python -m tests.support.pages

# RELEASE names environments, such as RELEASE='3.12:app 3.11:app:lowest'.
release-check: $(READY)
	$(BIN)/python -m tests.release.check $(RELEASE)

bench: $(READY)
	$(BIN)/python -m benchmarks

faults: $(READY)
	$(BIN)/python -m benchmarks.faults

failures: $(READY)
	$(BIN)/python -m benchmarks.failures

architectures: $(READY)
	$(BIN)/python -m benchmarks.architectures

losses: $(READY)
	$(BIN)/python -m benchmarks.losses

netbench: $(READY)
	$(BIN)/python -m benchmarks.network

fit: $(READY)
	$(BIN)/python -m fit.collectives scenarios/published/collectives*.yaml --write
	$(BIN)/python -m fit.step_times scenarios/published --write
	$(BIN)/python -m fit.peak_memory scenarios/published --fine-tuning scenarios/heldout/finetuning_*.yaml --write

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "simplan needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; install its venv module (Debian: apt install python3-venv)."; \
	  exit 2; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[executor,app,dev,docs]'
	@touch $@

clean:
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-out gpu-out site
