# `make` alone lists what there is. Every target but help and clean first sets up .venv, which takes
# two minutes or so the first time and no time after that: see tools/setup.sh.
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart experiment-bidirectional-topk experiment-qsr experiment-jointspar experiment-2direction test test-thorough lint setup clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /  make \1@/p' Makefile | awk -F@ '{ printf "%-36s %s\n", $$1, $$2 }'
	@echo '  PYTHON=python3.12                  the interpreter that first makes .venv'

quickstart: setup ## train three ways on real data with two ranks: a table and a plot, in minutes
	@.venv/bin/python -m recipes.quickstart $(ARGS)

experiment-bidirectional-topk: setup ## counterexample, bytes and accuracy, 2 to 100 workers: half an hour
	@.venv/bin/python -m recipes.bidirectional_topk.experiment $(ARGS)

experiment-qsr: setup ## QSR and the schedules of its paper on the digits, four ranks: 25 minutes
	@.venv/bin/python -m recipes.qsr.experiment $(ARGS)

experiment-jointspar: setup ## JointSpar: bandit, bytes, backward time, accuracy, wall clock: half an hour
	@.venv/bin/python -m recipes.jointspar.experiment $(ARGS)

experiment-2direction: setup ## 2Direction, EF21-P + DIANA, AGD and others on the digits: an hour
	@.venv/bin/python -m recipes.two_direction.experiment $(ARGS)

# A file's tests stay together: they share compiled kernels and what their fixtures make.
test: setup ## run the tests; make test ARGS="-k topk" runs some of them
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

test-thorough: setup ## run more cases of what the tests check, for a quarter of an hour
	@sh tools/setup.sh --triton
	@.venv/bin/python -m pytest -n 2 --dist loadfile -m thorough $(ARGS)

lint: setup ## ruff (rules and format) and mypy --strict
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy

setup: ## only set up .venv; does nothing when nothing changed
	@PYTHON='$(PYTHON)' sh tools/setup.sh

clean: ## remove caches and build products; keeps .venv and your runs
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
