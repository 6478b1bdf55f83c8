# Everything a developer runs. `make demo` and `make test` need Python 3.10+, Rust and make, and set up the rest in .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CARGO ?= cargo

# Tests and benches read real rollouts and expected arrays from this folder (data/, golden/) and skip where there is none.
ifneq ($(wildcard ../shared/data),)
export TREEPACK_DATA ?= $(abspath ../shared)
endif

# A stamp is newer than what it was made from, so that nothing is installed or built twice.
STAMPS := $(VENV)/.stamps
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust -name '*.rs')
PYTHON_SOURCES := pyproject.toml README.md $(shell find python -type f \( -name '*.py' -o -name '*.pyi' -o -name py.typed -o -path '*/assets/*' \))

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up ---------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25.1'
	mkdir -p $(STAMPS) && touch $@

# One stamp for each dependency group of pyproject.toml.
$(STAMPS)/group-%: pyproject.toml $(STAMPS)/venv
	$(PIP) install --group $*
	touch $@

# torch is large: whatever is importable will do.
$(STAMPS)/torch: $(STAMPS)/venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install torch
	touch $@

# Only its tree packing is tested against; where it cannot be had, those tests skip with a reason.
$(STAMPS)/areal: $(STAMPS)/venv
	$(PIP) install --no-deps --upgrade --target $(VENV)/areal areal==1.0.4 || echo 'areal 1.0.4 is not to be had here'
	touch $@

# verl beside the transformers that it wants, in front of the others for the tests that run it: 150 MB. Where it cannot
# be had, they skip with a reason.
$(STAMPS)/verl: pyproject.toml $(STAMPS)/venv
	$(PIP) install --no-deps --upgrade --target $(VENV)/verl --group verl || echo 'verl is not to be had here'
	touch $@

# Triton alone, of each version that the kernels are tested with: they are compiled for GPUs that are not here. The oldest
# and the newest for `make test`; all for `make test-long`.
TRITONS := 3.6.0 3.9.0
ALL_TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
$(STAMPS)/triton-%: $(STAMPS)/venv
	$(PIP) install --no-deps --upgrade --target $(VENV)/triton-$* triton==$* || echo 'triton $* is not to be had here'
	touch $@

$(STAMPS)/wheel: $(RUST_SOURCES) $(PYTHON_SOURCES) $(STAMPS)/group-build
	rm -f dist/treepack-*.whl
	$(BIN)/maturin build --release --locked --interpreter $(BIN)/python --out dist
	$(PIP) install 'numpy>=1.23'
	$(PIP) install --force-reinstall --no-deps dist/treepack-*.whl
	touch $@

venv: $(STAMPS)/group-build $(STAMPS)/group-demo $(STAMPS)/group-test $(STAMPS)/group-docs $(STAMPS)/group-lint $(STAMPS)/torch ## Make .venv with all that development needs

build: $(STAMPS)/wheel ## Build the wheel into dist/ and install it in .venv

# --- use ------------------------------------------------------------------------------------------------------------

demo: build $(STAMPS)/group-demo ## Pack synthetic rollouts, show packed = alone (ROLLOUTS=file.npz BUDGET=16384 to pack yours)
	$(BIN)/python examples/demo.py $(if $(ROLLOUTS),--rollouts '$(ROLLOUTS)') $(if $(BUDGET),--max-tokens $(BUDGET))

# --- checks ---------------------------------------------------------------------------------------------------------

test: test-rust lint types test-python ## Run every check (sets up what it needs, torch included)

test-rust: ## Rust format, clippy and tests; no Python needed
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path fuzz/Cargo.toml
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) test --locked --quiet

# Files side by side, a process for each worker; more threads than that would wait for each other.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

test-python: build $(STAMPS)/group-test $(STAMPS)/group-docs $(STAMPS)/torch $(STAMPS)/areal $(STAMPS)/verl $(TRITONS:%=$(STAMPS)/triton-%) ## pytest on the installed wheel (ARGS='-k name' WORKERS=2)
	$(PYTEST) $(ARGS)

