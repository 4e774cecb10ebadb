# make demo, make test: all set-up on a fresh machine, with or without a GPU. Details: docs/build.md.

PYTHON ?= python3
ENV_PYTHON = "$$(cat build/env/python)"
PYTEST_ARGS ?=
unexport PYTHONDONTWRITEBYTECODE  # else each process of the tests compiles them again

.PHONY: demo test env kernels compile_commands style clean

demo: env
	$(ENV_PYTHON) examples/demo.py

test: env
	$(ENV_PYTHON) -m pytest tests benchmarks/lab/tests -q --numprocesses auto --dist worksteal $(PYTEST_ARGS)

env:
	@$(PYTHON) tools/setup_env.py

# The kernel archive alone, for the architectures of a release.
kernels: env
	$(ENV_PYTHON) tools/kernel_build.py --archs default

# For clangd: what the builds so far compile, and with which flags.
compile_commands:
	@$(PYTHON) tools/compile_commands.py

style: env
	$(ENV_PYTHON) tools/style.py --fix

clean:
	rm -rf build .venv flash_attn_2_cuda*.so flash_attn_2_cuda.py flash_attn/_build_info.json
