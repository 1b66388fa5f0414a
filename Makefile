# Everything works in a fresh clone: .venv, packages and the model are made when they are missing.
#   PYTHON=python3.12        the Python of .venv (default: the first of 3.11, 3.12, 3.13)
#   TORCH_INDEX=URL          one more package index, for machines whose default torch is not the build you want
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run up test test-all chaos fuzz check format bench bench-peers bootstrap model clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' Makefile | expand -t 20

run: model ## run a batch of real prompts through the whole system, then stop it (ARGS="--requests 16")
	@$(PY) -m bench.demo $(ARGS)

up: model ## start Redis, store, API and a worker; leave them running until Ctrl-C
	@$(PY) -m jobs.cli up --model "SmolLM2-135M-Instruct=$$($(PY) -m worker.engine.smollm2)" $(ARGS)

# Hundreds of processes would each compile the same modules anew.
test test-all chaos: export PYTHONDONTWRITEBYTECODE =

test: model ## the everyday tests, on real servers (ARGS="-k ledger")
ifeq ($(ARGS),)
	@infra/chromium
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q -m "not long" tests/unit
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 3 -q -m "not long" --dist loadfile tests/integration tests/fuzz
	@$(PY) -m pytest -n 2 -q -m "not long" tests/chaos
else
	@$(PY) -m pytest -m "not long" $(ARGS)
endif

test-all: model ## also the long tier: chaos rounds, fuzzing, 50,000 lines
	@$(PY) -m pytest $(ARGS)

ROUNDS ?= 5
REPORT := .longhaul/chaos.jsonl

chaos: model ## what breaks, at random moments, ROUNDS=5 times each; then the table of docs/faults.md
	@mkdir -p $(dir $(REPORT)); rm -f $(REPORT)
	@LONGHAUL_CHAOS_ROUNDS=$(ROUNDS) LONGHAUL_CHAOS_REPORT=$(abspath $(REPORT)) \
		$(PY) -m pytest -n 2 -q tests/chaos --ignore=tests/chaos/test_every_step.py $(ARGS)
	@$(PY) -m tests.chaos.table $(REPORT)

fuzz: bootstrap ## a million inputs to what reads lines, bodies, creations, chats and schemas (ARGS="--seed 2")
	@$(PY) -m tests.fuzz $(ARGS)

check: bootstrap ## ruff, format, mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: bootstrap ## let ruff put the format right
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: model ## the system's own cost: lines per second and peak memory with an engine that echoes
	@$(PY) -m bench.system --json $(ARGS)

bench-peers: bootstrap ## install the engines that ours is measured beside (ARGS=vllm for one)
	@$(PY) -m bench.peers.build $(ARGS)

bootstrap: ## make or repair .venv
	@infra/bootstrap

model: bootstrap ## put SmolLM2-135M-Instruct into the cache
	@$(PY) -m worker.engine.smollm2 >/dev/null

clean: ## forget what `make run` and `make up` stored; keep .venv and the model
	rm -rf .longhaul
