# The commands a newcomer needs are `make testnet` and `make test`; both set up everything they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup testnet test test-all lint mutants proto chaos bench docker clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

testnet: setup  ## three nodes of two stages train on this machine; a table per round
	$(BIN)/dilocox testnet up

test: setup lint
	$(BIN)/pytest

test-all: test mutants  ## an hour and more: what is looked at once before a release
	DILOCOX_SCHEDULES=20000 $(BIN)/pytest tests/sim/test_explorer.py
	$(BIN)/python -m bench.scale --check

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: setup  ## would the fast tests notice? a patch for each promise, then mutmut over the core
	$(BIN)/python -m tests.mutants

proto: setup  ## regenerate protocol/pb from proto/
	$(BIN)/python -P -m dilocox.protocol.pb.generate

chaos: setup  ## real processes on a wire of their own, a fault every half minute for 20 minutes; root only
	$(BIN)/python -m bench.chaos --check

bench: setup
	$(BIN)/python -m bench

docker:
	docker build --network host -t dilocox .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
