# Needs python3 (3.11 to 3.13) and the package registries; everything else is made in .venv, nothing outside is touched.
#
#   make demo ENGINES=sim       without a model          make bench ROWS=1,2        some rows only
#   make test ARGS="-k ledger"  some tests only          make PYTHON=python3.12 …   another interpreter
#   make chaos SEED=7           faults of that seed

BIN := .venv/bin
PACKAGES := broker deploy dispatcher engine_consumers memory_coordinator schemas
ENGINES ?=
ROWS ?= 1,2,3,17
ARGS ?=
SEED ?= 1
REQUESTS ?= 5000
FAULTS ?= 30
SEEDS ?= 1000
FROM ?= 1
VERBOSE ?=
PYTHON ?=

comma := ,
engine_options = $(foreach name,$(subst $(comma), ,$(ENGINES)),--engine $(name))
uv = env -u VIRTUAL_ENV -u UV_PYTHON UV_PROJECT_ENVIRONMENT=.venv UV_PYTHON_DOWNLOADS=never $(BIN)/uv

# $(call stage,NAME,COMMAND): runs it, and says how long it took, also where it failed.
stage = @echo "== $(1)"; start=$$(date +%s); code=0; $(2) || code=$$?; \
	echo "== $(1): $$(if [ $$code = 0 ]; then echo ok; else echo failed; fi) after $$(($$(date +%s) - start)) s"; exit $$code

.PHONY: help demo test check lint types imports chaos-sim chaos bench gpu fmt clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1 | \2/p' Makefile | column -t -s '|' 2>/dev/null || grep '## ' Makefile

demo: .venv/.core ## the stack, a real model and twenty prompts, then a clean stop: ENGINES="transformer ssm moe"
	@$(BIN)/forebay demo $(engine_options)

test: .venv/.dev ## every layer of tests
	$(call stage,tests,$(BIN)/python -m pytest $(ARGS))

check: lint types imports test ## what CI runs: lint, types, imports, tests

lint: .venv/.dev ## ruff: rules and formatting
	$(call stage,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: .venv/.dev ## mypy, strict
	$(call stage,types,$(BIN)/mypy --strict $(PACKAGES))

imports: .venv/.dev ## which package may import which
	$(call stage,imports,$(BIN)/lint-imports)

chaos-sim: .venv/.dev ## seeded chaos under virtual time: SEEDS=1000 FROM=1, VERBOSE=1 prints the events
	@$(BIN)/python tests/simulation/chaos.py --seeds $(SEEDS) --from $(FROM) $(if $(VERBOSE),--verbose)

bench: .venv/.dev ## figures, by row: ROWS=1,2,3,17
	@$(BIN)/python tests/benchmarks/run.py --rows $(ROWS)

chaos: .venv/.dev ## real faults under load, from a seed: SEED=1 REQUESTS=5000 FAULTS=30
	@$(BIN)/python tests/chaos/run.py --seed $(SEED) --requests $(REQUESTS) --faults $(FAULTS)

gpu: .venv/.core ## every engine once on an NVIDIA GPU; ends with 3 where there is none
	@$(BIN)/python tests/gpu/run.py

fmt: .venv/.dev ## format, and mend what can be mended by rule
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## remove what was made in this folder; the models and jars in the user's cache stay
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: an interpreter that is found, the uv of the lock file, then whatever the lock file says.
.venv/bin/uv:
	@found=; for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "no Python 3.11, 3.12 or 3.13 found: install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	version=$$(awk '/^name = "uv"$$/ { getline; gsub(/"/, "", $$3); print $$3 }' uv.lock); \
	rm -rf .venv; \
	if $$found -m venv .venv >/dev/null 2>&1; then $(BIN)/python -m pip install -q --disable-pip-version-check "uv==$$version"; \
	elif rm -rf .venv && $$found -m venv --without-pip .venv && $$found -m pip --version >/dev/null 2>&1; \
	then $$found -m pip --python $(BIN)/python install -q --disable-pip-version-check "uv==$$version"; \
	elif command -v uv >/dev/null 2>&1; then ln -s "$$(command -v uv)" $(BIN)/uv; \
	else rm -rf .venv; echo "$$found has neither ensurepip nor pip: install python3-venv (Debian, Ubuntu) and try again" >&2; exit 1; fi

.venv/.core: pyproject.toml uv.lock | .venv/bin/uv
	@$(uv) sync -q --frozen --inexact && touch $@

.venv/.dev: pyproject.toml uv.lock | .venv/bin/uv
	@$(uv) sync -q --frozen --extra dev && touch .venv/.core $@
