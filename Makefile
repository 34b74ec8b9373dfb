# The commands of this repository. `make demo` and `make test` need Python 3.11+, make and tmux; each
# makes its own environment in .venv (tools/setup.sh) and says in one line what a machine lacks.

.PHONY: help demo test faults check lock clean
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

help:  ## Show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' Makefile

demo:  ## Run the whole path on this machine, on real text: about two minutes once installed
	@tools/setup.sh train
	@.venv/bin/python -m nsa_ops demo $(ARGS)

# Four processes for two processors: real parts are waited for. By number of tests, the longest files
# (the demo, one test) would come last, on one process alone.
# Its hundreds of processes compile nothing twice: byte code is kept, whatever the caller's environment
# says, and one collection beside the checks, which use one processor, makes it. Found at the same
# moment by every process of pytest, each would compile all of it.
test: export PYTHONDONTWRITEBYTECODE =
test:  ## Run every check and every test that needs no GPU
	@tools/setup.sh dev
	@.venv/bin/python -m pytest --collect-only -qq $(ARGS) </dev/null >/dev/null 2>&1 & \
	  tools/check.sh; checked=$$?; wait; exit $$checked
	@.venv/bin/python -m pytest -rs -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

faults:  ## Plant every fault of tests/faults in a copy and print which ones the tests notice
	@tools/setup.sh dev
	@.venv/bin/python -m tests.faults $(ARGS)

check:  ## Format, lint, types, layers, shell scripts and the image, without the tests
	@tools/setup.sh dev
	@tools/check.sh

lock:  ## Write requirements/*.lock anew from pyproject.toml, keeping the versions that still fit
	@tools/setup.sh dev
	@tools/lock.sh

clean:  ## Remove the environment and every cache; runs and checkpoints stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
