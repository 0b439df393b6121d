# `make demo` and `make test` do everything on a bare machine with Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-all lint bench bench-peers bench-many claims fuzz clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,flower]'
	touch $@

demo: install  ## top-k 0.99 with error feedback beside uncompressed FedAvg, on the MNIST subset
	rm -rf runs/demo
	$(BIN)/cfedavg sweep --config configs/demo.toml --vary "compressor=none|topk(0.99) >> bf16" --out runs/demo

# One thread for each of the test workers: small tensors gain nothing from more.
test: lint  ## what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q

test-all: lint  ## with the slow tests too; those marked gpu need a CUDA device: pytest -m gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## what the engine adds to local SGD, the wire, and how the cost of a round grows
	$(BIN)/python bench/reference.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/wire.py
	$(BIN)/python bench/growth.py

bench-peers: install  ## us, pfl-research, plain PyTorch and Flower at the same round, in turns
	test -x .venv-peers/bin/python || bench/peers/install
	$(BIN)/python bench/compare.py

bench-many: install  ## ten thousand clients: memory and disk over the rounds (some 20 GB in runs/many)
	rm -rf runs/many
	$(BIN)/python bench/many.py --out runs/many

claims: install  ## figures, tables and docs/claims.md again, from the cells in results/paper alone
	$(BIN)/cfedavg reproduce --draw --scale paper --out results/paper
	$(BIN)/cfedavg claims results/paper --words docs/claims.toml --out docs/claims.md

fuzz: install  ## ten million mutated messages: only WireError, no growing memory
	$(BIN)/python bench/fuzz.py

clean:
	rm -rf .venv .venv-peers runs build src/*.egg-info
