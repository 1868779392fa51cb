# Every target does its own set-up: a virtual environment in .venv, made once and reused.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# modules are compiled when they are first imported: most of 19,000 never are, and to compile them all takes two minutes
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# one more than the cores of a small machine: some tests wait
JOBS ?= 3
# the foundation and sharded state: with CKPT_ROOT=s3 every root of theirs is on an S3 server
MATRIX := guarantees/resume_matrix load/world_size state/save_and_load data/resume_loader save/background ranks/group \
	guarantees/damage \
	guarantees/kills guarantees/bad_input root/retention state/sharded state/sharded_models save/linking load/broadcast export/merge

# a test that starts a process without the mark fails: tests/helpers/second_process.py
FAST := not slow and not gpu
# SEED=1 runs them in random order, the same one for a seed
SEED ?= 1
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(filter-out file,$(origin SEED)),--shuffle $(SEED))

.PHONY: demo check fast test test-all alone profile coverage test-macos test-s3 test-accelerate test-transformers test-lightning test-frameworks scripts lint format site kills memory-kills faults campaign mutants fuzz bench release environments versions clean

demo: $(READY)
	$(BIN)/ckpt demo

# before every commit: lint, and the tests that need no second process, side by side
check: $(READY)
	$(MAKE) --no-print-directory -j 2 lint fast

# nothing in them waits: a third worker on two cores would only import and collect all of it once more
fast: JOBS = 2
fast: $(READY)
	$(PYTEST) -m '$(FAST)'

# servers that the tests start and npm has: Azurite, and an S3 that lacks something. Where there is no npm, or it reaches no
# registry, their tests are skipped, and say so
SERVERS := build/npm/.ready
$(SERVERS): Makefile
	npm install --prefix build/npm --no-audit --no-fund --fetch-retries=1 --fetch-timeout=60000 azurite@3.35.0 s3rver@3.7.1 \
		&& touch $@ || echo "without Azurite and s3rver: their tests are skipped"

# MARKS='(slow or gpu) and not long' runs what `make check` leaves out
test: MARKS ?= not long
test: $(READY) $(SERVERS)
	$(PYTEST) -m '$(MARKS)' --durations 20 --durations-min 15

# with the variations that take minutes
test-all: $(READY) $(SERVERS)
	$(PYTEST)

# the tests of `make check`, each in a process of its own: none may lean on another
alone: $(READY)
	$(BIN)/python tests/alone.py -n $(JOBS) -m '$(FAST)' $(TESTS)

# what each test costs: CPU of the test and of all its processes; TESTS=tests/memory measures a part
TESTS ?=
profile: MARKS ?= not long
profile: REPORT ?= build/costs.md
profile: $(READY) $(SERVERS)
	mkdir -p $(dir $(REPORT))
	$(PYTEST) -m '$(MARKS)' -p tests.helpers.costs --costs $(REPORT) $(TESTS)

