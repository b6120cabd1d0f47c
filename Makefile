# `make help` lists the targets. Everything is installed into $(VENV), with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# The oldest frontend that pyproject.toml allows, for tests/test_frontends.py: beside the newest, not instead of it.
OLDEST_FRONTEND ?= 1.28.0

# Absolute, so that `make -C` and a VENV elsewhere work; no pip question may wait for an answer.
python := $(abspath $(VENV))/bin/python
pip := $(python) -m pip --disable-pip-version-check --no-input
# What is installed follows from these; editing the package itself needs no new install (it is editable).
inputs := pyproject.toml constraints.txt
frontend := .frontends/$(OLDEST_FRONTEND)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check install install-dev clean

help:
	@echo 'make demo         install, then attention with its fallbacks on this machine: scripts/demo.py'
	@echo 'make test         install with the development tools, then pytest; PYTEST_ARGS="tests/test_x.py -k name"'
	@echo 'make check        ruff, the format, mypy in the installed shape, the packaging test (Python 3.11 or newer)'
	@echo 'make install      install the package, editable, into $(VENV)'
	@echo 'make install-dev  the same with the extras thunder, redis and dev, and frontend $(OLDEST_FRONTEND) aside'
	@echo 'make clean        remove $(VENV), .frontends and what builds and tools left'
	@echo 'PYTHON=$(PYTHON) and VENV=$(VENV) may be set. torch comes with CUDA libraries: about 3 GB to download.'

demo: install
	$(python) scripts/demo.py

test: install-dev
	$(python) -m pytest $(PYTEST_ARGS)

check: install-dev
	@$(python) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make check needs Python 3.11 or newer: scripts/typecheck.py reads pyproject.toml with tomllib. $(VENV) has Python %d.%d; use VENV=.venv-check PYTHON=python3.11" % sys.version_info[:2])'
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) scripts/typecheck.py
	$(python) -m pytest tests/test_packaging.py

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev $(frontend)/.installed

# Says what is wrong, in this order: no such Python, an old one, one without venv (Debian has it in a package).
$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { echo 'make: no $(PYTHON) here; set PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("make: $(PYTHON) is Python %d.%d, and 3.10 or newer is needed; set PYTHON=python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo 'make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# setuptools first, pinned too: without build isolation the package is built by it, not by whatever is newest today.
$(VENV)/.installed: $(VENV)/.created $(inputs)
	$(pip) install --quiet -c constraints.txt setuptools
	$(pip) install --quiet --no-build-isolation -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created $(inputs)
	$(pip) install --quiet -c constraints.txt setuptools
	$(pip) install --quiet --no-build-isolation -c constraints.txt -e '.[thunder,redis,dev]'
	@touch $@ $(VENV)/.installed

# No dependencies: they would be a second torch's worth of libraries, and the installed ones serve both.
$(frontend)/.installed: $(VENV)/.created
	rm -rf $(frontend)
	$(pip) install --quiet --no-deps --target $(frontend) nvidia-cudnn-frontend==$(OLDEST_FRONTEND)
	@touch $@

clean:
	rm -rf $(VENV) .frontends build dist *.egg-info .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
