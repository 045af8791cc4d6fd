# From nothing (Python 3.10+, a C++20 compiler, make) to a running example: `make demo`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
# A Criteo TSV, plain or .gz; without it the example makes its own rows.
DATA ?= made
CONFIGS := examples/criteo/configs
DEMO_FLAGS ?= --config $(CONFIGS)/$(if $(filter made,$(DATA)),demo.yaml,kaggle.yaml --epochs 4 --compare_dense)

export OMP_NUM_THREADS ?= 1

.PHONY: build demo test test-versions test-torchx-nightly lint bench sanitize cuda-check gpu-check clean
.DELETE_ON_ERROR:

build: $(VENV)/.built

$(VENV)/.installed: requirements/cpu.txt
	$(PYTHON) -c "import sys; sys.exit('Python 3.10 or later is needed, got ' + sys.version) if sys.version_info < (3, 10) else None"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

$(VENV)/.built: $(VENV)/.installed pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: build
	$(BIN)/torchrun --standalone --nproc_per_node $(RANKS) examples/criteo/train.py \
	  --data "$(DATA)" --output_dir runs/demo $(DEMO_FLAGS)

# A file at a time on each worker; many tests start two to four processes themselves.
TEST_WORKERS ?= 2

test: build
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# The tests that use TorchRec, on its other versions: each lies in a folder of its own, before the
# pinned one. VERSION_TESTS chooses fewer.
TORCHREC_VERSIONS ?= 1.6.1 1.7.0 1.9.2
VERSION_TESTS ?= tests/distributed tests/modules

test-versions: build $(TORCHREC_VERSIONS:%=test-torchrec-%)

build/torchrec-%: $(VENV)/.installed
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ torchrec==$*
	touch $@

test-torchrec-%: build/torchrec-% build
	PYTHONPATH=$(abspath $<) $(BIN)/python -c "import torchrec; assert '$<' in torchrec.__file__, torchrec.__file__"
	PYTHONPATH=$(abspath $<) $(BIN)/python -m pytest $(VERSION_TESTS)

# The launch's tests on torchx as it is after 0.7.
TORCHX_NIGHTLY ?= 2026.10.26

test-torchx-nightly: build
	rm -rf build/torchx-nightly
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/torchx-nightly torchx-nightly==$(TORCHX_NIGHTLY)
	PYTHONPATH=$(abspath build/torchx-nightly) $(BIN)/python -m pytest tests/torchx_components

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: build
	$(BIN)/python benchmarks/embedding_bag.py
	$(BIN)/python benchmarks/floors.py

# The operators' tests on a library with AddressSanitizer and UndefinedBehaviorSanitizer (minutes to build).
sanitize: build
	$(BIN)/cmake -S . -B build/sanitize -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
	$(BIN)/cmake --build build/sanitize
	TORCHREC_TT_LIBRARY=$(abspath build/sanitize/_C.so) ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest tests/ops tests/test_optim.py tests/modules -k "not every_instruction_set and not instruction_sets and not opcheck and not library"

# Compiles the library with its CUDA operators, warnings as errors; what did not change stays as it
# is. Prints every kernel's registers; spilled ones are an error.
cuda-check: $(VENV)/.installed
	@command -v nvcc >/dev/null || { echo "cuda-check needs nvcc of CUDA 13 on the PATH"; exit 1; }
	$(BIN)/cmake -S . -B build/cuda -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=Release \
	  -DTORCHREC_TT_WITH_CUDA=ON -DTORCHREC_TT_REGISTERS=ON -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
	$(BIN)/cmake --build build/cuda --parallel 2
	$(BIN)/python .ci/registers.py report build/cuda

# What needs a GPU, in one script below 10 minutes: torch and the library built with CUDA are enough,
# so PYTHON is taken as it is. LIBRARY is what `make cuda-check` built.
LIBRARY ?= build/cuda/_C.so

gpu-check:
	FAIL_WITHOUT_CUDA=1 TORCHREC_TT_LIBRARY=$(abspath $(LIBRARY)) $(PYTHON) tests/gpu_check.py --json runs/gpu_check.json

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
