# `make` alone lists what there is. Every target but help, clean and test-integrations first sets up
# .venv, which takes two minutes or so the first time and no time after that: see tools/setup.sh.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart experiment-bidirectional-topk experiment-qsr experiment-jointspar experiment-2direction test test-fast test-thorough test-integrations lint setup clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  make \1@/p' Makefile | awk -F@ '{ printf "%-35s %s\n", $$1, $$2 }'
	@echo '  PYTHON=python3.12                 the interpreter for a new .venv'

quickstart: setup ## three methods, two ranks: a table and a plot
	@.venv/bin/python -m recipes.quickstart $(ARGS)

experiment-bidirectional-topk: setup ## counterexample, bytes, accuracy (30 min)
	@.venv/bin/python -m recipes.bidirectional_topk.experiment $(ARGS)

experiment-qsr: setup ## QSR and other schedules, 4 ranks (25 min)
	@.venv/bin/python -m recipes.qsr.experiment $(ARGS)

experiment-jointspar: setup ## bandit, bytes, time, accuracy (30 min)
	@.venv/bin/python -m recipes.jointspar.experiment $(ARGS)

experiment-2direction: setup ## 2Direction, AGD and others (an hour)
	@.venv/bin/python -m recipes.two_direction.experiment $(ARGS)

# Components, the state of the engine and the DDP hook on threads. What takes longest is left to
# `make test`: aggregators, local steps, JointSpar, kernels, recipes, and files that train for long.
LONG = test_batchnorm test_docs test_frame engine/test_averager \
	$(addprefix ddp/test_,bidirectional conservation nonfinite reference replicas resume settings)
FAST = $(filter-out $(LONG:%=tests/%.py),$(wildcard tests/test_*.py)) \
	tests/ddp tests/engine tests/exchange tests/routes \
	$(LONG:%=--ignore=tests/%.py)

test-fast: setup ## the core's tests, in about a minute
	@.venv/bin/python -m pytest -n 2 --dist worksteal $(FAST) $(ARGS)

# A file's tests stay together: they share compiled kernels and what their fixtures make.
test: setup ## all tests; ARGS="-k topk" runs some
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

test-thorough: setup ## more cases of the same tests
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 2 --dist loadfile -m thorough $(ARGS)

# The frameworks are no dependency of torchcomp and have many of their own: they get another .venv.
FRAMEWORKS = .venv-integrations

test-integrations: $(FRAMEWORKS)/stamp ## scripts of Lightning, Accelerate, transformers, Ray
	@$(FRAMEWORKS)/bin/python -m pytest -n 2 --dist loadfile -m integrations tests/integrations $(ARGS)

$(FRAMEWORKS)/stamp: tools/integrations.txt constraints.txt
	@$(PYTHON) -m venv --clear $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip install -q -r tools/integrations.txt -c constraints.txt
	@touch $@

lint: setup ## ruff (rules and format) and mypy --strict
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy

setup: ## only set up .venv
	@PYTHON='$(PYTHON)' sh tools/setup.sh

clean: ## remove caches; keep .venv and your runs
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
