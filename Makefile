## kvcert: error certificates for KV-cache eviction, and the pre-registered study of them
##
##   make claim-N        N = 1..7: plan, run the missing cells, judge, print the verdict
##   make extension-N    N = 1..6: likewise
##   make judge-N        judge only, from stored rows; also judge-claim-N, judge-extension-N
##   make judge-all      all of them
##   make figures        every figure, table and number of the paper, into paper/figures, paper/tables, paper/numbers
##   make paper          the same, and paper/build/main.pdf where LaTeX is
##   make claims         every claim and extension, and where it stands by the last judging
##   make status         cells done, missing, failed and time left, per claim
##   make plan           what a run would cost
##   make slurm-claim-N  submit what is missing as a Slurm job array (docs/cluster.md); also slurm-extension-N
##   make slurm-all      every claim and extension, likewise in one array
##   make slurm-status   the submitted runs: units done, running, pending, failed and why, time left
##   make retry-failed   the failed examples once more: of all stored plans, or of those of PROFILE=, MODEL=, ...
##   make explain        where one row comes from: make explain CELL=id
##   make gc             remove rows of designs that are no longer registered
##   make report         one HTML page of everything, analysis/out/report.html, which needs no network
##   make demo           a conversation in the terminal: certificates, the gate, and what the full cache says
##   make readme         write README's verdict table from analysis/published
##   make verify         check prereg/ against its LOCK
##   make freeze         write a new LOCK, while no registered rows exist
##   make setup          .venv and everything in it; every other command does it when needed
##   make bench          what certificates, arms and the replay cost, as ratios; minutes, analysis/out/bench.json
##   make gpu-check      the tests that need a GPU; one line and exit 2 where there is none
##   make gpu-bench      the GPU kernel at the shapes of Llama 3.1 8B, minutes; likewise
##   make test           the whole test suite
##   make test-matrix    the tests of cert.hf with the newest and the oldest transformers that pyproject.toml allows
##   make check          lint, format, types, import floors
##   make help           this page
##
## Settings, as in `make claim-1 PROFILE=smoke`; the same names work in the environment:
##   PROFILE=smoke|laptop|desktop|paper   MODEL=file.gguf, folder or hub-id@revision   DATA=folder with LongBench .jsonl
##   MODELS="several of them" for extension-4   DATA=LoCoMo's .json file for extension-3
##   STORE=folder for the rows   WORKERS=processes   CTX=tokens   ARGS="hydra overrides"
##   LAUNCHER=file of configs/launcher   DRY_RUN=1 shows what would be submitted
##   for the first setup: PYTHON=path of a Python 3.11   TORCH_INDEX=package index with another torch build
##
## Through make every failure exits with 2; `.venv/bin/python -m scripts.claim claim-1` tells 1 (some cells failed)
## from 2 (bad input).

.DEFAULT_GOAL := help
# One target after another, whatever -j says: claims share rows, and WORKERS= is the parallelism.
.NOTPARALLEL:

# What a user types is never expanded by make nor read by a shell: recipes do not mention it, Python reads the environment.
SETTINGS := PROFILE MODEL MODELS DATA STORE WORKERS CTX ARGS CELL LAUNCHER DRY_RUN TORCH_INDEX PYTHON
$(foreach name,$(SETTINGS),$(if $(filter-out undefined,$(origin $(name))),\
    $(eval override $(name) := $$(value $(name)))$(eval export $(name))))
