# mlxr. `make help` lists the targets. Each one does its own set-up in .venv and is quick the second time.

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
CLIENTS := .venv-clients
AGENTS := .venv-agents
# Sources are compiled once, whatever the environment says: tests start commands and servers hundreds of times.
export PYTHONDONTWRITEBYTECODE :=
DEMAND ?=
THOROUGH ?=
TEST_PAGE := $(BIN)/python -m pytest -n 2 --dist worksteal -rs $(THOROUGH) tests/page
TEST_CLIENTS := $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients -W ignore
SANITIZED := build/sanitized
COUNTS_THREADS := tests/kernels/test_runtime.py::test_threads_end_with_their_runtime  # the sanitizer has one, too
RACES := test_sanitized.py test_runtime.py test_grammar_matcher.py test_arrays.py test_linear.py test_attend.py \
	test_mixers.py test_moe.py test_run_layers.py test_write_pages.py
FILES ?= 3000
# Frames that are kept for uses after a return are not aligned for vectors of 64 bytes (GCC's bug 110027).
ASAN_OPTIONS := detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0
ARM := build/arm
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_FLAGS := -std=c++20 -O1 -Wall -Wextra -Wno-unknown-pragmas -ffp-contract=off -fno-math-errno -DMLXR_ARM=1 -Icsrc -Isrc/mlxr
PIP_INSTALL := bin/pip install -q --disable-pip-version-check
BUILD = $(PIP_INSTALL) --no-build-isolation --no-deps --config-settings cmake.define.MLXR_TIERS=$(1) -e .
# What `make run` builds at first. Others build kernels for all processors, and so does it once these are there.
TIERS = $(if $(filter-out run,$(MAKECMDGOALS))$(wildcard $(VENV)/.tiers),all,native)
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.26" "ninja>=1.11"
EXTRA := import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)
PROMPT ?= What does os.path.join do?
BENCH ?= --quick
REF ?=
GATE ?=
CHECKED := src tests tools bench lab examples
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run tiers test quick lint format bench bench-gate page check-page docs wheel test-clients test-page test-gpu sanitize test-real test-peers test-wheel test-agents test-arm test-digests clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

run: $(VENV)/.installed ## build for this machine, then ask the demo model a question (PROMPT="...")
	@$(BIN)/mlxr run demo "$(PROMPT)"
	@echo "\`. $(BIN)/activate\` makes the command mlxr known to this terminal" >&2

tiers: $(VENV)/.tiers ## build the kernels of all processors, not of this machine's alone (the tests do, too)

test: $(VENV)/.dev $(if $(THOROUGH),$(CLIENTS)/.installed) ## the tests of every day (THOROUGH=--thorough: all that need no peer engine)
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(THOROUGH)
	@$(TEST_PAGE) $(DEMAND)
	@$(if $(THOROUGH),$(TEST_CLIENTS) tests/clients)

quick: $(VENV)/.dev ## lint, the tests of what is changed and some of the others
	@$(BIN)/ruff check -q $(CHECKED)
	@$(BIN)/python -m pytest -n 2 --dist worksteal --quick

lint: $(VENV)/.dev ## ruff, ruff format, mypy --strict, clang-format
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/mypy
	@find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.dev ## let ruff and clang-format rewrite the sources, and write what is made of the settings table
	@$(BIN)/python tools/write_keywords.py
	@$(BIN)/python tools/write_tables.py
	@$(BIN)/python tools/write_families.py
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)
	@find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' | xargs $(BIN)/clang-format -i

page: web/node_modules/.installed ## build the page for browsers from web/ (needs Node 20 or newer)
	@npm --prefix web run --silent build

check-page: web/node_modules/.installed ## lint, types and unit tests of web/ (needs Node 20 or newer)
	@npm --prefix web run --silent check
	@npm --prefix web run --silent test

