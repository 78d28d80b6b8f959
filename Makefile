# make demo   set up, train the small models and print Table 4 (15 to 20 minutes on 2 cores)
# make test   set up, run every test
# make test-aot   compile the kernels for TPUs and GPUs that are not here (Linux x86-64; installs 1.8 GB in .venv-aot)
# make test-slurm   run sweeps on a Slurm cluster of this one machine (Debian or Ubuntu; root, to install Slurm and munge)
# make test-browser   open the reports in a headless Chromium, on a desktop and on a phone (Debian; root, to install it)
# make lint   ruff and mypy        make clean   remove the environment and caches, keep runs/

# The first interpreter that really runs and is new enough; `make PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for p in python3.12 python3.13 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin

.PHONY: demo test test-aot test-slurm test-browser lint clean
demo: .venv/installed
	$(BIN)/python -m experiments.table4 --scale demo

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Elsewhere there are no such compilers, and this says so and passes.
test-aot:
	@if test "$$(uname -sm)" != "Linux x86_64" || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
		echo "test-aot: nothing to do, the TPU and GPU compilers need Linux on x86-64 and Python 3.12"; \
	else $(MAKE) .venv-aot/installed && .venv-aot/bin/python -m pytest -n 2 --dist worksteal tests/aot; fi

test-slurm: .venv/installed
	@for tool in munged slurmctld slurmd sbatch; do PATH="$$PATH:/usr/sbin" command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	test -z "$$missing" || if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends slurm-wlm munge; \
	else echo "test-slurm:$$missing missing: install slurm-wlm and munge, or run this as root where apt-get is"; exit 1; fi
	$(BIN)/python -m pytest -n 0 tests/slurm

test-browser: .venv/installed
	@command -v chromium >/dev/null || if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium; \
	else echo "test-browser: chromium missing: install it, or run this as root where apt-get is"; exit 1; fi
	$(BIN)/python -m pytest -n 0 tests/browser

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "gattn needs Python 3.11 or newer: install it, or make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -r requirements.txt
	touch $@

.venv-aot/installed: requirements-aot.txt
	test -x .venv-aot/bin/python || $(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --upgrade-strategy only-if-needed -r requirements-aot.txt
	touch $@

clean:
	rm -rf .venv .venv-aot cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
