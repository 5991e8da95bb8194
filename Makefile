# containerd-shim-nvidia: everything a newcomer, a developer and CI need.
# Every target sets up what it needs. Install only git, python3 and make by hand.

PYTHON  ?= /usr/bin/python3
PREFIX  ?= /opt/containerd-shim-nvidia
BINDIR  ?= /usr/local/bin

# What the demo and the tests run for real, from Debian.
PACKAGES := binutils busybox-static containerd containernetworking-plugins criu crun e2fsprogs gcc iproute2 \
            iptables libc6-dev openssh-client patchelf procps python3-venv runc strace zstd

# What builds and runs virtual machines, and the tests that run in them because they need cgroup v2
# and systemd.
VM_PACKAGES := mmdebstrap qemu-system-x86
VM_TESTS    := tests/vm tests/e2e/test_metrics.py tests/e2e/test_options.py \
               tests/e2e/test_checkpoint_images.py tests/e2e/test_fast_path.py \
               tests/unit/shim/test_orphans.py

# What builds and tests a release.
RELEASE_PACKAGES := lintian mmdebstrap openssh-client rpm

VENV     := .venv
CACHE    := .cache
SITE     := $(CACHE)/site
LAUNCHER := $(CACHE)/bin/containerd-shim-nvidia-v1
PROBE    := $(CACHE)/bin/nvshim-probe

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo; echo 'For development:'
	@sed -n 's/^\([a-z-]*\):.*#- \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

.PHONY: demo
demo: setup ## Run a GPU container through the shim on a private containerd
	@$(VENV)/bin/python -m tools.demo

# Make failures repeatable: each run has the same examples and the same order of sets.
test test-thorough: export PYTHONHASHSEED := 0
# Compile each module once, not in each worker and program, even if the environment forbids it.
$(CACHE)/.collected demo lint test test-thorough test-matrix: export PYTHONDONTWRITEBYTECODE :=

# Tests that run in parallel: two for each processor, because end-to-end tests also wait. Three or four
# take as long, and are late more often.
WORKERS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 8 ? n : 8)))
BESIDE  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Collect the tests once to compile their modules before the workers start; again when one changes.
$(CACHE)/.collected: $(VENV)/.ready $(shell find tests -name '*.py')
	@$(VENV)/bin/python -m pytest --collect-only -q >/dev/null && touch $@ || true

# With several workers pytest takes a missing path for a path without tests, which is no failure here.
$(foreach path,$(TESTS),$(if $(wildcard $(firstword $(subst ::, ,$(path)))),,$(error $(path): no such file or directory)))

# The first tests need no tree, so it is built while they run. Tests that need it wait for it.
.PHONY: test
test: setup $(CACHE)/.parts $(CACHE)/.collected ## Run all tests: unit, security and end to end with a real containerd; TESTS=paths
	@$(VENV)/bin/python -m tests.harness.dist & \
	status=0; \
	run() { $(VENV)/bin/python -m pytest "$$@" || { code=$$?; $(if $(TESTS),[ $$code = 5 ] ||) status=$$code; }; }; \
	run $(BESIDE) -m 'not serial and not newest and not thorough' $(TESTS); \
	serial=$$(grep -rl --include='test_*.py' 'mark\.serial' $(or $(TESTS),tests)) || true; \
	[ -z "$$serial" ] || run -m 'serial and not newest and not thorough' $$serial; \
	wait; exit $$status

.PHONY: test-anywhere
test-anywhere: setup #- Run the tests on machines unlike this one: another uptime, umask, TMPDIR, Debian; ONLY=boot ARGS=tests/unit
	@$(VENV)/bin/python -m tests.anywhere $(if $(ONLY),--only $(ONLY)) $(ARGS)

.PHONY: check-more
check-more: setup ## Run everything beyond make test, one after another, and print a table; ONLY=fuzz,soak
	@$(VENV)/bin/python -m tests.more $(if $(ONLY),--only $(ONLY))

.PHONY: test-thorough
test-thorough: setup $(CACHE)/.parts #- Run rare combinations of the cases that make test covers
	@files=$$(grep -rl --include='test_*.py' 'mark\.thorough' tests); \
	$(VENV)/bin/python -m pytest $(BESIDE) -m 'thorough and not newest and not serial' $$files; \
	$(VENV)/bin/python -m pytest -m 'thorough and serial' $$files