docs: $(VENV)/.dev ## build the documentation as a site in build/site; what leads nowhere is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: $(VENV)/.installed ## build the wheel for this machine into dist/
	@mkdir -p dist && $(BIN)/python -m pip wheel -q --no-deps --disable-pip-version-check -w dist . && ls dist/*.whl

test-clients: $(VENV)/.dev $(CLIENTS)/.installed ## clients of OpenAI, Anthropic, Ollama, and frameworks over them, against a server
	@$(TEST_CLIENTS) tests/clients

test-page: $(VENV)/.dev ## the page in a real Chromium, which must be there (PAGE_BROWSER=firefox: in Firefox)
	@$(TEST_PAGE) --thorough --demand-browser

bench: $(VENV)/.installed ## measure against llama.cpp, if test-peers installed it, and the machine (BENCH=... for other cases)
	@test -x $(PEERS)/bin/python || echo "llama.cpp is not installed, so mlxr is measured alone; make test-peers installs it" >&2
	@$(BIN)/python bench/compare.py $(if $(wildcard $(PEERS)/bin/python),--peer-python $(PEERS)/bin/python) $(BENCH)

bench-gate: $(VENV)/.dev ## fail when decode or prefill is over 5 % slower than the last tag's (REF=COMMIT for another)
	@$(BIN)/python bench/gate.py $(if $(REF),--ref $(REF)) $(GATE)

test-agents: $(VENV)/.installed $(AGENTS)/.installed ## coding agents, the AI SDK and suites of others against a server (needs npm for the first two)
	@$(AGENTS)/bin/python -m pytest --confcutdir=tests/foreign -W ignore -rs -o asyncio_mode=auto \
		-o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session tests/foreign

test-gpu: $(VENV)/.dev ## kernels, models and the engine on this machine's GPU (needs mlx with Metal or CUDA; GPUS=2: several as one, too)
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --thorough $(if $(GPUS),--gpus $(GPUS)) tests/gpu tests/cli/test_mlx_folder.py

sanitize: $(VENV)/.dev ## csrc under sanitizers: addresses and undefined behaviour with files that lie, then races (needs g++; FILES=3000)
	@$(call build_sanitized,address,address$(COMMA)undefined)
	@LD_PRELOAD="$(call find_libraries,asan)" PYTHONMALLOC=malloc SANITIZED=address \
		ASAN_OPTIONS=$(ASAN_OPTIONS) UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONPATH=tests/shared $(BIN)/python -m pytest -p sanitized_native -n 2 --dist worksteal -o timeout=3000 \
		--thorough --mutated-files $(FILES) tests/kernels tests/models/test_mutated_models.py
	@$(call build_sanitized,thread,thread)
	@$(FIXED_ADDRESSES) env LD_PRELOAD="$(call find_libraries,tsan)" SANITIZED=thread \
		TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:die_after_fork=0:exitcode=66 \
		PYTHONPATH=tests/shared $(BIN)/python -m pytest -p sanitized_native -n 2 --dist worksteal -o timeout=3000 \
		$(addprefix tests/kernels/,$(RACES)) --deselect $(COUNTS_THREADS)

test-digests: $(VENV)/.dev ## the kernels' bits are those of tests/kernels/digests.txt, on all tiers of this machine
	@$(BIN)/cmake --build build/cp3* --target digests >$(VENV)/digests.log || { cat $(VENV)/digests.log; exit 1; }
	@build/cp3*/digests tests/kernels/digests.txt

test-arm: test-digests ## the same on Arm, under QEMU (needs apt install g++-aarch64-linux-gnu qemu-user)
	@mkdir -p $(ARM) && printf 'TIER(portable)\nTIER(neon)\n#undef TIER\n#undef LEFT_OUT\n' >$(ARM)/tiers.def
	@for tier in portable neon; do for part in linear/kernels linear/kernels_spans linear/kernels_grids operators/operators; do \
		$(ARM_CXX) $(ARM_FLAGS) $$(test $$tier = portable || echo -march=armv8.2-a+dotprod) -DMLXR_TIER=$$tier -DMLXR_TIER_$$tier=1 \
			-c csrc/$$part.cpp -o $(ARM)/$$tier-$$(basename $$part).o || exit 1; done; done
	@$(ARM_CXX) $(ARM_FLAGS) -I$(ARM) -static tests/kernels/digests.cpp csrc/runtime/kernel_table.cpp csrc/runtime/cpu_features.cpp \
		csrc/operators/operator_table.cpp csrc/quants/quants.cpp csrc/linear/repack.cpp $(ARM)/*.o -o $(ARM)/digests
	@for cpu in max cortex-a76 cortex-a57; do qemu-aarch64 -cpu $$cpu $(ARM)/digests tests/kernels/digests.txt || exit 1; done

# The module with gcc's sanitizers $(2), in the folder $(1). CPython itself is not built with them, so its own accesses
# are neither checked nor reported. Where addresses are too random, the thread sanitizer finds no place for its shadow.
FIXED_ADDRESSES := $(shell command -v setarch >/dev/null && setarch -R true 2>/dev/null && echo setarch -R)
COMMA := ,
find_libraries = $$(g++ -print-file-name=lib$(1).so) $$(g++ -print-file-name=libstdc++.so)
define build_sanitized
mkdir -p $(SANITIZED) && $(BIN)/cmake -S . -B $(SANITIZED)/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	-DCMAKE_CXX_COMPILER=g++ -DMLXR_SANITIZE=$(2) -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	-Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" >$(SANITIZED)/$(1).log 2>&1 \
	|| { cat $(SANITIZED)/$(1).log; exit 1; }; \
	$(BIN)/cmake --build $(SANITIZED)/$(1)
endef

test-real: $(VENV)/.dev $(CLIENTS)/.installed ## answers of real models (MLXR_REAL_MODELS=folder with the GGUF files that tests/real_models names)
	@$(BIN)/python -m pytest -rs tests/real_models
	@$(TEST_CLIENTS) -rs --real tests/clients

test-peers: $(PEERS)/.installed ## compare with llama.cpp and transformers (installs both, takes a while; MLXR_REAL_MODELS as for test-real)
	@$(PEERS)/bin/python -m pytest -rs tests/peers
	@$(PEERS)/bin/python tests/peers/llamacpp_server/run.py

test-wheel: $(VENV)/.dev $(CLIENTS)/.installed ## build the sdist and the wheel, and use the wheel alone in a clean environment
	@$(BIN)/python -m pytest -o timeout=1500 tests/wheel

clean: ## remove everything that was built
	rm -rf $(VENV) $(PEERS) $(CLIENTS) $(AGENTS) build dist web/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CHECKED) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python $(PEERS)/bin/python $(CLIENTS)/bin/python $(AGENTS)/bin/python:
	@test -n "$(PYTHON)" || { echo "mlxr needs Python 3.11 or newer with venv: install python3 and python3-venv (3.11+), then run make again." >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null 2>&1 || { echo "mlxr needs a C++20 compiler: install g++ or clang++ (Debian: apt install g++; macOS: xcode-select --install), then run make again." >&2; exit 1; }
	@$(PYTHON) -c 'import sys, sysconfig, pathlib; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || { echo "mlxr needs the C headers of $(PYTHON): install python3-dev (Debian, Ubuntu) or python3-devel (Fedora), then run make again." >&2; exit 1; }
	@$(PYTHON) -m venv $(@D)/..

$(VENV)/.installed $(PEERS)/.installed: %/.installed: %/bin/python $(SOURCES)
	@echo "building mlxr in $* ($(if $(filter native,$(TIERS)),for this machine: two to three,about four) minutes on two cores) ..."
	@$*/$(PIP_INSTALL) $(BUILD_TOOLS)
	@$*/bin/python -c '$(NEEDS)' >$*/needs.txt && $*/bin/python -c '$(EXTRA)' images >>$*/needs.txt
	@$*/$(PIP_INSTALL) -r $*/needs.txt & needs=$$!; $*/$(call BUILD,$(TIERS)) \
		|| { kill $$needs; exit 1; }; wait $$needs  # pip downloads while the compiler works
	@$*/bin/python -m compileall -q src/mlxr  # as pip does with what it copies; otherwise the first start does, if it may
	@if [ "$*" = "$(PEERS)" ]; then echo "installing the peers (llama.cpp is compiled: some minutes) ..." && \
		$*/bin/python -c '$(EXTRA)' dev >$*/extra.txt && $*/bin/python -c '$(EXTRA)' peers >>$*/extra.txt && $*/$(PIP_INSTALL) -r $*/extra.txt; fi
	@echo $(TIERS) >$@

