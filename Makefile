# `make demo` and `make test` do all their set-up themselves: a virtual environment in .venv, made once and reused.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

.PHONY: demo test lint format kills bench clean

demo: $(READY)
	$(BIN)/ckpt demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# 200 SIGKILLs at random moments of a process that saves in a loop; the tests run a shorter one
kills: $(READY)
	CKPT_KILLS=200 $(BIN)/python -m pytest tests/test_kills.py -s

bench: $(READY)
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
