# Everything a newcomer can do here. `make help` lists it.
# Each target sets up what it needs inside this folder: .venv (Python), .tools (cargo programs), target (builds), .cache (models for tests).

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .tools/bin
NEXTEST := 0.9.151
DENY := 0.20.2
export CARGO_TERM_COLOR ?= auto
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test test-rust test-python test-clients lint format bench bench-engine bench-threads eval soak clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.release ## Build emberd and install it, with the ONNX engine, into .venv

run: setup ## Start the server; the first time, this builds it and fetches a model
	$(BIN)/emberd serve

test: test-rust test-python test-clients ## Run all tests

test-rust: $(TOOLS)/cargo-nextest
	PATH="$(CURDIR)/$(TOOLS):$$PATH" cargo nextest run --locked --workspace --exclude emberd-ffi

test-python: $(VENV)/.debug
	$(BIN)/python -m pytest --ignore=tests/clients

test-clients: $(VENV)/.debug ## Drive real clients: SDKs, agent frameworks and Codex
	$(BIN)/python -m pytest tests/clients

lint: $(TOOLS)/cargo-deny $(VENV)/.debug ## Check formatting, types, licences and common mistakes
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(BIN)/ruff format --check py tests benches
	$(BIN)/ruff check py tests benches
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest emberd._core --ignore-disjoint-bases
	$(TOOLS)/cargo-deny --all-features check bans licenses sources

format: $(VENV)/.dev ## Format all code
	cargo fmt --all
	$(BIN)/ruff format py tests benches
	$(BIN)/ruff check --fix py tests benches

bench: $(VENV)/.release $(VENV)/.dev ## Measure against peers and print ratios; BENCH='--only a,c' runs some
	cargo build --locked --release -p emberd-load
	$(BIN)/emberd models pull smollm2-135m
	$(BIN)/python benches/run.py $(BENCH)
	$(BIN)/python -m pytest --quiet benches/test_engines.py

bench-engine: $(VENV)/.release $(VENV)/.bench ## Measure the engine against llama.cpp (built the first time) and onnxruntime-genai; ENGINE='--quick' for a look
	$(BIN)/emberd models pull smollm2-135m
	$(BIN)/python benches/engine.py $(ENGINE)

bench-threads: $(VENV)/.release $(VENV)/.dev ## Measure threads, spinning, load and memory of the engine
	$(BIN)/emberd models pull smollm2-135m
	$(BIN)/python benches/threads.py
	$(BIN)/python benches/memory.py

eval: $(VENV)/.release $(VENV)/.dev ## Print how far imported models are from 32-bit floats; EVAL='FOLDER' adds one
	$(BIN)/emberd models pull smollm2-135m
	$(BIN)/python benches/eval.py $(EVAL)

soak: $(VENV)/.release $(VENV)/.dev ## Ten minutes of clients that come, go and hang up; SOAK='--minutes 2' for fewer
	$(BIN)/emberd models pull smollm2-135m
	$(BIN)/python benches/soak.py $(SOAK)

clean: ## Remove everything that was built or fetched here
	rm -rf $(VENV) .tools target .cache .pytest_cache .mypy_cache .ruff_cache .benchmarks py/emberd/*.so

# The virtual environment with what it takes to build and run; the stamp changes when the pins do.
$(VENV)/.runtime: requirements/runtime.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements/runtime.txt
	touch $@

$(VENV)/.dev: requirements/dev.txt requirements/mlx.txt $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/mlx.txt
	touch $@

$(VENV)/.bench: requirements/bench.txt $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --requirement requirements/bench.txt
	touch $@

# What the extension is built from. One environment holds one build: the newer of the two stamps is the one that is installed.
SOURCES := $(shell find rust py -name '*.rs' -o -name '*.py' -o -name '*.pyi' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml

$(VENV)/.release: $(VENV)/.runtime $(SOURCES)
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/maturin develop --release --quiet
	rm -f $(VENV)/.debug
	touch $@

$(VENV)/.debug: $(VENV)/.dev $(SOURCES)
	VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/maturin develop --quiet
	rm -f $(VENV)/.release
	touch $@

$(TOOLS)/cargo-nextest:
	cargo install --quiet --locked --root .tools cargo-nextest@$(NEXTEST) --no-default-features --features default-no-update

$(TOOLS)/cargo-deny:
	cargo install --quiet --locked --root .tools cargo-deny@$(DENY) --no-default-features
