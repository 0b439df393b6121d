# `make demo` and `make test` do everything on a bare machine with Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: install demo test test-all lint bench fuzz clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install  ## top-k 0.99 with error feedback beside uncompressed FedAvg, on the MNIST subset
	rm -rf runs/demo
	$(BIN)/cfedavg sweep --config experiments/demo.toml --vary "compressor=none|topk(0.99) >> bf16" --out runs/demo

# One thread for each of the test workers: small tensors gain nothing from more.
test: lint  ## what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q

test-all: lint  ## with the slow tests too; those marked gpu need a CUDA device: pytest -m gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q -m "not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python bench/reference.py
	OMP_NUM_THREADS=1 $(BIN)/python bench/wire.py

fuzz: install  ## ten million mutated messages: only WireError, no growing memory
	$(BIN)/python bench/fuzz.py

clean:
	rm -rf .venv runs build src/*.egg-info
