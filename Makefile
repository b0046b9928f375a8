# `make` alone lists what there is. Most targets first set up .venv, which takes two
# minutes or so the first time and no time after that: see tools/setup.sh.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart experiment-bidirectional-topk experiment-qsr experiment-jointspar experiment-2direction experiment-small-gpt test test-fast test-thorough test-versions test-integrations soak gpu lint setup docs docs-check dist clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  make \1@/p' Makefile | awk -F@ '{ printf "%-35s %s\n", $$1, $$2 }'
	@echo '  PYTHON=python3.12                 the interpreter for a new .venv'

quickstart: setup ## three methods, two ranks: a table and a plot
	@.venv/bin/python -m recipes.quickstart $(ARGS)

experiment-bidirectional-topk: setup ## counterexample, unions, bytes, accuracy (30 min)
	@.venv/bin/python -m recipes.bidirectional_topk.experiment $(ARGS)

experiment-qsr: setup ## QSR and other schedules, SGD and AdamW (40 min)
	@.venv/bin/python -m recipes.qsr.experiment $(ARGS)

experiment-jointspar: setup ## bandit, convergence, accuracy and time at equal bytes (40 min)
	@.venv/bin/python -m recipes.jointspar.experiment $(ARGS)

experiment-2direction: setup ## 2Direction, AGD and others (1 h)
	@.venv/bin/python -m recipes.two_direction.experiment $(ARGS)

experiment-small-gpt: setup ## methods with AdamW, a small GPT (5 min)
	@.venv/bin/python -m recipes.small_gpt.experiment $(ARGS)

# Components, the state of the engine and the DDP hook on threads. What takes longest is left to
# `make test`: aggregators, local steps, JointSpar, kernels, recipes, and files that train for long.
LONG = test_batchnorm test_docs test_frame engine/test_averager \
	$(addprefix ddp/test_,methods reference settings)
FAST = $(filter-out $(LONG:%=tests/%.py),$(wildcard tests/test_*.py)) \
	tests/ddp tests/engine tests/exchange tests/routes \
	$(LONG:%=--ignore=tests/%.py)

test-fast: setup ## the core's tests, in about a minute
	@.venv/bin/python -m pytest -n 2 --dist worksteal $(FAST) $(ARGS)

# A file's tests stay together: they share compiled kernels and what their fixtures make. Three
# workers on two cores: many tests wait for other processes.
test: setup ## all tests; ARGS="-k topk" runs some
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 3 --dist loadfile $(ARGS)

test-thorough: setup ## more cases of the same tests
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 3 --dist loadfile -m thorough $(ARGS)

# ARGS="--resume" skips the parts that benchmarks/results has.
soak: setup ## long runs, mutations, faults (1 h)
	@.venv/bin/python -m benchmarks.soak $(ARGS)
	@.venv/bin/python -m pytest -n 2 --dist loadfile -m soak

# ARGS="2.9.1:3.12" tests other versions than the oldest and the newest.
test-versions: ## the core's tests on the oldest and newest torch (15 min)
	@$(PYTHON) tools/versions.py $(ARGS)

# The frameworks are no dependency of torchcomp and have many of their own.
test-integrations: .venv-integrations/ready ## scripts of Lightning, Accelerate, transformers, Ray, torchft
	@.venv-integrations/bin/python -m pytest -n 2 --dist loadfile -m integrations tests/integrations $(ARGS)

# It installs nothing. Of .venv and PYTHON it takes the first that sees a GPU; PYTHON alone, if given.
GPU_PYTHONS = $(if $(filter file,$(origin PYTHON)),.venv/bin/python) $(PYTHON)
gpu: ## tests and benchmarks on the GPUs here (10 min)
	@$(PYTHON) tools/gpu.py --python $(GPU_PYTHONS) $(ARGS)

lint: setup ## ruff (rules and format) and mypy --strict
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy

docs: .venv-docs/ready ## the documentation site, in build/docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

docs-check: docs .docs-check/ready ## links, widths and contrast of the site, in Chromium
	@NODE_PATH=.docs-check/node_modules node tools/docs_check.js build/docs $(ARGS)

# In an isolated environment, as pip builds it. The file pins setuptools there as well.
dist: .venv-dist/ready ## wheel and source distribution, checked, in dist
	@rm -rf dist
	@PIP_CONSTRAINT=tools/dist-requirements.txt .venv-dist/bin/python -m build
	@.venv-dist/bin/python -m twine check --strict dist/*

.docs-check/ready: tools/docs-check-requirements.txt
	@npm install --prefix .docs-check --no-audit --no-fund --silent $$(cat $<)
	@touch $@

.venv-integrations/ready: constraints.txt

.venv-%/ready: tools/%-requirements.txt
	@$(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/$*-requirements.txt
	@touch $@

setup: ## only set up .venv
	@PYTHON='$(PYTHON)' sh tools/setup.sh

clean: ## remove caches; keep .venv and your runs
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
