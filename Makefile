# Every command of this repository. Each target sets up what it needs; a second run is quick.
.PHONY: install demo test test-all test-uvicorn test-system test-vm check agent bench sim chaos screenshots docs size clean
.DELETE_ON_ERROR:

PYTHON ?= python3
# Tests start many processes; without bytecode each of them compiles the whole package.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SERVER := $(VENV)/.server
UVICORN_OLDEST := 0.22.0
UVICORN_TESTS := tests/e2e/test_metadata_http.py tests/e2e/test_metadata_polls.py tests/unit/web/test_uvicorn.py tests/unit/web/http
LIBVIRT := $(VENV)/.libvirt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
# Other seeds: make sim FIRST=1000 SEEDS=5000
FIRST ?= 50
SEEDS ?= 500
MINUTES ?= 60
# Without its recommended packages Chromium has no font.
CHROMIUM := "chromium=chromium fonts-dejavu-core"

MERMAID := mermaid@11.17.2

install: $(READY)

demo: $(SERVER)
	@exec $(BIN)/forewarn demo

# Needs Python and nothing else: no root, no system packages. The checks run during the tests, because
# neither keeps two cores busy.
test: $(READY)
	@echo "== tests that need only Python (make test-all runs the others too), and make check"
	@$(MAKE) --no-print-directory check > $(VENV)/check.log 2>&1 & checks=$$!; \
		$(BIN)/pytest -m "not system"; tests=$$?; \
		wait $$checks || { cat $(VENV)/check.log; echo "make check failed"; exit 1; }; \
		exit $$tests

# Everything but tests/vm.
test-all: test test-uvicorn test-system

# The tests of the metadata listener with the oldest uvicorn that we allow and with the newest there is; the other tests
# use the version in constraints.txt.
test-uvicorn: $(READY)
	@for version in "==$(UVICORN_OLDEST)" ""; do \
		echo "== metadata tests with uvicorn$${version:-, the newest}"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/uvicorn "uvicorn$$version" \
			> $(VENV)/uvicorn.log 2>&1 || { cat $(VENV)/uvicorn.log; exit 1; }; \
		PYTHONPATH=$(VENV)/uvicorn $(BIN)/pytest $(UVICORN_TESTS) || exit 1; \
	done

# etcd, other languages, HAProxy, Prometheus, OpenSSL, systemd, network namespaces, libvirt, Chromium. As root it
# installs what is missing.
test-system: $(LIBVIRT)
	@sh tools/need.sh curl=curl haproxy=haproxy openssl=openssl systemd-analyze=systemd ip=iproute2 nft=nftables promtool=prometheus \
		etcd=etcd-server etcdctl=etcd-client faketime=faketime $(CHROMIUM) \
		jq=jq ssh=openssh-client node=nodejs go=golang-go mono=mono-runtime \
		"mcs=mono-mcs libmono-system-net-http4.0-cil libmono-system-runtime-serialization4.0-cil"
	@echo "== tests that need system programs"
	@$(BIN)/pytest -m system

test-vm: $(LIBVIRT)
	@sh tools/need.sh libvirtd=libvirt-daemon-system qemu-system-x86_64=qemu-system-x86 qemu-nbd=qemu-utils virsh=libvirt-clients \
		systemd=systemd curl=curl sshd=openssh-server ip=iproute2 nft=nftables iptables=iptables dnsmasq=dnsmasq-base mkfs.ext4=e2fsprogs cpio=cpio lz4=lz4 ps=procps
	@echo "== tests on real virtual machines, on hosts of their own (as root; about eight minutes)"
	@$(BIN)/pytest -n 0 -v -o faulthandler_timeout=1800 tests/vm

check: $(READY)
	@echo "== lint, types, import contracts"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

agent: $(READY)
	@echo "== building the agent as one file"
	@$(BIN)/python tools/make_agent.py

bench: $(READY)
	@sh tools/need.sh nginx=nginx-light wrk=wrk etcd=etcd-server
	@echo "== benchmarks: speed relative to nginx, the cost of the agent, growth up to 1,000,000 VMs (about 15 minutes)"
	@$(BIN)/python -m tests.bench

sim: $(READY)
	@echo "== $(SEEDS) simulations from seed $(FIRST)"
	@$(BIN)/python -m tests.sim --first $(FIRST) --seeds $(SEEDS) 2> $(VENV)/sim.log || { tail -50 $(VENV)/sim.log; exit 1; }

# As root. Another seed is chosen each time; to repeat a run: make chaos MINUTES=10 SEED=7
chaos: $(READY)
	@sh tools/need.sh etcd=etcd-server etcdctl=etcd-client ip=iproute2 nft=nftables faketime=faketime
	@echo "== $(MINUTES) minutes of faults: three etcd members, three servers, a checker"
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# docs/images: the views of the console, light and dark.
screenshots: $(READY)
	@sh tools/need.sh $(CHROMIUM) pngquant=pngquant
	@echo "== taking screenshots of the console"
	@$(BIN)/python -m tools.screenshots
	@pngquant --force --ext .png docs/images/*.png  # few colours: a third of the size

# A site from the same Markdown, in build/docs. Mermaid draws its diagrams in the browser, from the site's own files.
docs: $(READY)
	@sh tools/need.sh npm=npm
	@echo "== building the documentation in build/docs"
	@$(INSTALL) '.[docs]' > $(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log; exit 1; }
	@mkdir -p build/mermaid && npm pack --silent --pack-destination build $(MERMAID) > build/mermaid.name
	@tar -xzf build/$$(cat build/mermaid.name) -C build/mermaid --strip-components=2 --exclude='*.map' \
		package/dist/mermaid.esm.min.mjs package/dist/chunks/mermaid.esm.min
	@$(BIN)/sphinx-build -q -W --keep-going -c docs . build/docs
	@echo '<!doctype html><meta http-equiv="refresh" content="0; url=docs/README.html"><title>Forewarn</title>' > build/docs/index.html

size:
	@$(PYTHON) tools/size.py

# The virtual environment, with exact versions: what the service needs, then the rest. It is updated when these files change.
$(SERVER): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (first time: half a minute)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "forewarn needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { sh tools/need.sh ensurepip=python3-venv && $(PYTHON) -m venv $(VENV); }
	@$(INSTALL) '.[server]' > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $(SERVER)

$(READY): $(SERVER)
	@echo "== adding what the tests need (first time: a minute or two)"
	@$(INSTALL) '.[etcd,test]' > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $(READY)

# libvirt-python is built against the headers of the installed libvirt. Only tests need it here.
$(LIBVIRT): $(READY)
	@sh tools/need.sh gcc=gcc pkg-config=pkg-config
	@pkg-config --exists libvirt || sh tools/need.sh libvirt-headers=libvirt-dev
	@$(BIN)/python -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || sh tools/need.sh python-headers=python3-dev
	@$(INSTALL) '.[libvirt]' > $(VENV)/libvirt.log 2>&1 || { cat $(VENV)/libvirt.log; exit 1; }
	@touch $(LIBVIRT)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
