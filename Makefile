# Everything a person or CI runs. Only Python 3.11+ (with venv), git and make are needed to begin.
#
#   make demo    set up .venv, fetch the small model once, run the demo, write out/demo.{json,html}
#   make test    lint, types, import contracts, then all tests
#   make check   lint, types and import contracts only
#   make fuzz    the property tests for a long time
#   make bench   the benchmarks; each prints JSON, kept in out/bench/
#   make clean   remove what these made
#
# A stamp in .venv is named after what was installed, so a second run starts at once and a change of
# pyproject.toml or requirements/ installs again.

PYTHON ?= python3
ARGS ?=
TESTS ?=
# VLLM=no: do not install vLLM (250 MB to fetch, 1.5 GB on disk); its tests are skipped, with a reason
VLLM ?= yes

VENV := .venv
BIN := $(VENV)/bin
INSTALLED_FROM := pyproject.toml requirements/demo.txt requirements/dev.txt requirements/vllm.txt
KEY := $(shell { $(PYTHON) -V 2>&1; cat $(INSTALLED_FROM); } | cksum | tr -d ' ')
DEMO_STAMP := $(VENV)/.demo-$(KEY)
DEV_STAMP := $(VENV)/.dev-$(KEY)
VLLM_STAMP := $(VENV)/.vllm-$(KEY)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# everything that vLLM pins too is taken in vLLM's version from the start
PIP_FITTING := $(PIP) --constraint requirements/vllm.txt

# a half-done install leaves no stamp, and a failed recipe stops the run
.DELETE_ON_ERROR:
.PHONY: demo test check format fuzz bench clean python

demo: $(DEMO_STAMP)
	$(BIN)/kvdepot demo $(ARGS)

test: check $(if $(filter no,$(VLLM)),,$(VLLM_STAMP))
	$(BIN)/python -m pytest --hypothesis-profile=ci $(ARGS) $(TESTS)

check: $(DEV_STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

fuzz: $(DEV_STAMP)
	$(BIN)/python -m pytest --hypothesis-profile=fuzz -m hypothesis --timeout=0 \
	    -o faulthandler_timeout=0 $(ARGS) $(TESTS)

bench: $(VLLM_STAMP)
	mkdir -p out/bench
	set -e; for script in $$(grep -l __main__ benchmarks/*.py); do \
	    name=$$(basename $$script .py); echo "$$name -> out/bench/$$name.json" >&2; \
	    $(BIN)/python $$script $(ARGS) > out/bench/$$name.json; \
	done

clean:
	rm -rf $(VENV) out dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "error: kvdepot needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) -V 2>&1 || echo missing)" >&2; \
	    echo "hint: name a newer one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "error: '$(PYTHON)' has no venv module" >&2; \
	    echo "hint: install it; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(DEMO_STAMP): | python
	@echo "setting up $(VENV) for the demo (once; torch is 200 MB)" >&2
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP_FITTING) --editable . --requirement requirements/demo.txt
	@touch $@

$(DEV_STAMP): $(DEMO_STAMP)
	@echo "adding the test tools to $(VENV)" >&2
	$(PIP_FITTING) --requirement requirements/dev.txt
	@touch $@

# no resolver: it would draw in libraries that do not fit, and take minutes to find that out
$(VLLM_STAMP): $(DEV_STAMP)
	@echo "adding vLLM's CPU build to $(VENV) (once)" >&2
	$(PIP) --no-deps --requirement requirements/vllm.txt
	@touch $@
