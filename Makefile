# Everything that a developer runs. `make` alone lists it.
#
# Slipstream lives in .venv, made on the first call. Two variables are worth knowing:
#
#   PYTHON=python3.12 make test
#       The interpreter that .venv is made with (3.11 or newer).
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
#       On Linux, the torch on PyPI is the CUDA build, several GB with its libraries. This gets the CPU build
#       (200 MB), which is all that the demo and the tests need.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# `cp` rather than a second path through the demo: from here on it does not matter who recorded the traces.
demo: .venv/installed ## record small jobs on 2 processes, analyze them, and say where the report lies
	@rm -rf out/demo out/demo.slip out/mechanisms && mkdir -p out
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    $(BIN)/python examples/record_ddp.py out/demo; \
	else \
	    echo "torch cannot be imported in .venv, so this demo reads traces recorded earlier (tests/data/gloo_ddp)."; \
	    cp -R tests/data/gloo_ddp out/demo; \
	fi
	$(BIN)/slipstream analyze out/demo --output out/demo.slip
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo; echo "Slipstream's own mechanisms, on 2 processes:"; \
	    $(BIN)/python examples/record_mechanisms.py out/mechanisms && \
	    for mechanism in ddp fsdp tp; do \
	        echo; echo "$$mechanism"; $(BIN)/slipstream analyze out/mechanisms/$$mechanism --brief | head -4; \
	    done; \
	fi
	@echo
	@echo "The report lies in out/demo.slip: read it again with  $(BIN)/slipstream analyze out/demo.slip"
	@echo "The traces lie in out/demo, one a rank."

test: .venv/installed ## run the tests (those that need torch or a GPU are skipped, with the reason, without it)
	$(BIN)/pytest -rs

check: .venv/installed ## lint, format, types, and the imports between the floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed ## compare the speed and memory of analyze with other tools
	$(BIN)/python -m benchmarks

format: .venv/installed ## format the sources and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was made, except .venv (remove that by hand to install anew)
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Installed again only when what is to be installed has changed. torch does not exist for every platform and Python;
# without it Slipstream still reads and analyzes, so its absence is said and is no failure.
.venv/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Slipstream and its tools into .venv"
	@$(BIN)/pip install --quiet --editable '.[dev]' --constraint constraints.txt || { \
	    echo "torch could not be installed (see above): going on without it. Live tests will be skipped."; \
	    $(BIN)/pip install --quiet --editable '.[test]' --constraint constraints.txt; }
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Slipstream needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: PYTHON=python3.12 make ..."; exit 1; }
	@# A half-made one, as where ensurepip is missing, would pass for made the next time.
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