# Where `make run` left kernels out, what is missing is compiled into the same folder.
$(VENV)/.tiers: $(VENV)/.installed
	@! grep -q native $< || { echo "building the kernels of other processors ..." && $(VENV)/$(call BUILD,all); }
	@touch $@

$(VENV)/.dev: $(VENV)/.tiers
	@echo "installing the test tools ..."
	@$(BIN)/python -c '$(EXTRA)' dev >$(VENV)/extra.txt && $(VENV)/$(PIP_INSTALL) -r $(VENV)/extra.txt
	@$(BIN)/python -c 'import mlx.core' 2>/dev/null || { $(BIN)/python -c '$(EXTRA)' mlx-cpu >$(VENV)/extra.txt && \
		$(VENV)/$(PIP_INSTALL) -r $(VENV)/extra.txt; } || echo "without mlx the tests of the GPU kernels are skipped" >&2
	@touch $@

web/node_modules/.installed: web/package-lock.json
	@command -v npm >/dev/null 2>&1 || { echo "the page is built with Node: install Node 20 or newer with npm (Debian: apt install npm), then run make again." >&2; exit 1; }
	@echo "installing what the page is built with ..."
	@npm --prefix web ci --no-audit --no-fund --loglevel=error
	@touch $@

# Client libraries live apart: what they pin is not what an installation of mlxr gets.
$(CLIENTS)/.installed: $(CLIENTS)/bin/python pyproject.toml
	@echo "installing the client libraries (a minute or two) ..."
	@$(CLIENTS)/bin/python -c '$(EXTRA)' clients >$(CLIENTS)/extra.txt && $(CLIENTS)/$(PIP_INSTALL) -r $(CLIENTS)/extra.txt
	@touch $@

# Each agent is installed by itself, so that one which the registry lacks leaves the others.
$(AGENTS)/.installed: $(AGENTS)/bin/python pyproject.toml tests/foreign/agents.txt
	@echo "installing agents and suites of others (some minutes, two gigabytes) ..."
	@$(AGENTS)/bin/python -c '$(EXTRA)' agents >$(AGENTS)/extra.txt && $(AGENTS)/$(PIP_INSTALL) -r $(AGENTS)/extra.txt
	@command -v npm >/dev/null 2>&1 || echo "npm is not installed: agents and the AI SDK are skipped" >&2
	@command -v npm >/dev/null 2>&1 && grep -v '^#' tests/foreign/agents.txt | while read -r agent; do \
		npm --prefix $(AGENTS) install --no-audit --no-fund --loglevel=error $$agent || echo "$$agent is skipped" >&2; done || true
	@touch $@
