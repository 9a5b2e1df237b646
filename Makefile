# Every target works from a clean clone: the first run makes .venv, later runs find it ready.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test test-ranks test-values test-cuda lint testbed bench soak dist docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/weft.stamp
	$(VENV)/bin/weft demo

# Two halves of equal length at once, on the two cores that there are at least.
RANKS := $(addprefix tests/,distributed doctor hooks sparse switching diffusers video generate)

test: $(VENV)/test.stamp
	@$(MAKE) --no-print-directory -j2 test-ranks test-values

test-ranks: $(VENV)/test.stamp
	$(PY) -m pytest $(RANKS)

test-values: lint
	$(PY) -m pytest $(RANKS:%=--ignore=%)

# What needs the CUDA build of torch and the two optional packages, and no GPU: kernels are compiled, calls are made
# with fake tensors. It is a second environment of 7 GB, in .venv-cuda.
CUDA_VENV := .venv-cuda
CUDA_TESTS := tests/cuda tests/diffusers/test_hot_path.py $(addprefix tests/run/test_,\
  backends.py hot_path.py package_hot_path.py packages.py parity.py select.py tiles.py)

test-cuda: $(CUDA_VENV)/test.stamp
	$(CUDA_VENV)/bin/python -m pytest $(CUDA_TESTS)

lint: $(VENV)/test.stamp
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/lint-imports --no-logo
	@if $(VENV)/bin/pyright --version >/dev/null 2>&1; \
	then $(VENV)/bin/pyright --pythonpath $(PY); \
	else echo "pyright skipped: it cannot start, its node runtime is not there for this machine"; fi

# Several machines on this one; needs root and iproute2, and says so.
testbed: $(VENV)/weft.stamp
	$(VENV)/bin/weft testbed

# All benchmarks, on a machine that does nothing else; their rows go to docs/results.md. What was measured with the
# same code is not measured again. The whole of bench.quality takes hours: python -m bench.all --only quality
bench: $(VENV)/bench.stamp
	$(PY) -m bench.all

# Every long test (faults at random moments, servers under load, all models on all ranks), then all others with
# random examples that no run before had.
soak: $(VENV)/test.stamp
	$(PY) -m pytest -m soak --timeout 7200
	$(PY) -m pytest --hypothesis-profile new

# The wheel and the source package, in dist/, with metadata that an index accepts.
dist: $(VENV)/bin/python
	$(PIP) install -q build twine
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

# The pages, with their reference, in build/docs; a link or a name that leads nowhere is an error.
docs: $(VENV)/docs.stamp
	$(VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("weft needs Python 3.10 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "This python cannot make a .venv. Debian: apt install python3-venv"; exit 1; }

# torch goes first and alone: with this exact pin there, nothing after it pulls another build.
$(VENV)/torch.stamp: | $(VENV)/bin/python
	$(PIP) install torch==2.13.0
	touch $@

$(VENV)/weft.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[video]'
	touch $@

$(VENV)/test.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[test]'
	touch $@ $(VENV)/weft.stamp

# PyPI's torch is the CUDA build; links in the settings of pip may lead to another one.
CUDA_PIP := env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null \
  $(CUDA_VENV)/bin/python -m pip --disable-pip-version-check

$(CUDA_VENV)/torch.stamp:
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_PIP) install torch==2.13.0
	touch $@

$(CUDA_VENV)/test.stamp: pyproject.toml $(CUDA_VENV)/torch.stamp
	$(CUDA_PIP) install -q -e '.[test,fa4,cudnn]'
	touch $@

$(VENV)/bench.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[bench,models,serve,train]'
	touch $@ $(VENV)/weft.stamp

# The reference is made by importing weft, its server too.
$(VENV)/docs.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[serve,docs]'
	touch $@ $(VENV)/weft.stamp