# One wrap width for prose.
PAGES := docs README.md CONTRIBUTING.md CHANGELOG.md benches/README.md
MDFORMAT := $(BIN)/mdformat --wrap 120 --number --compact-tables

lint: $(STAMPS)/group-lint ## ruff: rules and format; mdformat: the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MDFORMAT) --check $(PAGES)

types: build $(STAMPS)/group-lint $(STAMPS)/group-test $(STAMPS)/torch ## mypy --strict, clippy of the binding, and the stub against the built module
	PYO3_PYTHON=$(abspath $(BIN)/python) $(CARGO) clippy --locked --features python -- -D warnings
	$(BIN)/mypy --strict python/treepack
	$(BIN)/python -m mypy.stubtest treepack._core

test-verl: build $(STAMPS)/group-test $(STAMPS)/torch $(STAMPS)/verl ## verl's engines on trees, and Hugging Face models under the transformers that verl wants
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q tests/integrations/test_verl_engine.py $(ARGS)
	PYTHONPATH=$(abspath $(VENV))/verl $(BIN)/python -m pytest -q tests/integrations/test_verl_batch.py tests/integrations/test_transformers.py $(patsubst %,tests/integrations/test_transformers_%.py,inside rows wrappers) $(ARGS)

test-long: build $(STAMPS)/group-test $(STAMPS)/torch $(ALL_TRITONS:%=$(STAMPS)/triton-%) ## The property tests with many more cases (minutes)
	PROPTEST_CASES=20000 $(CARGO) test --locked --release --quiet
	HYPOTHESIS_PROFILE=long $(PYTEST) $(ARGS)

# libFuzzer's coverage passes are unstable options: RUSTC_BOOTSTRAP lets a stable compiler take them. FUZZ_SANITIZER=address
# also watches memory, at a tenth of the speed.
FUZZ_SECONDS ?= 60
FUZZ_SANITIZER ?= none
fuzz: ## Coverage-guided fuzzing of the Rust core (FUZZ_SECONDS=60)
	command -v cargo-fuzz >/dev/null || $(CARGO) install cargo-fuzz --locked
	RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run --sanitizer $(FUZZ_SANITIZER) pack -- -max_total_time=$(FUZZ_SECONDS) -max_len=4096

# The GPU targets need no wheel: they run from the checkout, under whatever Python has torch for the device.
GPU_PYTHON ?= python3
test-gpu: ## The tests that need a CUDA device (GPU_PYTHON=python3 ARGS='-k window'); keeps benches/results/gpu_tests.txt
	mkdir -p benches/results
	$(GPU_PYTHON) -m pytest tests/gpu $(ARGS) | tee benches/results/gpu_tests.txt

compile-gpus: build $(STAMPS)/torch $(TRITONS:%=$(STAMPS)/triton-%) ## The portable kernels compiled for five kinds of GPUs that need not be here; keeps benches/results/gpu_compile.txt
	mkdir -p benches/results
	for version in $(TRITONS); do \
		PYTHONPATH=$(abspath $(VENV))/triton-$$version $(BIN)/python benches/gpu_compile.py $(ARGS); \
	done | tee benches/results/gpu_compile.txt

# --- measurements ---------------------------------------------------------------------------------------------------

bench: build $(STAMPS)/group-bench $(STAMPS)/torch ## pack() against concatenates and TRL; keeps benches/results/pack.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_pack.py $(ARGS) | tee benches/results/pack.txt

bench-scaling: build $(STAMPS)/group-bench ## Time and memory from 10^6 to 10^8 tokens; keeps benches/results/scaling.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_scaling.py $(ARGS) | tee benches/results/scaling.txt

bench-placement: build $(STAMPS)/group-bench ## Tokens, trees and time of the placements, ranks, the stream; keeps benches/results/placement.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_placement.py $(ARGS) | tee benches/results/placement.txt

bench-unseen: build $(STAMPS)/group-bench ## Placement on 64 drawn sets against textbook rules and a slow search (ARGS='--seconds 60' searches on); keeps benches/results/unseen.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_unseen.py $(ARGS) | tee benches/results/unseen.txt