.PHONY: test-minimums
test-minimums: setup $(CACHE)/.parts #- Run the unit tests with the oldest and the newest packages that pyproject.toml allows; TESTS=paths
	@$(VENV)/bin/python -m tests.minimums $(TESTS)

.PHONY: test-examples
test-examples: export NVSHIM_TEST_EXAMPLES := random
test-examples: setup $(CACHE)/.parts #- Search for random examples that fail; MINUTES=10
	@until=$$((SECONDS + 60 * $(or $(MINUTES),10))); \
	while $(VENV)/bin/python -m pytest -x -o timeout=600 -m '(hypothesis or seeded) and not newest'; do \
	  [ $$SECONDS -lt $$until ] || exit 0; done; exit 1

.PHONY: test-matrix
test-matrix: setup $(CACHE)/.parts #- Run the end-to-end tests with other releases of containerd, runc and crun
	@$(VENV)/bin/python -m tests.harness.dist
	@$(VENV)/bin/python -m tests.matrix

.PHONY: test-vm
test-vm: setup $(CACHE)/.vm-packages $(CACHE)/.parts #- Run the tests that need cgroup v2 and systemd, in virtual machines
	@nice -n 10 $(VENV)/bin/python -m tools.vm -- \
	  python3 -m pytest -o timeout=300 $(VM_TESTS)

.PHONY: test-hostile
test-hostile: setup $(CACHE)/.parts #- Run hostile images in every variant, and race for SECONDS=300
	@NVSHIM_TEST_HOSTILE_SECONDS=$(or $(SECONDS),300) $(VENV)/bin/python -m pytest tests/security

.PHONY: fuzz
fuzz: setup $(CACHE)/.fuzz #- Fuzz every parser of untrusted data; MINUTES=5
	@$(VENV)/bin/python -m tests.fuzz --minutes $(or $(MINUTES),5)

.PHONY: test-chaos
test-chaos: setup #- Make GPUs and NVML fail at every step of a pod, and kill the agent at every step of a claim
	@$(VENV)/bin/python -m tests.chaos $(CHAOS)
	@$(VENV)/bin/python -m tests.chaos.claims $(CLAIMS)

.PHONY: packages
packages: setup #- Run packages that use the driver, and say what changed since the table of them; ONLY=triton,pyopencl
	@$(VENV)/bin/python -m tools.driver_use $(if $(ONLY),--only $(ONLY)) $(ARGS)

.PHONY: soak
soak: setup #- Do a day's work in minutes, and check for leaks; MINUTES=4
	@$(VENV)/bin/python -m tests.soak --minutes $(or $(MINUTES),4)

.PHONY: lint
lint: $(VENV)/.ready ## Check style, types, the directions of imports, and plain words
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tools.plain_words
	$(VENV)/bin/python -m tools.release.readiness

.PHONY: bench
bench: setup ## Measure next to containerd's own shim; BENCH=--help lists the options
	@$(VENV)/bin/python -m tests.bench $(if $(BENCH),$(BENCH),--charts $(CACHE)/bench)

.PHONY: flamegraph
flamegraph: setup $(CACHE)/.profile #- Draw flame graphs of the shim into docs/performance
	@$(VENV)/bin/python -m tests.bench.flamegraph docs/performance

.PHONY: release
release: $(CACHE)/.packages $(CACHE)/.release-packages $(VENV)/.ready ## Make a release in dist/release, signed by KEY=FILE
	@$(VENV)/bin/python -m tools.release --key '$(KEY)' dist

.PHONY: test-release
test-release: setup $(CACHE)/.release-packages $(CACHE)/release-site/.ready #- Make a release twice, compare, and install its packages in real roots
	@$(VENV)/bin/python -m tests.harness.dist
	@NVSHIM_TEST_RELEASE='$(CURDIR)/$(CACHE)/release-site' $(VENV)/bin/python -m pytest -o timeout=900 tests/release

.PHONY: chart
chart: $(VENV)/.ready #- Pack the Helm chart, integration/kubernetes/chart, in dist
	@$(VENV)/bin/python -m tools.release --chart-only dist

.PHONY: gpu-bundle
gpu-bundle: setup #- Build the test bundle for a machine with a GPU, dist/gpu-bundle
	@$(VENV)/bin/python -m tools.gpu.bundle dist/gpu-bundle

.PHONY: dist
dist: $(CACHE)/.packages ## Build the self-contained tree and its archives in dist
	@$(PYTHON) -m tools.dist dist

.PHONY: image
image: dist $(VENV)/.ready #- Build the image for Kubernetes, dist/image.tar, without a registry
	@$(VENV)/bin/python -m tools.node_image dist/tree dist/image.tar

