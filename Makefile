# make demo | test | test-slow | check: each sets up its own .venv first, and needs only Python >= 3.11.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

find_python = for name in $${PYTHON:-} python3.11 python3 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done
# The stamps carry a hash of what they depend on, so that an old .venv is updated and an unchanged one is left alone.
hash = $(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
runtime = .venv/.runtime-$(hash)
development = .venv/.development-$(hash)
python = .venv/bin/python
install = $(python) -m pip install --quiet --disable-pip-version-check

# Torch runs on one thread in a test, so the tests run in several processes.
WORKERS ?= 2

.PHONY: help demo test test-slow check format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

# A stamp rather than .venv/bin/python, which is there before pip is: what was interrupted is made anew.
.venv/.created:
	@python=$$($(find_python) || true); \
	if [[ -z "$$python" ]]; then echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 2; fi; \
	"$$python" -m venv --clear .venv || { echo "Making .venv failed; on Debian, apt install python3-venv" >&2; exit 2; }; \
	touch $@

# torch comes first and alone: its own requirements then are already met when the rest is resolved.
$(runtime): | .venv/.created
	@echo "Setting up .venv (runtime)"
	@$(install) torch==2.13.0
	@$(install) -c constraints.txt -e '.[demo]'
	@rm -f .venv/.runtime-* && touch $@

$(development): $(runtime)
	@echo "Setting up .venv (development)"
	@$(install) -c constraints.txt -e '.[dev,data,transformers,report,tensorboard]'
	@rm -f .venv/.development-* && touch $@

demo: $(runtime)  ## Train mesa, attention and gated_deltanet on Python's own library, and write runs/demo/report/index.html
	$(python) -m mesanet compare demo --out runs/demo

test: $(development)  ## The tests, without the slow ones
	$(python) -m pytest -n $(WORKERS) --dist worksteal

test-slow: $(development)  ## The slow tests alone
	$(python) -m pytest -m slow

check: $(development)  ## Formatting, lint, types and the walls between the packages
	$(python) -m ruff format --check .
	$(python) -m ruff check .
	$(python) -m mypy
	.venv/bin/lint-imports

format: $(development)  ## Rewrite the code in the house style
	$(python) -m ruff format .
	$(python) -m ruff check --fix .

clean:  ## Remove caches; .venv and runs/ stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
