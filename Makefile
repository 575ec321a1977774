# `make run` trains and compares the basic methods, `make test` checks everything that is fast; `make install`, which
# both begin with, puts cutlayer and its tools into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install run test test-slow test-gpu check format bench clean

install: $(READY)

run: $(READY)
	$(BIN)/cutlayer run digits --overwrite

test: check
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadgroup

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --numprocesses 2 --dist loadgroup

# On a machine with a GPU, where .venv has a torch for it; elsewhere all of them are skipped.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The recorded tables, and how long a script takes, are in bench/README.md.
bench: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python bench/speed.py
	$(BIN)/python bench/import_time.py
	$(BIN)/python bench/engine_rule.py
	$(BIN)/python bench/memory.py
	OMP_NUM_THREADS=2 $(BIN)/python bench/fusion.py
	$(BIN)/python bench/plan.py
	OMP_NUM_THREADS=2 $(BIN)/python bench/client_memory.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/wire.py
	$(BIN)/python bench/refusals.py
	OMP_NUM_THREADS=2 $(BIN)/python bench/codecs.py
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python bench/devices.py
	$(BIN)/python bench/many_clients.py
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python bench/provenance.py
	$(BIN)/python bench/server_engine.py
	$(BIN)/python bench/flower.py

# The pinned versions first, then the package itself without looking for others.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "cutlayer needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