.PHONY: pod-trace
pod-trace: setup #- Trace a pod with a GPU, and update the diagram in docs/kubernetes.md
	@$(VENV)/bin/python -m tools.pod_trace
	@$(VENV)/bin/python -m tools.reference

.PHONY: reference
reference: $(VENV)/.ready #- Regenerate the pages and tables of docs/ that come from the code
	@$(VENV)/bin/python -m tools.reference

.PHONY: docs
docs: $(VENV)/.ready ## Build the documentation as a site, in .cache/site-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict
	@echo 'open $(CURDIR)/$(CACHE)/site-docs/index.html'

.PHONY: proto
proto: $(VENV)/.ready #- Regenerate the modules of api/proto from the .proto files
	$(VENV)/bin/python -m tools.protos

.PHONY: lock
lock: $(CACHE)/.lock #- Update the pinned dependencies, with hashes
	$(VENV)/bin/pip-compile -q --upgrade --generate-hashes --strip-extras --allow-unsafe --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --extra cli --extra dev --extra node -o requirements/dev.txt pyproject.toml
	$(VENV)/bin/pip-compile -q --generate-hashes --strip-extras --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  -c requirements/dev.txt -o requirements/runtime.txt pyproject.toml
	$(VENV)/bin/pip-compile -q --generate-hashes --strip-extras --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  -c requirements/dev.txt --extra cli --extra node -o requirements/node.txt pyproject.toml
	echo 'atheris>=3' | $(VENV)/bin/pip-compile -q --upgrade --generate-hashes --no-strip-extras \
	  --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  -o requirements/fuzz.txt -
	echo 'py-spy>=0.4' | $(VENV)/bin/pip-compile -q --upgrade --generate-hashes --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  -o requirements/profile.txt -
	echo 'pip-tools==7.6.2' | $(VENV)/bin/pip-compile -q --upgrade --generate-hashes --strip-extras \
	  --allow-unsafe --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --no-annotate -c requirements/dev.txt -o requirements/lock.txt -
	echo 'kubernetes-validate>=1.33' | $(VENV)/bin/pip-compile -q --upgrade --generate-hashes --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  -o $(CACHE)/schemas.txt -
	sed -n '/^kubernetes-validate==/,/[0-9a-f]$$/p' $(CACHE)/schemas.txt >requirements/schemas.txt
	printf '%s\n' 'cyclonedx-python-lib[json-validation]>=11' 'spdx-tools>=0.8' \
	  | $(VENV)/bin/pip-compile -q --upgrade --generate-hashes --strip-extras --no-header \
	  --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  -o requirements/release.txt -

.PHONY: install
install: $(CACHE)/.packages ## Install below PREFIX (/opt/containerd-shim-nvidia) and link it into BINDIR
	@$(PYTHON) -m tools.dist --tree-only dist
	@dist/tree/bin/nvshim install --prefix '$(PREFIX)' --bindir '$(BINDIR)'

.PHONY: uninstall
uninstall: #- Remove the installation, except for files that running containers need
	@[ -e '$(PREFIX)' ] || exit 0; \
	for nvshim in '$(PREFIX)'/{current,*-*}/bin/nvshim dist/tree/bin/nvshim; do \
	  if [ -x "$$nvshim" ]; then \
	    exec "$$nvshim" uninstall --prefix '$(PREFIX)' --bindir '$(BINDIR)'; fi; done; \
	echo 'no nvshim below $(PREFIX) nor in dist: make dist, and run it again' >&2; exit 1

