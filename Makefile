# `make repro` and `make test` set up all they need on a machine with Python 3.11+, git and make.

PYTHON ?= python3
RUN ?=
# GPU=1 has an environment of its own, for one CUDA: 13, or 12 for older drivers.
GPU ?=
CUDA ?= 13
$(if $(filter-out 1,$(GPU)),$(error GPU=$(GPU): expected 1, and CUDA=12 or CUDA=13))
$(if $(filter-out 12 13,$(CUDA)),$(error CUDA=$(CUDA): expected 12 or 13))
$(if $(GPU),,$(if $(filter command,$(origin CUDA)),$(error CUDA=$(CUDA): expected GPU=1 beside it)))
VENV := .venv$(if $(GPU),-gpu)
MADE_FOR := $(if $(GPU),$(shell cat $(VENV)/cuda 2>/dev/null))
$(if $(filter-out $(CUDA),$(MADE_FOR)),$(error CUDA=$(CUDA): $(VENV) is for CUDA $(MADE_FOR), expected CUDA=$(MADE_FOR), or rm -rf $(VENV) first))
# Its programs and its install name the folder that it was made in: in a copy they run the first's code.
MADE_IN := $(shell made=$$(sed -n 's/^command = .* -m venv \(--[^ ]* \)*//p' $(VENV)/pyvenv.cfg 2>/dev/null); test -z "$$made" || test "$$made" -ef $(VENV) || echo "$$made")
$(if $(filter-out clean,$(or $(MAKECMDGOALS),repro)),$(if $(MADE_IN),$(error $(CURDIR)/$(VENV): made as $(MADE_IN), expected one made here: make clean, then make again)))
# What the pinned versions support: with a GPU they are those of JAX 0.11.
LEAST := $(if $(GPU),3.12,3.11)
COMMA := ,
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Set in some containers: each of many processes would compile the source anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: repro test test-long test-fast soak lint docs generated dist environment environment-test clean

