# The whole developer contract: `make demo`, `make test`, `make lint`. `make help` lists the rest.
#
#   VENV    where the virtual environment lives; `make demo VENV=` uses the interpreter that is there and installs nothing
#   PYTHON  the interpreter (default: the first python3 on the path that is new enough)
#   ARGS    passed on to the command, for example: make demo ARGS="--steps 20 --ranks 1"
#   CONFIG  the config of the demo: a file, or the name of one in configs/
#   PART    of `make gpu`: 1, 2 or 3, else all in turn; FRESH=1 runs again what is done
#   ALL     `make test` runs the quick tests, `make test ALL=1` every test function, with a spread of its cases where these
#           are long, `make test EVERY=1` every case (tests/support/tiers.py says which are which)

VENV   ?= .venv
CONFIG ?= demo
ARGS   ?=
NEWER   = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(NEWER)' 2>/dev/null && { echo $$p; break; }; done)
PY      = $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
STAMP   = $(VENV)/.installed-from

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench gpu docs clean setup

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make demo ARGS="--steps 20"   passes options on; make demo VENV= uses the interpreter that is there'

demo: setup  ## train a Hugging Face model on real text, on all GPUs or on 2 CPU processes
	$(PY) -m shardengine train --config $(CONFIG) $(ARGS)

# Three at once on two cores: most tests wait for something, or keep one core busy. A file's tests stay together, for
# what they share. ARGS chooses among all tests, in one process.
WORKERS ?= 3
TOGETHER = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: setup  ## the promises; ALL=1: every test, lint and types included; EVERY=1: every case
ifeq ($(strip $(ARGS)),)
	$(PY) -m pytest $(TOGETHER) $(if $(EVERY),,-m $(if $(ALL),thorough,quick)) $(if $(RECORD),--record-durations)
else
	$(PY) -m pytest $(ARGS)
endif

lint: setup  ## ruff and mypy alone
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: setup  ## step time against DDP, ZeRO-1 and FSDP2 of torch, and DeepSpeed if installed (20 minutes; wants an idle machine)
	$(PY) -m benchmarks.step $(ARGS)

gpu: setup  ## what one GPU can tell: PART=1, 2 and 3, each in less than 10 minutes
	$(PY) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(if $(FRESH),--fresh) $(ARGS)

docs: setup  ## build the site of docs/ into build/site; broken links are errors
ifeq ($(VENV),)
	@$(PY) -c 'import mkdocs, mkdocstrings_handlers.python' 2>/dev/null || { \
		echo "the site needs the extra docs: $(PY) -m pip install -c constraints.txt '.[docs]'" >&2; exit 2; }
endif
	$(PY) -m mkdocs build --strict $(ARGS)
	@echo "open build/site/index.html"

clean:  ## remove caches and builds; .venv and what runs wrote stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find shardengine tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is touched only when what it was made from has other *contents*: a fresh checkout changes times, not text.
# EXTRAS of pyproject.toml are installed: `make demo` alone installs few packages. A stamp says that this is done.
ifeq ($(MAKECMDGOALS),demo)
EXTRAS = lora,plot,fast
STAMPS = $(STAMP) $(STAMP)-demo
else
EXTRAS = test
STAMPS = $(STAMP)
endif
setup:  ## make or update .venv (the other targets do this by themselves)
ifeq ($(PYTHON),)
	@echo "shardengine needs Python >= 3.11 and found none on the path; say which one with PYTHON=..." >&2; exit 2
else ifeq ($(VENV),)
	@$(PYTHON) -c '$(NEWER)' || { echo "shardengine needs Python >= 3.11; say which one with PYTHON=..." >&2; exit 2; }
else
	@for stamp in $(STAMPS); do \
		if cat constraints.txt pyproject.toml | cmp -s - $$stamp && [ -x $(PY) ]; then exit 0; fi; \
	done; set -e; \
	if ! [ -x $(PY) ]; then \
		had=$$([ -e $(VENV) ] && echo yes || echo no); \
		if ! $(PYTHON) -m venv $(VENV); then \
			[ $$had = yes ] || rm -rf $(VENV); \
			v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
			echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu install the package python$$v-venv (or python3-venv):" >&2; \
			echo "    sudo apt-get install python$$v-venv" >&2; \
			echo "or use the interpreter and packages that are there: make $(MAKECMDGOALS) VENV=" >&2; \
			exit 2; \
		fi; \
	fi; \
	echo "installing into $(VENV) (once; repeated when constraints.txt or pyproject.toml change)"; \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch; \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'; \
	cat constraints.txt pyproject.toml > $(lastword $(STAMPS))
endif
