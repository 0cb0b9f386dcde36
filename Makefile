# Every target sets up .venv by itself (tools/setup_env.py; instant when nothing changed).
#   make test       lints, types, and all tests that take seconds; no GPU       make lint    lints and types alone
#   make test-slow  the tests marked slow; no GPU                               make wheel   sdist and wheel into dist/
#   make test-gpu   the tests that need a GPU, with python3's own torch if it sees one
#   make demo       train, roll out, compare, export (DEMO_ARGS="--smoke" for a short one)
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: setup demo lint test test-slow test-gpu wheel clean

setup:
	@$(PYTHON) tools/setup_env.py

# torchao, which the tests compare with, is imported by transformers wherever it is installed and prints warnings about
# GPU libraries that no CPU build of torch has.
demo: export TORCHAO_FORCE_SKIP_LOADING_SO_FILES ?= 1
demo: export TORCH_LOGS ?= -torch.utils._pytree
demo: setup
	@$(BIN)/trace-compile demo $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The machine's cores go to pytest's workers, not to threads inside each.
test test-slow: export OMP_NUM_THREADS ?= 1

test: lint
	$(BIN)/pytest -n $(WORKERS) -q

test-slow: setup
	$(BIN)/pytest -n $(WORKERS) -q -m "slow and not gpu and not kernel" --durations=10

test-gpu:
	@PYTHON="$(PYTHON)" bash tools/test_gpu.sh

wheel: setup
	@rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	@ls dist

clean:
	rm -rf .venv build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
