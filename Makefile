# make tune: tune the example study here; make test: everything the tests need, then the tests.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STUDY ?= studies/qwen3.5-122b-a10b-tp4.toml

.PHONY: tune test lint docs clean
tune: $(VENV)/.installed
	$(BIN)/moeopt tune $(STUDY)

test: $(VENV)/.installed-test lint docs
	without="$$(tests/setup-system)" && $(BIN)/python -m pytest -n 2 --dist loadfile -m "$$without"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, into site/: every warning, a dead link or an unknown name among them, is an error.
docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# Without an NVIDIA driver torch comes from the constraints file, as others pull gigabytes of CUDA libraries; where it
# cannot, from wherever pip finds it.
INSTALL := $(BIN)/python -m pip install -q
CONSTRAINTS := $$(command -v nvidia-smi >/dev/null || echo -c constraints.txt)
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) $(CONSTRAINTS) -e . || $(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) $(CONSTRAINTS) -e ".[test,ray]" || $(INSTALL) -e ".[test,ray]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache
