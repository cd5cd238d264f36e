# `make repro` and `make test` set up all they need on a machine with Python 3.11+, git and make.

PYTHON ?= python3
RUN ?=
GPU ?=
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: repro test test-fast soak lint docs clean

repro: .venv/installed$(if $(GPU),-gpu)
ifneq ($(RUN),)
	test $(RUN) -ef params/run.toml || cp $(RUN) params/run.toml
endif
	dvc repro
	@python -m pipeline summary

test: .venv/installed-test
	pytest -q -n 2 --dist worksteal -m "not soak and not release"
	pytest -q -n 2 --dist loadfile -m release

# While editing: the rooms that compile next to nothing, half of all tests, in less than a minute.
FAST := protocol runfile sources stage tokens transcript wire swarm/test_lies.py
test-fast: .venv/installed-test
	pytest -q -n 2 --dist worksteal -m "not soak" tests/test_dag.py tests/test_habits.py $(FAST:%=tests/pipeline/%)

soak: .venv/installed-test
	pytest -q -n 2 --dist worksteal -m soak

lint: .venv/installed-test
	ruff format --check .
	ruff check .
	lint-imports
	mypy

docs: .venv/installed-docs
	rm -rf docs/reference/api  # pages of modules that are gone
	sphinx-build -q -W --keep-going docs docs/_build/html
	@echo "The site is ready: docs/_build/html/index.html"

clean:
	rm -rf .venv

# One marker file per set of packages; pip is asked again only when these files change.
.venv/installed%: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.$(EXTRA$*)'
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

EXTRA-docs := [docs]
EXTRA-test := [test]
EXTRA-gpu := [cuda12]
