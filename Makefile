# make setup | demo | test | test-fast | check | docs | bench | mutants | results | clean
# make demo RESULTS=docs/results/demo.json keeps the figures that it measures.
.PHONY: setup demo test test-fast check docs bench mutants results clean
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= PASSIVE
# What uv installs is compiled when it is first imported: kept, or else each process does it again.
unexport PYTHONDONTWRITEBYTECODE
# Each process takes a whole file at a time, in the order of conftest.py.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml scripts/setup.sh
	bash scripts/setup.sh $(PYTHON)
	touch $@

demo: STARTED := $(shell date +%s)
demo: setup
	ready=$$(date +%s); $(BIN)/python scripts/demo.py \
	  $(if $(RESULTS),--results $(RESULTS) --started $(STARTED) --ready $$ready)

# Two processes on two cores: a second thread in each only waits for the other's.
test test-fast check: export OMP_NUM_THREADS ?= 1

test: setup
	$(PYTEST)

# Without what is marked slow: half a second or more, a process of its own, one more case of a kind.
test-fast: setup
	$(PYTEST) -m "not slow"

check: setup
	$(BIN)/ruff check src tests scripts papers
	$(BIN)/ruff format --check src tests scripts papers
	$(BIN)/mypy
	$(BIN)/python scripts/supply.py
	$(PYTEST)
	if [ -x $(BIN)/mkdocs ]; then $(BIN)/mkdocs build --strict --quiet --site-dir build/site; fi

# The site, in build/site; its tools are locked apart and installed on the first call.
docs: setup
	[ -x $(BIN)/mkdocs ] || $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  --no-deps -r requirements-docs.lock
	$(BIN)/python scripts/docs_pages.py
	$(BIN)/mkdocs build --strict --site-dir build/site

bench: setup
	$(BIN)/python -W ignore scripts/bench.py

# Plants each bug of tests/mutants and runs the tests on it. Can be stopped and called again.
mutants: setup
	$(BIN)/python scripts/mutants.py --jobs 2

results: setup
	$(BIN)/python scripts/results.py

clean:
	rm -rf .venv
