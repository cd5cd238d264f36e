# `make repro` and `make test` set up all they need on a machine with Python 3.11+, git and make.

PYTHON ?= python3
RUN ?=
# GPU=1 is CUDA 13; GPU=cuda12 or GPU=cuda13 say which. Each has an environment of its own.
GPU ?=
CUDA := $(patsubst 1,cuda13,$(GPU))
$(if $(filter-out cuda12 cuda13,$(CUDA)),$(error GPU=$(GPU): expected 1, cuda12 or cuda13))
VENV := .venv$(if $(GPU),-$(subst cuda13,gpu,$(CUDA)))
COMMA := ,
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: repro test test-fast soak lint docs generated clean

repro: export RUN := $(RUN)
repro: $(VENV)/installed
ifneq ($(RUN),)
	test "$$RUN" -ef params/run.toml || cp "$$RUN" params/run.toml
endif
	@python -m json.tool .dvc/tmp/rwlock >/dev/null 2>&1 || rm -f .dvc/tmp/rwlock  # a killed DVC
	@python -m pipeline check
	dvc repro
	@python -m pipeline summary

# Three workers for two cores: engines, servers and killed processes are often waited for.
test: $(VENV)/installed-test
	pytest -q -n 3 --dist worksteal -m "not soak and not release"
	pytest -q -n 2 --dist loadfile -m release $$(grep -rl --include='test_*.py' mark.release tests)

# While editing: the rooms that compile next to nothing, half of all tests, in less than a minute.
FAST := protocol runfile sources stage tokens transcript wire swarm/test_lies.py
test-fast: $(VENV)/installed-test
	pytest -q -n 2 --dist worksteal -m "not soak" tests/test_dag.py tests/test_habits.py $(FAST:%=tests/pipeline/%)

soak: $(VENV)/installed-test
	pytest -q -n 2 --dist worksteal -m soak

lint: $(VENV)/installed-test
	ruff format --check .
	ruff check .
	lint-imports
	mypy

docs: $(VENV)/installed-docs
	rm -rf docs/reference/api  # pages of modules that are gone
	sphinx-build -q -W --keep-going docs docs/_build/html
	@echo "The site is ready: docs/_build/html/index.html"

# What is made from the tables of the run file, after a change of them.
generated: $(VENV)/installed
	python -m pipeline schema > params/run.schema.json
	python -m pipeline reference > docs/reference/run-file.md

clean:
	rm -rf .venv .venv-gpu .venv-cuda12

# One marker file per set of packages; pip is asked again only when these files change.
$(VENV)/installed%: pyproject.toml $(VENV)/constraints.txt
	$(PIP) -e '.$(EXTRA$*)'
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/constraints.txt
	$(PIP) -e '.$(EXTRA)'
	touch $@

# With a GPU, a line of constraints-gpu.txt stands for that of constraints.txt with the same name.
$(VENV)/constraints.txt: constraints.txt constraints-gpu.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	awk -F== '!($$1 in seen) { seen[$$1]; print }' $(if $(GPU),constraints-gpu.txt) constraints.txt > $@

PIP := python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt
ON := $(addprefix $(COMMA),$(CUDA))
EXTRA := [engines$(ON)]
EXTRA-docs := [docs]
EXTRA-test := [engines,test$(ON)]
