# Two commands are all a newcomer needs: `make demo` and `make test`. Whoever edits runs `make quick`.
# Both build .venv on first use. To use an interpreter that already has torch and the dev tools instead:
#     TESSERA_PYTHON=/path/to/python make test

ifdef TESSERA_PYTHON
PY := $(TESSERA_PYTHON)
READY :=
DOCS_READY :=
else
PY := .venv/bin/python
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
endif
BIN := $(dir $(PY))

.PHONY: demo test quick sweep docs lint format types imports unit tour internals bench gpu clean

demo: $(READY)
	$(PY) examples/demo.py

# What takes a moment comes first. What reads the code alone runs beside the tests, which wait now and then, for a
# deadline or another process. Tests run the tour too, as they run every example.
test: $(READY)
	$(MAKE) lint
	$(MAKE) -j 3 types imports unit

# torch goes in first and alone, so that no other package gets to choose its version.
.venv/.ready: pyproject.toml constraints.txt
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or newer")'
	python3 -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt torch==2.13.0
	.venv/bin/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

# The site, into site/: open site/index.html. The pages that are generated from the code are written again first.
docs: $(READY) $(DOCS_READY)
	$(PY) -m tessera.ops.matrix
	$(PY) -m tessera.tile.document
	$(PY) -m tessera.pipeline.table
	$(PY) -m tessera.tools.reference
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open site/index.html; to search it: python3 -m http.server -d site"

.venv/.docs-ready: .venv/.ready
	.venv/bin/python -m pip install -c constraints.txt -e '.[docs]'
	touch $@

lint: $(READY)
	$(BIN)ruff check .
	$(BIN)ruff format --check .

format: $(READY)
	$(BIN)ruff check --fix .
	$(BIN)ruff format .

types: $(READY)
	$(BIN)pyright --pythonpath $(PY)

imports: $(READY)
	$(BIN)lint-imports

# Which tests are in which tier stands in tests/tiers.py. One thread a worker: two workers already fill two cores.
# Bytecode is written even where the user's shell says otherwise: many tests start processes, which would all compile
# the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

# It ends with the slowest tests: they decide how long the whole takes.
unit: $(READY)
	$(PYTEST) -m "not gpu and not sweep" --durations=40 --durations-min=3

quick: $(READY)
	$(PYTEST) --quick -q

sweep: $(READY)
	$(PYTEST) -m "sweep and not gpu"

tour: $(READY)
	OMP_NUM_THREADS=1 $(PY) examples/tour.py

# Every version of PyTorch that Tessera supports must have the private symbols that Tessera uses. Each gets an environment
# of its own. Where pip would bring CUDA along, which is gigabytes, a CPU build will do:
#     make internals TORCH_FROM='--index-url https://download.pytorch.org/whl/cpu'
TORCHES := 2.11.0 2.12.0 2.13.0
internals: $(TORCHES:%=internals-%)

internals-%: .torches/%/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=. .torches/$*/bin/python -m pytest --noconftest -q tests/torch_internals/test_symbols.py

.torches/%/.ready:
	python3 -m venv .torches/$*
	.torches/$*/bin/python -m pip install torch==$* $(TORCH_FROM)
	.torches/$*/bin/python -m pip install pytest expecttest numpy
	touch $@

.PRECIOUS: .torches/%/.ready

bench: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tessera.tools.cli bench core --json bench-core.json

# Everything that can be tried on a GPU, against eager, in a few minutes: docs/gpu.md.
gpu: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tessera.tools.cli check --battery --device cuda --json battery.json

clean:
	rm -rf .venv .torches build dist dumps site *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
