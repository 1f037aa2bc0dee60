# make demo   the main job: time to first token with and without internal checkpoints, on this machine
# make test   everything that CI checks
# Both set up .venv first. `make help` lists the rest.

PYTHON ?= python3
BIN := .venv/bin
export MPLBACKEND ?= Agg
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test lint generated notebooks-test pytest hooks notebooks readme prove gpu-test bench sanitize clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | expand -t 18

.venv/.ready: pyproject.toml constraints.txt
	@echo "Setting up .venv (a minute or two) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/.ready  ## run the TTFT experiment on this machine; writes out/ttft.json and out/ttft.png
	@$(BIN)/kda-ckpt ttft

test: lint generated notebooks-test pytest  ## all checks of CI

lint: .venv/.ready  ## ruff
	@$(BIN)/ruff check --quiet nbs kda_ckpt tests tools
	@$(BIN)/ruff format --quiet --check nbs tests tools || (echo "run: ruff format nbs tests tools"; exit 1)

generated: .venv/.ready  ## the package, the clean notebooks and README.md are what their sources give
	@$(BIN)/python tools/check_generated.py

notebooks-test: .venv/.ready  ## run every notebook
	@OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers 2

pytest: .venv/.ready  ## run the tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

hooks: .venv/.ready  ## install nbdev's git hooks: clean notebooks on commit, merge them sensibly
	@$(BIN)/nbdev_install_hooks

notebooks: .venv/.ready  ## run all notebooks in place and save their outputs
	@$(BIN)/nbdev_export && $(BIN)/python tools/run_notebooks.py && $(BIN)/nbdev_clean

readme: .venv/.ready  ## make README.md from nbs/index.ipynb
	@$(BIN)/python tools/make_readme.py

prove: .venv/.ready  ## the long proofs: exhaustive small worlds, 10^6 random steps, a real trace (about half an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python tools/prove.py

gpu-test:  ## tests that need a GPU, with the python that has torch
	@$(PYTHON) -m pytest -m gpu tests/gpu

bench:  ## benchmarks on the GPU; results go to nbs/results/
	@$(PYTHON) tools/bench_kda.py

sanitize:  ## compute-sanitizer over the CUDA kernels
	@$(PYTHON) tools/sanitize_cuda.py

clean:  ## remove what the targets above made
	@rm -rf .venv out build *.egg-info .pytest_cache .hypothesis .ruff_cache
