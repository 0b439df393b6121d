# `make demo` and `make test` do everything on a bare machine with Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP = $(BIN)/python -m pip
INSTALLED := .venv/.installed
BUILT := .venv/.built

.PHONY: install lock demo test test-all check-package coverage docs try-docs lint bench bench-peers bench-coders bench-many paper fuzz clean

install: $(BUILT)

# Every file is checked against its hash before anything of it runs, build tools included. torch goes first and
# alone: pip would prefer a build whose hash the index tells, gigabytes with CUDA, to the CPU build on a disk.
# The last line adds what only a CUDA build of torch needs, in the versions that torch names.
$(INSTALLED): pyproject.toml constraints.txt constraints.lock constraints.torch.lock
	$(PYTHON) -m venv .venv
	$(PIP) download --quiet --no-deps --only-binary :all: --dest .venv/wheels --constraint constraints.txt torch
	$(PIP) install --quiet --no-deps --require-hashes --no-index --find-links .venv/wheels -r constraints.torch.lock
	rm -r .venv/wheels
	$(PIP) install --quiet --no-deps --require-hashes --only-binary :all: -r constraints.lock
	touch $@

# The package itself, with its C library if there is a compiler.
$(BUILT): $(INSTALLED) setup.py $(wildcard clients/c/*.c clients/c/*.h)
	$(PIP) install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev,flower]'
	touch $@

LOCK = $(BIN)/uv pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes --python-version 3.11

lock: install  ## the hashes of the versions in constraints.txt; add those of torch's CPU builds by hand
	$(LOCK) --no-emit-package torch --output-file constraints.lock constraints.txt
	$(LOCK) --no-emit-package torch --output-file bench/peers/constraints.lock bench/peers/constraints.txt
	$(LOCK) --no-emit-package torch --output-file bench/peers/coders/constraints.lock bench/peers/coders/constraints.txt
	echo nncodec==2.1.3 | $(LOCK) --output-file bench/peers/coders/nncodec.lock -
	grep '^torch==' constraints.txt | $(LOCK) --output-file constraints.torch.lock -

demo: install  ## both directions compressed beside uncompressed FedAvg, on the MNIST subset
	rm -rf runs/demo
	$(BIN)/cfedavg sweep --config configs/demo.toml --out runs/demo \
		--vary "compressor,compressor_down=none|topk(0.97, least=10000) >> int3(256)"

# One thread for each of the test workers: small tensors gain nothing from more.
test: lint  ## what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q

test-all: lint .venv-simulation/.installed  ## with the slow tests too; those marked gpu need a CUDA device: pytest -m gpu
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -ra -q -m "not gpu"
	CFEDAVG_KERNELS=numba $(BIN)/python -m pytest -n auto -q tests/wire tests/clients tests/compress/test_largest.py
	$(MAKE) check-package
	$(BIN)/python -m scripts.try_docs

check-package: install  ## wheel and sdist in empty environments, on each Python there is; needs a compiler
	$(BIN)/python -m scripts.check_package

coverage: install  ## what `make test` runs of each room, processes included; htmlcov/index.html shows the lines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q --cov=cfedavg --cov-report=html --cov-report=json
	$(BIN)/python -m scripts.coverage_rooms coverage.json

.venv-simulation/.installed: $(BUILT) scripts/install_simulation  # Ray, for Flower's simulation
	scripts/install_simulation
	touch $@

docs: install  ## the pages as a site in site/, from docs/ and the code; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

try-docs: install  ## README, start pages and notebook in empty environments, with the wheel; says how long each takes
	$(BIN)/python -m scripts.try_docs

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

bench-coders: install  ## our messages, directions and factors beside NNCodec, STC and PyTorch's PowerSGD hook
	test -x .venv-coders/bin/python || bench/peers/coders/install
	OMP_NUM_THREADS=1 .venv-coders/bin/python -m bench.coders
	$(BIN)/python -m bench.coders_tables

bench-many: install  ## ten thousand clients: time and memory of each round, residuals in each place
	$(BIN)/python bench/many.py --residuals none memory disk --out runs/many

paper: install  ## figures, tables and pages of paper/ again, from the cells in paper/*/results alone
	$(BIN)/python -m paper.cfedavg draw
	$(BIN)/python -m paper.cfedavg claims
	$(BIN)/python -m paper.niid_bench draw
	$(BIN)/python -m paper.shakespeare draw
	$(BIN)/python -m paper.feedback draw
	$(BIN)/python -m paper.overview

fuzz: install  ## ten million mutated messages: only WireError, no growing memory
	$(BIN)/python bench/fuzz.py

clean:
	rm -rf .venv .venv-peers .venv-coders .venv-simulation runs build dist site clients/c/build htmlcov .coverage* coverage.json
	rm -rf src/*.egg-info src/cfedavg/core/_native.so