bench-ranges: build $(STAMPS)/group-bench ## Tokens within a budget against trees cut into ranges; keeps benches/results/ranges.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_ranges.py $(ARGS) | tee benches/results/ranges.txt

bench-shards: build $(STAMPS)/group-bench ## One tree over 2 to 16 ranks: balance, rows, bytes on the wire, counted; keeps benches/results/shards.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_shards.py $(ARGS) | tee benches/results/shards.txt

bench-gpu: ## Tree attention against its peers on a CUDA device (GPU_PYTHON=python3 ARGS='--tree agent9k'); keeps benches/results/gpu_attention.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_scatter.py | tee benches/results/gpu_scatter.txt
	$(GPU_PYTHON) benches/gpu_attention.py $(ARGS) | tee benches/results/gpu_attention.txt

TRITON_FOLDERS ?=
bench-tritons: ## The kernels under several Tritons, in turn (TRITON_FOLDERS='dir dir' beside the installed one); keeps benches/results/gpu_tritons.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_tritons.py --triton $(TRITON_FOLDERS) $(ARGS) | tee benches/results/gpu_tritons.txt

bench-last-rows: ## Attention of a tree range by range against one call; keeps benches/results/gpu_last_rows.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_last_rows.py $(ARGS) | tee benches/results/gpu_last_rows.txt

bench-first-call: ## Seconds until the first results on an empty and a warm Triton cache; keeps benches/results/gpu_first_call.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_first_call.py $(ARGS) | tee benches/results/gpu_first_call.txt

bench-gpu-ranges: ## Cut trees of a 1.5B model against trees within the budget, on a CUDA device (DATA=file.npz of `gpu_ranges.py --write`); keeps benches/results/gpu_ranges.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_ranges.py --data '$(DATA)' $(ARGS) | tee benches/results/gpu_ranges.txt

bench-ranks: ## One tree over two GPUs against one, balanced ranks under DDP (DATA=file.npz of `gpu_ranges.py --write`); keeps benches/results/gpu_ranks.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_ranks.py $(if $(DATA),--data '$(DATA)') $(ARGS) | tee benches/results/gpu_ranks.txt

bench-model: ## One training step, packed against alone, on a CUDA device (GPU_PYTHON=python3 ARGS='--rows agent9k'); keeps benches/results/gpu_model.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_model.py $(ARGS) | tee benches/results/gpu_model.txt

bench-model-check: build $(STAMPS)/group-bench $(STAMPS)/group-test $(STAMPS)/torch ## What the check at the first use of a model costs (ARGS='--device cuda --models 7B'); keeps benches/results/model_check.txt
	mkdir -p benches/results
	$(BIN)/python benches/model_check.py $(ARGS) | tee benches/results/model_check.txt

bench-hybrid: ## One training step of a model of Qwen3.5's shape, packed against alone, on a CUDA device (GPU_PYTHON=python3 ARGS='--rows agent9k'); keeps benches/results/gpu_hybrid.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_hybrid.py $(ARGS) | tee benches/results/gpu_hybrid.txt

bench-recurrent: ## Recurrent layers on a tree, its samples alone, one chain and level by level, on a CUDA device (GPU_PYTHON=python3 ARGS='--trees DIR'); keeps benches/results/gpu_recurrent.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_recurrent.py $(ARGS) | tee benches/results/gpu_recurrent.txt

bench-memory: ## Peak memory of a training step by the tokens of a tree, three sizes of models, on a CUDA device; keeps benches/results/gpu_memory.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_memory.py $(ARGS) | tee benches/results/gpu_memory.txt

bench-areal: build $(STAMPS)/group-bench $(STAMPS)/group-test $(STAMPS)/torch $(STAMPS)/areal ## AReaL's tree packing before and after; keeps benches/results/areal.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_areal.py $(ARGS) | tee benches/results/areal.txt

bench-trl: build $(STAMPS)/group-bench $(STAMPS)/torch ## Rank 0's collate time under TRL, before and after install(); keeps benches/results/trl.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_trl.py $(ARGS) | tee benches/results/trl.txt

