# Each target prepares what it needs, and does nothing twice. `make help` lists them.
#
# An environment that is active, or named by PYTHON=..., and has torch >= 2.11 is used as it is. Otherwise .venv is made.
#   make test ARGS='-k causal'    ARGS go to the program that the target runs
#   make TORCH=2.12.0 test        .venv with that torch, whatever is active
#   make TORCH_INDEX=URL build    torch from that package index
TORCH_PINNED := 2.13.0
LINT_PACKAGES := ruff==0.15.22 clang-format==21.1.8

ARGS ?=
export PYTHON ?=

# The Python that runs tools/environment.py, which finds or makes the one to work with.
HOST_PYTHON := $(or $(shell command -v python3 2>/dev/null),$(shell command -v "$(PYTHON)" 2>/dev/null))
ENVIRONMENT = "$(HOST_PYTHON)" tools/environment.py --default-torch $(TORCH_PINNED) --torch "$(TORCH)" --torch-index "$(TORCH_INDEX)"
CXX_FILES = $$(find csrc examples tests -name '*.cpp' -o -name '*.h')

.PHONY: help build train test bench lint format clean check-python
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "  Variables: ARGS='...' for the program, PYTHON=..., TORCH=<version>, TORCH_INDEX=<url>"

build: check-python  ## prepare the environment, build, and install in editable mode
	@python=$$($(ENVIRONMENT)) && "$$python" setup.py --quiet build_ext --inplace && $(ENVIRONMENT) --install >/dev/null

train: build  ## train a Transformer on text that ships with Python, and export it
	@python=$$($(ENVIRONMENT)) && "$$python" -m mha_ext train $(ARGS)

test: build  ## run the test suite
	@python=$$($(ENVIRONMENT) --models) && "$$python" -m pytest $(ARGS)

bench: build  ## measure against PyTorch on this machine
	@python=$$($(ENVIRONMENT)) && "$$python" -m mha_ext bench $(ARGS)

lint: check-python  ## check the style of Python and C++
	@python=$$($(ENVIRONMENT) --lint $(LINT_PACKAGES)) && bin=$$(dirname "$$python") && \
	  "$$bin/ruff" check . && "$$bin/ruff" format --check . && "$$bin/clang-format" --dry-run --Werror $(CXX_FILES)

format: check-python  ## rewrite Python and C++ in that style
	@python=$$($(ENVIRONMENT) --lint $(LINT_PACKAGES)) && bin=$$(dirname "$$python") && \
	  "$$bin/ruff" check --fix . && "$$bin/ruff" format . && "$$bin/clang-format" -i $(CXX_FILES)

clean:  ## remove what the build made; the environments stay
	rm -rf build dist *.egg-info mha_ext/_build.py mha_ext/*.so mha_ext/*.dylib mha_ext/cmake mha_ext/include

check-python:
	@test -n "$(HOST_PYTHON)" || { echo "mha_ext: expected Python >= 3.10, found none; install python3, or name one: make PYTHON=/path/to/python" >&2; exit 1; }
