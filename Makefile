# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which `make` sets up on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export VLLM_CPU_KVCACHE_SPACE ?= 1
# A machine without a hub must not wait for one.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

# A worker a core; the tests of a file share its engines.
SIDE_BY_SIDE := -n auto --maxprocesses 2 --dist loadfile

.PHONY: help setup demo demo-pair demo-study matrix soak test test-all lint seams clean

help:
	@echo "make demo      serve the small pair with and without Domino, and compare"
	@echo "make demo-pair train that pair anew (18 minutes on 2 cores)"
	@echo "make demo-study the same, then train without the curriculum and measure all"
	@echo "make matrix    run every feature in both runners, write docs/support.md"
	@echo "make test      set up and run the tests (about 20 minutes on 2 cores)"
	@echo "make test-all  all of it, an hour: statistics, vLLM 0.33's seams, docs/support.md"
	@echo "make soak      half an hour of random requests in both runners"
	@echo "make lint      ruff and mypy"
	@echo "make seams     check the table of seams against vLLM 0.33's source"

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[cpu,train,bench,dev]'
	$(BIN)/vllm-domino mend
	@touch $@

demo: $(READY)
	$(BIN)/vllm-domino demo pairs/demo/target \
	  --speculative-config configs/demo.json --prompts pairs/demo/prompts.json \
	  --dtype float32 --max-model-len 1024 --enforce-eager

demo-pair: $(READY)
	$(BIN)/python pairs/make_demo_pair.py pairs/demo

demo-study: $(READY)
	$(BIN)/python pairs/make_demo_pair.py pairs/demo --study docs/demo-pair

test: $(READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

VLLM_NEXT := 0.33.0
NEXT := .cache/vllm-$(VLLM_NEXT)

$(NEXT)/vllm/__init__.py: | $(READY)
	mkdir -p $(NEXT)
	$(BIN)/pip download -q --no-deps -d $(NEXT) vllm==$(VLLM_NEXT)
	cd $(NEXT) && $(CURDIR)/$(BIN)/python -m zipfile -e vllm-*.whl . && rm vllm-*.whl

seams: $(NEXT)/vllm/__init__.py
	$(BIN)/python -m pytest tests/test_seams.py --vllm-source=$(NEXT)/vllm

test-all: $(NEXT)/vllm/__init__.py
	rm -f docs/support.md
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -v -rP --durations=20 --vllm-source=$(NEXT)/vllm \
	  --support-report=docs/support.md tests > .cache/test-all.log; status=$$?; tail -n 3 .cache/test-all.log; exit $$status

matrix: $(READY)
	rm -f docs/support.md
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m support \
	  --support-report=docs/support.md tests

# Thirty minutes, both runners side by side; SOAK_MINUTES=5 for less.
SOAK_MINUTES := 30
SOAK := $(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

soak: $(READY)
	VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 PYTHONPATH=tests/interpreter \
	  VLLM_CPU_OMP_THREADS_BIND=1 OMP_NUM_THREADS=1 \
	  $(SOAK) --report .cache/soak-v2.json > .cache/soak-v2.log 2>&1 & v2=$$!; \
	VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=0 OMP_NUM_THREADS=1 \
	  $(SOAK) --report .cache/soak-v1.json \
	  --method probabilistic > .cache/soak-v1.log 2>&1; v1=$$?; \
	wait $$v2; v2=$$?; tail -qn 1 .cache/soak-v1.log .cache/soak-v2.log; \
	exit $$((v1 + v2))

clean:
	rm -rf $(VENV) .cache build *.egg-info