bench-trainers: build $(STAMPS)/group-bench $(STAMPS)/verl ## Sharing left on each rank under verl, TRL and ours; keeps benches/results/trainers.txt
	mkdir -p benches/results
	PYTHONPATH=$(abspath $(VENV))/verl VERL_LOGGING_LEVEL=ERROR $(BIN)/python -W ignore benches/bench_trainers.py $(ARGS) | tee benches/results/trainers.txt

bench-trl-gpu: ## An optimizer step of TRL's GRPOTrainer on a CUDA device, its own against trees (GPU_PYTHON=python3 ARGS='--batch 32'); keeps benches/results/gpu_trl.txt
	mkdir -p benches/results
	$(GPU_PYTHON) benches/gpu_trl.py $(ARGS) | tee benches/results/gpu_trl.txt

bench-rows: build $(STAMPS)/group-bench $(STAMPS)/torch ## Host time of row_log_probs beside pack(); keeps benches/results/rows.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_rows.py $(ARGS) | tee benches/results/rows.txt

bench-inspect: build $(STAMPS)/group-bench $(STAMPS)/group-test ## Memory and speed of treepack inspect up to 10^8 tokens; keeps benches/results/inspect.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_inspect.py --formats parquet npz jsonl $(ARGS) | tee benches/results/inspect.txt

bench-offline: build $(STAMPS)/group-bench ## treepack pack: tokens/s, size on disk, memory on 10^8 tokens; keeps benches/results/offline.txt
	mkdir -p benches/results
	$(BIN)/python benches/bench_offline.py $(ARGS) | tee benches/results/offline.txt

# --- pages and releases ---------------------------------------------------------------------------------------------

docs: $(STAMPS)/group-docs ## Build the pages into site/, strict; needs no wheel
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

screenshots: build $(STAMPS)/group-test ## Make the pictures in the pages; needs a Chromium and TREEPACK_DATA
	$(BIN)/python docs/screenshots.py
	@echo "open site/index.html"

# zig links against an old glibc, so that one wheel serves every Linux since 2014.
wheel-manylinux: $(STAMPS)/group-build $(STAMPS)/group-release ## The wheel of a release for this machine's kind of Linux, into dist/manylinux
	rm -rf dist/manylinux
	PATH='$(abspath $(BIN))':"$$PATH" $(BIN)/maturin build --release --locked --zig --compatibility manylinux2014 --interpreter $(BIN)/python --out dist/manylinux

audit-wheel: wheel-manylinux ## ... and what it promises: abi3 symbols, glibc, metadata
	$(BIN)/abi3audit --strict --summary dist/manylinux/*.whl
	$(BIN)/auditwheel show dist/manylinux/*.whl
	$(BIN)/twine check --strict dist/manylinux/*.whl

WHEEL ?= $(firstword $(wildcard dist/manylinux/*.whl))
WHEEL_PYTHON ?= $(PYTHON)
test-wheel: ## A wheel in a fresh environment of WHEEL_PYTHON, NumPy alone beside it (WHEEL=file.whl WHEEL_PYTHON=python3.13)
	test -f '$(WHEEL)' || { echo 'no wheel: make wheel-manylinux first, or give WHEEL=file.whl'; exit 2; }
	rm -rf $(VENV)-wheel
	$(WHEEL_PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip --disable-pip-version-check --quiet install pytest hypothesis '$(WHEEL)'
	$(VENV)-wheel/bin/python -m pytest -q -p no:cacheprovider @tests/wheel_tests.txt

lint-workflows: $(STAMPS)/group-release ## The files of .github: against their schema, and for holes that an attacker could use
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/zizmor --offline --persona pedantic .github

# --- upkeep ---------------------------------------------------------------------------------------------------------

fmt: $(STAMPS)/group-lint ## Format Rust and Python
	$(CARGO) fmt
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(MDFORMAT) $(PAGES)

clean: ## Remove what was built (.venv stays)
	rm -rf dist site target fuzz/target $(VENV)-wheel .pytest_cache .mypy_cache .ruff_cache .hypothesis $(STAMPS)/wheel
