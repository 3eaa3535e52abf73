# The commands a newcomer needs are `make testnet` and `make test`; both set up everything they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup lock testnet test test-all lint mutants proto chaos bench gpu reproduce site docker docker-test clean

setup: $(STAMP)

# By version; with LOCK=deploy/ci-cpu.lock by hash, which is for one kind of machine.
$(STAMP): pyproject.toml constraints.txt protocol/payload/native.c plugins/settlement/pyproject.toml plugins/zerog/pyproject.toml plugins/market/pyproject.toml plugins/etcd/pyproject.toml plugins/tee/pyproject.toml plugins/availability/pyproject.toml
	@echo "installing the dependencies into $(VENV): the first time takes some minutes, because torch alone is a download of 200 MB"
	$(PYTHON) -m venv $(VENV)
ifdef LOCK
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r $(LOCK)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e plugins/settlement -e plugins/zerog -e plugins/market -e plugins/etcd -e plugins/tee -e plugins/availability
else
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e plugins/settlement -e plugins/tee -e plugins/availability
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e plugins/zerog -e plugins/market -e plugins/etcd
endif
	touch $(STAMP)

lock: setup  ## after a change of constraints.txt: the hashes of what images and CI install
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/python deploy/lock.py

testnet: setup  ## three nodes of two stages train on this machine; a table per round
	$(BIN)/dilocox testnet up

test: setup lint  ## a core for each worker, who takes the files one by one: those of real processes come first, and wait a lot
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-all: test mutants  ## an hour and more: what is looked at once before a release
	$(BIN)/pytest -m thorough
	DILOCOX_SCHEDULES=20000 $(BIN)/pytest tests/sim/test_explorer.py
	$(BIN)/python -m bench.scale --check
	$(BIN)/python -m bench.asking --check
	$(BIN)/python -m bench.fuzz --check
	$(BIN)/python -m bench.strangers --check

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: setup  ## do the fast tests notice a fault? the mutants of tests/mutants/mutants.toml, then mutmut over the core
	$(BIN)/python -m tests.mutants

proto: setup  ## regenerate protocol/pb from proto/
	$(BIN)/python -P -m dilocox.protocol.pb.generate

chaos: setup  ## real processes on a wire of their own, a fault every half minute for 20 minutes; root only
	$(BIN)/python -m bench.chaos --check

bench: setup
	$(BIN)/python -m bench

gpu: setup  ## one GPU in at most ten minutes: training speed, codec, pause of training, tests; writes docs/results/gpu.json
	$(BIN)/python -m bench.gpu

reproduce: setup  ## the paper's table, measured here: real processes on lines at its ratio of computing to network; root only
	$(BIN)/python -m bench.reproduce

site: setup  ## the pages as HTML in build/site, for a browser without a network
	$(BIN)/mkdocs build

docker:
	docker build --network host -t dilocox .

docker-test:  ## the image, compose.yaml and the README's docker lines in real containers; says so where no engine runs
	$(PYTHON) deploy/docker_test.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
