# The verbs of the project; CI, README and CONTRIBUTING use the same words.
# Needs Python 3.10 or later with venv, a C++17 compiler, cmake and make. Everything else goes into .venv*.

SHELL := /bin/bash
MAKEFLAGS += --no-print-directory
PYTHON ?= python3
JOBS ?= $(shell nproc)
ARGS ?=
# How many tests run at a time. Most of them wait for processes more than they compute. A file stays in one of the workers.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

BIN := .venv/bin
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile
ENVIRONMENTS := .venv/.ready .venv-openmpi/.ready .venv-mpich/.ready .venv-tensorflow/.ready .venv-mxnet/.ready
LIBRARY := src/ronde/libronde.so
NATIVE := CMakeLists.txt $(wildcard native/exports.map native/*/exports.map) $(shell find native -not -path 'native/tests/*' -name '*.[ch]*' -o -name '*.inc')
FORMATTED = $(shell find native -name '*.[ch]*' -o -name '*.inc')
CMAKE_CONFIGURE = cmake -S . -B build/native -DRONDE_TESTS=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null

# Thread sanitizer needs the old layout of addresses; a container may forbid asking for it.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)
CTEST := ctest --output-on-failure --no-tests=error

heading = @printf '\n== %s\n' "$(1)"

.PHONY: help train build test check fix bench docs size wheel sanitize clean test-native test-python test-quick test-all test-loaded soak host-tools host-browser
.NOTPARALLEL:

help:  ## say what the verbs do
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

train: .venv/.ready $(LIBRARY)  ## the main job: train AlexNet on handwritten digits, on two ranks; ARGS goes to it
	$(BIN)/ronde run -np 2 $(BIN)/python examples/imagenet/train.py $(ARGS)

build: $(ENVIRONMENTS) $(LIBRARY)  ## make the environments (.venv, and one for each MPI, TensorFlow and MXNet) and the library

# The Python tests are last: they end with a table of what could not be tested here.
test: build check test-native sanitize test-python  ## everything CI runs, about 45 minutes on two quiet cores

test-all: host-browser .venv-tensorflow-2.20/.ready test  ## `make test`, and what does not fit into CI: an older TensorFlow, a browser

test-native: build  ## the C++ tests
	$(call heading,C++ tests)
	$(CMAKE_CONFIGURE)
	cmake --build build/native -j $(JOBS)
	cd build/native && $(CTEST)

# Tests with several hosts run sshd in network namespaces, those of Slurm its daemons. Where these commands cannot be had,
# those tests are skipped.
host-tools:
	@PATH="$$PATH:/usr/sbin"; if ! { command -v sshd && command -v ip && command -v slurmd && command -v munged; } \
	    > /dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing openssh-server, iproute2, Slurm and munge for the tests with several hosts and with Slurm"; \
	    { apt-get update && apt-get install --yes --no-install-recommends openssh-server openssh-client iproute2 \
	      slurm-wlm munge; } > /dev/null 2>&1 || echo "that failed: tests that need what is missing are skipped"; \
	  else echo "no sshd, ip, slurmd or munged here: tests that need what is missing are skipped"; fi; fi

# The report is looked at in a browser, if there is one.
host-browser:
	@if ! { command -v chromium || command -v google-chrome; } > /dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing chromium for the tests of pages"; \
	    { apt-get update && apt-get install --yes --no-install-recommends chromium; } > /dev/null 2>&1 \
	      || echo "that failed: the tests in a browser are skipped"; \
	  else echo "no chromium here: the tests in a browser are skipped"; fi; fi

# The soaks have dozens of processes: they run alone. 5 says that ARGS selects none of a kind.
test-python: build host-tools  ## the Python tests; ARGS goes to pytest
	$(call heading,Python tests)
	$(BIN)/pytest -q -m alone $(ARGS) || test $$? = 5
	$(PYTEST) -m "not alone" $(ARGS) || test $$? = 5

test-quick: .venv/.ready $(LIBRARY)  ## the inner loop: unit and conformance tests but the slow ones, within 3 minutes
	$(PYTEST) -q -m "not slow" tests/unit tests/conformance $(ARGS)

test-loaded: build host-tools  ## the Python tests beside two busy processes; adds a line to test-loaded.log
	$(BIN)/python tools/busy.py -n 2 --log test-loaded.log $(MAKE) test-python ARGS="$(ARGS)"

soak: .venv/.ready $(LIBRARY) host-tools  ## an elastic job under faults for 30 minutes, and its goodput for 45; ARGS goes to both
	$(BIN)/python -m tests.jobs.soak chaos $(ARGS)
	$(BIN)/python -m tests.jobs.soak goodput $(ARGS)

check: .venv/.ready  ## lint, formats, types, architecture
	$(call heading,lint and formats)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(call heading,types)
	$(BIN)/mypy
	$(call heading,architecture)
	$(BIN)/pytest -q tests/unit/test_architecture.py

fix: .venv/.ready  ## let the formatters and the linter repair what they can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(FORMATTED)

# The kernels of test_reduce know no threads: the thread sanitizer would find nothing there, and takes minutes.
sanitize:  ## the C++ tests under the address, undefined-behaviour and thread sanitizers
	$(call heading,C++ tests with address and undefined-behaviour sanitizers)
	cmake -S . -B build/address -DRONDE_TESTS=ON "-DRONDE_SANITIZE=address;undefined" > /dev/null
	cmake --build build/address -j $(JOBS)
	cd build/address && RONDE_TEST_SMALL=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(CTEST)
	$(call heading,C++ tests with the thread sanitizer)
	cmake -S . -B build/thread -DRONDE_TESTS=ON -DRONDE_SANITIZE=thread > /dev/null
	cmake --build build/thread -j $(JOBS) --target $(filter-out test_reduce,$(notdir $(basename $(wildcard native/tests/test_*.cc))))
	cd build/thread && RONDE_TEST_SMALL=1 TSAN_OPTIONS=halt_on_error=1 $(FIXED_ADDRESSES) $(CTEST) -E test_reduce

bench: build  ## how fast is an allreduce between two ranks here
	$(BIN)/ronde bench allreduce -np 2 $(patsubst %,--mpi-python %/bin/python,.venv-openmpi .venv-mpich) $(ARGS)

docs: build  ## generate docs/reference from the code
	$(BIN)/python tools/reference.py

size:  ## modules, classes and lines of each package; what is too long
	@$(PYTHON) tools/size.py

wheel: .venv/.ready  ## build dist/*.whl
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --config-settings=build-dir=build/wheel --wheel-dir dist .
	@ls dist/*.whl

clean:  ## remove what was built; the environments and test-loaded.log stay (remove them by hand)
	rm -rf build dist $(LIBRARY) src/ronde/*/*.so src/ronde/comm/backends/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The library goes into the source package, where a wheel has it too. Installing (not building) there replaces the
# file as a whole, so that processes that have the old one open live on.
$(LIBRARY): $(NATIVE)
	$(call heading,native library)
	$(CMAKE_CONFIGURE)
	cmake --build build/native -j $(JOBS) --target ronde ronde_tensorflow ronde_jax ronde_mxnet $$(test -d build/native/CMakeFiles/hot_calls.dir && echo hot_calls)
	cmake --install build/native --prefix src > /dev/null
	@touch $@

.venv/.ready: EXTRA := dev
.venv-openmpi/.ready: EXTRA := dev-openmpi
.venv-mpich/.ready: EXTRA := dev-mpich
.venv-tensorflow/.ready: EXTRA := dev-tensorflow
.venv-mxnet/.ready: EXTRA := dev-mxnet
.venv-tensorflow-2.20/.ready: EXTRA := dev-tensorflow-2-20
# Keras 2, for old scripts. Its dependency is the package tensorflow, beside which tensorflow-cpu cannot be.
KERAS_2 := tf-keras==2.21.0

$(ENVIRONMENTS) .venv-tensorflow-2.20/.ready: pyproject.toml compat/horovod/pyproject.toml
	$(call heading,environment $(@D))
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --editable ".[$(EXTRA)]" $(if $(filter .venv .venv-tensorflow .venv-mxnet,$(@D)),--editable compat/horovod)
	$(if $(filter .venv-tensorflow,$(@D)),$(@D)/bin/pip install --quiet --no-deps $(KERAS_2))
	@touch $@