# the tests of `make check`, and the share of lines that they run; MARKS='' takes all tests, without their processes
coverage: MARKS ?= $(FAST)
coverage: $(READY)
	$(PYTEST) -m '$(MARKS)' --cov --cov-report=
	$(BIN)/coverage html --quiet --directory build/coverage
	@for part in ckpt formats storage; do echo "$$part: $$($(BIN)/coverage report --format total --include "$$part/*") %"; done
	@echo "Coverage: $$($(BIN)/coverage report --format total) % (lines not run: build/coverage/index.html)"

# tests of one process with what macOS lacks hidden from ckpt: `make test` has a slice of it
test-macos: $(READY)
	$(PYTEST) -p tests.helpers.macos --basetemp /tmp/ckpt-macos -m '$(FAST) and not long and not on_linux' tests/macos_cases.py \
		$(addprefix tests/,test_manager.py save root load data export guarantees storage/test_local.py storage/test_leases.py) \
		--ignore tests/guarantees/test_fuzz.py

# the same on S3: `make test` has a slice of it
test-s3: $(READY)
	CKPT_ROOT=s3 $(PYTEST) $(foreach name,$(MATRIX),tests/$(dir $(name))test_$(notdir $(name)).py)

# tests of checkpoints by Accelerate, transformers and Lightning themselves, from checkouts of the installed versions, with ckpt
# attached to all that they build: with saves in the foreground, and in the background
ACCELERATE ?= ../accelerate
TRANSFORMERS ?= ../transformers
LIGHTNING ?= ../lightning
OWN_TESTS = PYTHONPATH=tests/suites$(addprefix :,$(PYTHONPATH)) CKPT_MEMORY_KEEPER=off HF_HUB_OFFLINE=1 \
	$(BIN)/pytest -p no:cacheprovider -c /dev/null --tb=short -rsx
test-accelerate: SUITE = -p attached_accelerators --rootdir $(ACCELERATE) \
	$(addprefix $(ACCELERATE)/tests/test_,state_checkpointing.py accelerator.py)
test-transformers: SUITE = -p attached_trainers --rootdir $(TRANSFORMERS) \
	$(addprefix $(TRANSFORMERS)/tests/trainer/test_trainer_,checkpointing.py callback.py)
test-lightning: SUITE = -p attached_lightning --rootdir $(LIGHTNING)/tests \
	$(addprefix $(LIGHTNING)/tests/tests_pytorch/,$(addprefix checkpointing/test_,checkpoint_callback_frequency.py \
	model_checkpoint.py torch_saving.py trainer_checkpoint.py) trainer/connectors/test_checkpoint_connector.py \
	plugins/test_checkpoint_io_plugin.py models/test_restore.py)
test-accelerate test-transformers test-lightning: $(READY)
	$(OWN_TESTS) $(SUITE)
	$(OWN_TESTS) $(SUITE) --background

# tests of libraries that are in no extra, in a folder behind the environment: Ray is large, and torchtitan wants older
# datasets, which these tests do without
FRAMEWORKS := build/frameworks
$(FRAMEWORKS)/.ready: Makefile constraints.txt | $(READY)
	rm -rf $(FRAMEWORKS)
	$(BIN)/python $(PIP) --no-deps --target $(FRAMEWORKS) \
		trl==1.16.0 gymnasium==1.4.0 farama-notifications cloudpickle \
		ray==2.60.0 jsonschema jsonschema-specifications referencing rpds-py tensorboardX \
		torchtitan==0.3.0 spmd_types==0.2.3 tyro typeguard docstring_parser shtab einops tensorboard protobuf absl-py triton
	touch $@
test-frameworks: $(FRAMEWORKS)/.ready
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(FRAMEWORKS) $(PYTEST) -m '' --durations 0 --durations-min 1 \
		$(patsubst %,tests/integrations/test_%.py,trl gymnasium ray torchtitan)

# scripts of other people, from checkouts that tests/scripts/scripts.py names: killed three times, resumed, compared
SOURCES ?= ../sources
scripts: $(READY)
	$(BIN)/python -m tests.scripts --sources $(SOURCES) $(if $(REPORT),--report $(REPORT)) $(SCRIPTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the documentation, as pages: build/site/index.html. A dead link, a dead anchor or a page without a place is an error
# (not --quiet, which would hide warnings from --strict)
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# 200 SIGKILLs at random moments of a process that saves in a loop; the tests run a shorter one
kills: $(READY)
	CKPT_KILLS=200 $(BIN)/python -m pytest tests/guarantees/test_kills.py -s

# 200 SIGKILLs of one process, of one of four ranks and of all of them, at random moments of snapshots into memory
memory-kills: $(READY)
	CKPT_MEMORY_KILLS=200 $(BIN)/python -m pytest --timeout 14400 tests/memory/test_kills.py -s

# S3 at its worst: 200 random schedules of faults, and 100 SIGKILLs each during uploads and during copies to a mirror
faults: $(READY)
	CKPT_FAULTS=200 CKPT_KILLS=100 $(BIN)/python -m pytest --timeout 3600 -n $(JOBS) --dist worksteal \
		tests/storage/test_faults.py tests/root/test_mirror.py

# thousands of faults of every kind, and a table of what became of the checkpoints; the tests run a slice of it
TRIALS ?= 2000
campaign: REPORT ?= build/campaign.md
campaign: $(READY)
	mkdir -p $(dir $(REPORT))
	$(BIN)/python -m tests.campaign --trials $(TRIALS) --seed $(SEED) --jobs $(JOBS) --report $(REPORT)

# small bugs, drawn by a seed and planted one after the other in a copy of the tree, and whether the tests notice: first
# which test calls which function (build/reach.json.gz: as long as the suite), then 400 of them. REPORT=docs/mutants.md keeps the
# table, MUTANTS='ckpt/root/*' plants every one of those
COUNT ?= 400
build/reach.json.gz: | $(READY) $(SERVERS)
	$(BIN)/python -m tests.mutants --jobs $(JOBS) --trace -m 'not long' || echo "tests that failed are not used"
mutants: build/reach.json.gz
	$(BIN)/python -m tests.mutants --jobs $(JOBS) --count $(COUNT) --seed $(SEED) $(if $(REPORT),--report $(REPORT)) $(MUTANTS)

# altered files of every kind before every operation that reads, then conversations with servers that lie (S3, GCS, Azure,
# the Hub, HTTP: lengths, ETags, names, redirects, without an end); REPORT=docs/fuzzing.md keeps the report of the files,
# SAVE=tests/fuzz/corpus what was found
INPUTS ?= 200000
CONVERSATIONS ?= 2000
fuzz: REPORT ?= build/fuzzing.md
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --all --inputs $(INPUTS) --seed $(SEED) --jobs $(JOBS) --report $(REPORT) \
		$(if $(SAVE),--save $(SAVE))
	$(BIN)/python -m tests.fuzz.servers --conversations $(CONVERSATIONS) --seed $(SEED) --jobs $(JOBS)

bench: $(READY)
	$(BIN)/python -m benchmarks cpu

# wheel and sdist in build/dist, checked: their metadata, the README as an index renders it, every module, the entry in
# the changelog, and `ckpt demo` from the wheel in a new environment
release: $(READY)
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(BIN)/twine check --strict build/dist/*
	$(BIN)/python -m tests.release build/dist

# a slice of the tests with the oldest and with the newest versions that pyproject.toml allows, each in an environment of
# its own; VERSIONS=oldest does one of them, TORCH=2.13.0 takes that torch instead (CI: not every one has a build for CPUs)
VERSIONS ?= oldest newest
TORCH ?=
VERSIONED := build/versions$(if $(TORCH),/torch-$(TORCH))
SLICE := tests/state/test_save_and_load.py tests/save/test_background.py tests/root/test_retention.py tests/tools/test_convert.py \
	tests/export/test_merge.py tests/export/test_single_files.py \
	$(patsubst %,tests/integrations/test_%.py,accelerate accelerate_habits main_process_saves newest_folder trackers)
SLICE_OF_newest := tests/export/test_push.py tests/export/test_transformers_names.py  # older clients of the Hub are refused
TESTED := $(foreach name,oldest newest,$(VERSIONED)/$(name)/.tested)
environments: $(foreach name,$(VERSIONS),$(VERSIONED)/$(name)/.ready)
versions: $(foreach name,$(VERSIONS),$(VERSIONED)/$(name)/.tested)

$(VERSIONED)/%/.ready: pyproject.toml constraints-%.txt | $(READY)  # one after the other: both build in this folder
	rm -rf $(VERSIONED)/$*
	$(PYTHON) -m venv $(VERSIONED)/$*
	$(VERSIONED)/$*/bin/python $(PIP) -c constraints.txt --upgrade pip
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints-$*.txt > $(VERSIONED)/$*/constraints.txt
	$(VERSIONED)/$*/bin/python $(PIP) -c $(VERSIONED)/$*/constraints.txt -e '.[versions]'
	touch $@

.PHONY: $(TESTED)
$(TESTED): $(VERSIONED)/%/.tested: $(VERSIONED)/%/.ready
	$(VERSIONED)/$*/bin/python -m pytest -n $(JOBS) --dist worksteal -m '$(FAST)' $(SLICE) $(SLICE_OF_$*)
	$(if $(filter newest,$*),$(VERSIONED)/$*/bin/python -m pytest tests/storage/test_hub_downloads.py)  # a model of 200 MB

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt --upgrade pip
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]'
	touch $(READY)