typed := $(strip $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
$(if $(typed),$(error $(firstword $(typed)): no such setting; there are $(SETTINGS)))

CLAIMS := $(foreach n,1 2 3 4 5 6 7,claim-$n)
EXTENSIONS := $(foreach n,1 2 3 4 5 6,extension-$n)
SLURM := $(CLAIMS:%=slurm-%) $(EXTENSIONS:%=slurm-%) slurm-all
JUDGE_CLAIMS := $(CLAIMS:claim-%=judge-%)
JUDGE_WHOLE := $(CLAIMS:%=judge-%) $(EXTENSIONS:%=judge-%)
COMMANDS := claims status plan explain gc readme verify freeze figures paper report demo bench
.PHONY: judge-all help setup test test-matrix check retry-failed $(CLAIMS) $(EXTENSIONS) $(JUDGE_CLAIMS) $(JUDGE_WHOLE) $(COMMANDS)
.PHONY: $(SLURM) slurm-status gpu-bench gpu-check

# Refused here, before anything runs; $(error) shows the name without a shell seeing it.
unknown := $(firstword $(filter-out judge-all slurm-status $(SLURM) $(CLAIMS) $(EXTENSIONS) $(JUDGE_CLAIMS) $(JUDGE_WHOLE),\
    $(filter claim-% extension-% judge-% slurm-%,$(MAKECMDGOALS))))
$(if $(unknown),$(error $(unknown): no such claim; there are claim-1 to claim-7 and extension-1 to extension-6))

PY := .venv/bin/python
# One thread a process: two were 4 to 16 times slower on a busy two-core machine.
export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONHASHSEED := 0
export HF_HUB_DISABLE_TELEMETRY := 1

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

$(CLAIMS) $(EXTENSIONS): .venv/ready
	@$(PY) -m scripts.claim $@

$(JUDGE_CLAIMS): judge-%: .venv/ready
	@$(PY) -m scripts.judge claim-$*

$(JUDGE_WHOLE): judge-%: .venv/ready
	@$(PY) -m scripts.judge $*

judge-all: .venv/ready
	@$(PY) -m scripts.judge_all

$(COMMANDS): .venv/ready
	@$(PY) -m scripts.$@

$(SLURM): slurm-%: .venv/ready
	@$(PY) -m scripts.slurm $*

slurm-status: .venv/ready
	@$(PY) -m scripts.slurm_status

retry-failed: .venv/ready
	@$(PY) -m scripts.retry_failed

# Two processes: what two cores and 4 GB hold, and half the time. In the order of the files: many small tests come last.
test: .venv/ready
	@$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

gpu-check gpu-bench: gpu-%: .venv/ready
	@$(PY) -m scripts.gpu $*

test-matrix: .venv-matrix/ready
	$(PY) -m pytest -q tests/cert/hf
	.venv-matrix/bin/python -m pytest -q tests/cert/hf

# Sees everything in .venv (torch above all) except what it has in another version.
.venv-matrix/ready: .venv/ready requirements.oldest
	@$(PY) -m venv --clear --without-pip .venv-matrix
	@echo ../../../../.venv/lib/python3.11/site-packages > .venv-matrix/lib/python3.11/site-packages/base.pth
	@$(PY) -m pip --python .venv-matrix/bin/python install -q --progress-bar off --ignore-installed --no-deps -r requirements.oldest
	@touch $@

check: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports

setup: .venv/ready
	@echo "setup: .venv is ready"

# The stamp comes last, so a setup that was interrupted goes on when make is called again.
.venv/ready: requirements.lock
	@log=.venv/setup.log; \
	fail() { printf 'error: %s\n' "$$1" >&2; exit 2; }; \
	version() { "$$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none; }; \
	logged() { "$$@" >>$$log 2>&1 || { tail -n 15 $$log >&2; fail "setup stopped; all of its output is in $$log; make setup goes on from here"; }; }; \
	if [ -n "$${PYTHON:-}" ]; then python=$$PYTHON; \
	    [ "$$(version "$$python")" = 3.11 ] || fail "PYTHON=$$python: not a Python 3.11 (its version: $$(version "$$python")); the tested set is for 3.11"; \
	else for python in python3.11 python3 python none; do [ "$$(version $$python)" != 3.11 ] || break; done; \
	    [ $$python != none ] || fail "no Python 3.11 found; install it, or name one: make setup PYTHON=/path/to/python3.11"; \
	fi; \
	if [ "$$(version .venv/bin/python)" != 3.11 ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then \
	    echo "setup 1/3: .venv, with $$python"; \
	    if "$$python" -c 'import ensurepip' 2>/dev/null; then said=$$("$$python" -m venv --clear .venv 2>&1); \
	    else said=$$("$$python" -m venv --clear --without-pip .venv 2>&1 && "$$python" -m pip --python .venv/bin/python install pip 2>&1); \
	    fi || fail "$$python cannot make a virtual environment with pip (on Debian and Ubuntu: apt-get install python3.11-venv): $$said"; \
	fi; \
	torch=$$(sed -n 's/^torch==//p' requirements.lock); \
	echo "setup 2/3: torch $$torch (large; $$log shows what happens)"; \
	logged $(PY) -m pip install --progress-bar off $${TORCH_INDEX:+--index-url "$$TORCH_INDEX"} "torch==$$torch"; \
	echo "setup 3/3: the $$(grep -c == requirements.lock) packages of requirements.lock"; \
	logged $(PY) -m pip install --progress-bar off --no-deps -r requirements.lock; \
	touch $@
