# Two commands for a newcomer: `make demo` and `make test`. Everything lives in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SUITES ?= core
BENCH := PYTHONPATH=. $(BIN)/python -m bench.compare

.PHONY: demo test lint docs clean bench bench-all bench-growth bench-scale bench-standby bench-documents gpu-check

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache > /dev/null
	-$(BIN)/python -m tmrun.worker.shim  # else its tests are skipped
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache

# The documentation as a site, in .site.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

# What a user gains, side by side with the peers (docs/bench.md). Goes on where it stopped; BENCH_FLAGS="--reps 1 --tuned-only" for a quick look.
bench: $(STAMP)
	$(BENCH) run $(SUITES) $(BENCH_FLAGS)
	$(BENCH) write

bench-all:
	$(MAKE) bench SUITES="core network straggler nodes state throttled compile growth"

bench-growth:
	$(MAKE) bench SUITES=growth

bench-scale: $(STAMP)
	$(BENCH) scale
	$(BENCH) write

bench-standby: $(STAMP)
	$(BIN)/python bench/standby.py pauses

bench-documents: $(STAMP)
	$(BENCH) write

# What only a machine with a GPU can say (docs/gpu.md); ends with 77 where there is none.
gpu-check: $(STAMP)
	$(BIN)/python bench/gpu_check.py $(GPU_FLAGS)

clean:
	rm -rf $(VENV) .bench