# RUN replaces params/run.toml, whose content is kept somewhere: by git, as another file of params/,
# or as the file that was last put in its place; a kill may have left the beginning of it. Without git
# that is not known. A file that has what differs from its base is written whole.
COPIED := data/.run.toml
KEEPS = head -c $$(wc -c 2>/dev/null < params/run.toml) $(1) 2>/dev/null | cmp -s - params/run.toml
IS_KEPT = git rev-parse --git-dir >/dev/null 2>&1 || exit 0; \
    git cat-file -e $$(git hash-object params/run.toml) 2>/dev/null && exit 0; \
    for file in $(COPIED) $(COPIED).new params/*.toml; do \
        test "$$file" -ef params/run.toml || ! $(call KEEPS,"$$file") || exit 0; \
    done; exit 1

repro: export RUN := $(RUN)
repro: $(VENV)/installed
ifneq ($(RUN),)
	@test ! -e params/run.toml || test "$$RUN" -ef params/run.toml || ($(IS_KEPT)) || \
	    { echo "RUN=$$RUN: params/run.toml has edits that are nowhere else, expected them committed or copied: cp params/run.toml params/mine.toml" >&2; exit 1; }
	@test ! -e $(COPIED).new || ! $(call KEEPS,$(COPIED).new) || mv $(COPIED).new $(COPIED)
	test "$$RUN" -ef params/run.toml || { mkdir -p data && \
	    { python -m pipeline whole "$$RUN" > $(COPIED).new || { rm -f $(COPIED).new; exit 1; }; } && \
	    cp $(COPIED).new params/run.toml && mv $(COPIED).new $(COPIED); }
endif
	@python -m json.tool .dvc/tmp/rwlock >/dev/null 2>&1 || rm -f .dvc/tmp/rwlock  # a killed DVC
	@python -m pipeline check
	dvc repro
	@python -m pipeline summary

# Three workers for two cores: engines, servers and killed processes are often waited for.
test: $(VENV)/installed-test
	pytest -q -n 3 --dist worksteal -m "not long and not soak and not release"

# Whole runs, peers in processes, kills, and programs compiled as a user's run does.
test-long: $(VENV)/installed-test
	pytest -q -n 3 --dist worksteal -m "long and not soak and not release"
	pytest -q -n 2 --dist loadfile -m release $$(grep -rl --include='test_*.py' mark.release tests)

# While editing: one wing, `make test-fast WING=lockstep`, and what keeps the house in order.
WING := lockstep
test-fast: $(VENV)/installed-test
	pytest -q -n 2 --dist worksteal -m "not long and not soak and not release" tests/test_dag.py tests/test_habits.py tests/$(WING)

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
	python -m docs.run_file_page > docs/reference/run-file.md

# Wheel and sdist: metadata and contents are checked, the files that GitHub reads too; each Python that
# is here (a shim of pyenv may lead nowhere) installs both in a bare environment and runs an example
# from another folder.
PYTHONS := 3.11 3.12 3.13
EXAMPLE := examples/char_gpt.py --rounds 4 --inner-steps 3 --length 16 --width 16 --layers 1 --text ../README.md
dist:
	rm -rf dist build .venv-dist
	$(PYTHON) -m venv .venv-dist/build
	.venv-dist/build/bin/pip install -q --disable-pip-version-check build check-jsonschema twine
	for schema in workflows:workflows/ci workflows:workflows/release dependabot:dependabot \
	    issue-forms:ISSUE_TEMPLATE/bug issue-forms:ISSUE_TEMPLATE/wish issue-config:ISSUE_TEMPLATE/config; do \
	    kind=$${schema%%:*}; test $$kind = dependabot || kind=github-$$kind; \
	    .venv-dist/build/bin/check-jsonschema -q --builtin-schema vendor.$$kind .github/$${schema#*:}.yml || exit 1; \
	done
	.venv-dist/build/bin/python -m build -q .
	.venv-dist/build/bin/twine check --strict dist/*
	tar -tzf dist/*.tar.gz | sed 's,^[^/]*/,,' > dist/inside.txt
	.venv-dist/build/bin/python -m zipfile -l dist/*.whl | awk 'NR > 1 { print $$1 }' >> dist/inside.txt
	cut -d/ -f1,2 dist/inside.txt | sort | uniq -c
	test $$(grep -cE '(^|dist-info/licenses/)LICENSE$$|^lockstep/py.typed$$' dist/inside.txt) = 4
	! grep -E '^(tests|data|docs|benchmarks|\.github)/|(^|/)test_' dist/inside.txt
	rm dist/inside.txt
	for python in $(PYTHONS); do python$$python -c '' 2>/dev/null || continue; \
	    for file in dist/*.whl dist/*.tar.gz; do \
	        rm -rf .venv-dist/bare && python$$python -m venv .venv-dist/bare && \
	        .venv-dist/bare/bin/pip install -q --disable-pip-version-check -c constraints.txt $$file && \
	        (cd .venv-dist && PYTHONPATH= bare/bin/python ../$(EXAMPLE) && bare/bin/lockstep --version) || exit 1; \
	        echo "$$file works with Python $$python"; \
	    done; \
	done
	rm -rf .venv-dist

# What `make repro` and `make test` set up, for an image of a container.
environment: $(VENV)/installed
environment-test: $(VENV)/installed-test

clean:
	rm -rf .venv .venv-gpu

# One marker file per set of packages; pip is asked again only when these files change.
$(VENV)/installed%: pyproject.toml $(VENV)/constraints.txt
	$(PIP) -e '.$(EXTRA$*)'
	$(COMPILE)
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/constraints.txt
	$(PIP) -e '.$(EXTRA)'
	$(COMPILE)
	touch $@

# With a GPU, a line of constraints-gpu.txt stands for that of constraints.txt with the same name.
$(VENV)/constraints.txt: constraints.txt constraints-gpu.txt
	@test -x $(VENV)/bin/python || $(PYTHON) -c 'import sys; found = sys.version_info[:2]; least = $(subst .,$(COMMA),$(LEAST)); sys.exit(found < (least) and f"PYTHON=$(PYTHON): found Python {found[0]}.{found[1]}, expected $(LEAST) or later")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(if $(GPU),echo $(CUDA) > $(VENV)/cuda)
	awk -F== '!($$1 in seen) { seen[$$1]; print }' $(if $(GPU),constraints-gpu.txt) constraints.txt > $@

PIP := python -m pip install -q --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt
# On all cores, which pip does not, and without packages' own tests; a few files are for other Pythons.
COMPILE := @python -m compileall -q -j 0 -x '/tests/' $(VENV)/lib >/dev/null 2>&1 || true
ON := $(if $(GPU),$(COMMA)cuda$(CUDA))
EXTRA := [engines$(ON)]
EXTRA-docs := [docs]
EXTRA-test := [engines,test$(ON)]
