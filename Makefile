# Every target sets up what it needs: a virtual environment in .venv with the project and its dependencies.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
WORKERS ?= 2

.PHONY: demo test lint bench soak gpu-check clean

demo: $(STAMP)
	$(BIN)/swarmnode demo $(ARGS)

# Tests start hundreds of nodes and workers. Where Python may keep nothing that it compiled (PYTHONDONTWRITEBYTECODE),
# each of them would compile all of this anew: twice as long a start.
test: $(STAMP)
	$(BIN)/python -m compileall -q swarmnode sims benchmarks
	$(BIN)/python -m pytest -m "not soak" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.wire
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.attack
	$(BIN)/python -m benchmarks.load_memory
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.batch
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python -m benchmarks.ring_latency --stages 2 --rtt-ms 0
	$(BIN)/python -m benchmarks.ring_latency --stages 2 --rtt-ms 20
	$(BIN)/python -m benchmarks.ring_latency --stages 2 --rtt-ms 60
	$(BIN)/python -m benchmarks.throughput --stages 2 --users 1,2,4,8 --rtt-ms 0,20
	$(BIN)/python -m benchmarks.calibrate
	$(BIN)/python -m benchmarks.prefix
	$(BIN)/python -m benchmarks.prompt
	$(BIN)/python -m benchmarks.mixed

gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=0 $(ARGS)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[peer,fastcpu,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