.PHONY: clean
clean: #- Remove everything that the other targets created in this directory
	rm -rf $(VENV) $(CACHE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# -- set-up -------------------------------------------------------------------------------

.PHONY: setup
setup: $(CACHE)/.packages $(VENV)/.ready $(SITE)/.ready $(LAUNCHER) $(PROBE)

# Those of some packages that are not installed. A mark is out of date when one was removed.
missing = $(filter-out $(shell dpkg-query -W -f '$${db:Status-Status}/$${Package}\n' $(1) 2>/dev/null \
            | sed -n 's|^installed/||p'),$(1))
.PHONY: lacking

$(CACHE)/.packages: WANTED := $(PACKAGES)
$(CACHE)/.vm-packages: WANTED := $(VM_PACKAGES)
$(CACHE)/.release-packages: WANTED := $(RELEASE_PACKAGES)
.SECONDEXPANSION:
# Retry once: the archive may change between the download of its lists and of the packages.
$(CACHE)/.packages $(CACHE)/.vm-packages $(CACHE)/.release-packages: Makefile $$(if $$(call missing,$$(WANTED)),lacking)
	@mkdir -p $(CACHE)
	@missing='$(call missing,$(WANTED))'; \
	if [ -n "$$missing" ]; then \
	  echo "installing $$missing"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  fetch() { \
	    apt-get -q -o DPkg::Lock::Timeout=300 update \
	      && apt-get -qy -o DPkg::Lock::Timeout=300 install --no-install-recommends $$missing; }; \
	  fetch >$(CACHE)/apt.log 2>&1 || fetch >>$(CACHE)/apt.log 2>&1 \
	    || { tail -n 20 $(CACHE)/apt.log >&2; exit 1; }; fi
	@touch $@

# Start with an empty environment: an interrupted run may have left half of a package. Most modules
# are never imported, so each is compiled when it is.
$(VENV)/.ready: requirements/dev.txt | $(CACHE)/.packages
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check --no-compile --require-hashes \
	  -r requirements/dev.txt
	@touch $@

# atheris exists for some versions of CPython only. Without it the fuzzer mutates blindly and warns.
$(CACHE)/.fuzz: requirements/fuzz.txt $(VENV)/.ready
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes --only-binary :all: \
	  -r requirements/fuzz.txt || echo 'no atheris for this Python' >&2
	@touch $@

$(CACHE)/.profile: requirements/profile.txt $(VENV)/.ready
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements/profile.txt
	@touch $@

$(CACHE)/.lock: requirements/lock.txt $(VENV)/.ready
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements/lock.txt
	@touch $@

# Validators for the lists of a release's contents.
$(CACHE)/release-site/.ready: requirements/release.txt $(VENV)/.ready
	rm -rf $(@D)
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes --target $(@D) \
	  -r requirements/release.txt
	@touch $@

# What the shim itself imports, without the development tools: structlog imports rich if it is
# there, and tests should run with the packages of a node.
$(SITE)/.ready: requirements/runtime.txt $(VENV)/.ready
	rm -rf $(SITE)
	$(VENV)/bin/pip install -q --disable-pip-version-check --require-hashes --target $(SITE) \
	  -r requirements/runtime.txt
	@touch $@

# Download the driver and programs of other releases now, so that no test has to. make test-matrix
# downloads those of Debian unstable itself, because they change daily. The first target does not
# need the virtual environment, so both can be made at the same time.
$(CACHE)/.programs: integration/simulated/driver.py tools/parts.py | $(CACHE)/.packages
	$(PYTHON) -c 'from integration.simulated import driver; driver.DriverFiles.fetch(say=print)'
	$(PYTHON) -m tools.parts trixie
	@touch $@

# Kubernetes' schemas (tests/harness/schemas.py).
$(CACHE)/.schemas: requirements/schemas.txt $(VENV)/.ready
	@rm -rf $(CACHE)/schemas
	$(VENV)/bin/pip download -q --disable-pip-version-check --no-deps --require-hashes \
	  --only-binary :all: --dest $(CACHE)/schemas -r requirements/schemas.txt
	@touch $@

# They mostly wait for the network, and have a directory each or a lock.
$(CACHE)/.parts: $(CACHE)/.programs $(CACHE)/.schemas $(VENV)/.ready $(addprefix tests/harness/,docker.py kubectl.py loaders.py musl.py prometheus.py)
	@pids=(); \
	for part in 'docker bookworm' 'docker trixie' 'kubectl bookworm' 'kubectl trixie' loaders musl prometheus; do \
	  $(VENV)/bin/python -m tests.harness.$$part & pids+=($$!); done; \
	status=0; for pid in "$${pids[@]}"; do wait "$$pid" || status=$$?; done; exit "$$status"
	@touch $@

$(LAUNCHER): $(SITE)/.ready tools/launcher.py $(wildcard shim/forkserver/*.[ch])
	@mkdir -p $(@D)
	$(PYTHON) -m tools.launcher $@ --interpreter $(PYTHON) --compiler gcc \
	  --library '$(CURDIR)' --library '$(CURDIR)/$(SITE)'

# The program that nvshim verify runs in its containers.
$(PROBE): integration/verify/probe.c tools/launcher.py
	@mkdir -p $(@D)
	$(PYTHON) -c 'from tools.launcher import compile_native as c; c("$@", compiler="gcc", sources=["$<"])'
