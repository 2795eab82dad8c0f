# Two commands do all set-up on a bare machine with Python 3.10+ and pip: make demo, make test.
# On a machine without a GPU, point pip at PyTorch's CPU packages first to save a large download (README, "Install").
PYTHON ?= python3
VENV ?= .venv
OUT ?= out
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-draft test lint contract contract-golden contract-sglang clean

demo: $(OUT)/smollm2-135m-nvfp4/config.json
	$(BIN)/soar-prep verify $(OUT)/smollm2-135m-nvfp4
	@echo "report: $(OUT)/smollm2-135m-nvfp4/report.html"

$(OUT)/smollm2-135m-nvfp4/config.json: $(OUT)/smollm2-135m/config.json
	$(BIN)/soar-prep quantize model=$(OUT)/smollm2-135m output=$(OUT)/smollm2-135m-nvfp4 \
		calibration.samples=32 calibration.length=512 evaluation.samples=8 evaluation.length=512

$(OUT)/smollm2-135m/config.json: $(VENV)/.demo
	$(BIN)/python benchmarks/smollm2.py $(OUT)/smollm2-135m

# A small draft for the demo's model, on text that ships with Python; its report tells what it was before and after.
demo-draft: $(OUT)/smollm2-135m-draft/config.json
	@echo "report: $(OUT)/smollm2-135m-draft/report.html"

$(OUT)/smollm2-135m-draft/config.json: $(OUT)/smollm2-135m/config.json
	$(BIN)/soar-prep train-draft target=$(OUT)/smollm2-135m output=$(OUT)/smollm2-135m-draft \
		data=builtin data.length=256 data.samples=800 evaluation.samples=8 compute.batch_tokens=1024 \
		draft.draft_vocab_size=4096 draft.intermediate_size=768 loss.steps=3 \
		optimizer.steps=130 optimizer.learning_rate=2e-3 \
		decoding.prompts=3 decoding.tokens=32 decoding.depth=4 decoding.candidates=8

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy soar_prep runtime_patch

# What other software writes and reads, by that software itself, in environments of its own.
contract: contract-golden contract-sglang

# The golden files once more from what made them (Python 3.11).
CONTRACT := $(VENV)-contract
contract-golden: $(CONTRACT)/.ready
	rm -rf $(CONTRACT)/golden && mkdir $(CONTRACT)/golden
	$(CONTRACT)/bin/python tests/golden/make_golden.py $(CONTRACT)/golden
	diff -r -x make_golden.py -x requirements.txt $(CONTRACT)/golden tests/golden
	@echo "contract: the golden files are what fouroversix, compressed-tensors, llm-compressor and ModelOpt write"

# What soar-prep writes, loaded and computed by SGLang on the CPU, then served by its Engine: drafts, MiniCPM-SALA;
# both in BF16 and in NVFP4.
SGLANG := $(VENV)-sglang
contract-sglang: $(SGLANG)/.ready
	for script in sglang_draft sglang_engine sglang_sala sglang_sala_engine sglang_patched; do \
		PYTHONPATH=tests/contract/stubs:. $(SGLANG)/bin/python tests/contract/$$script.py 2>$(SGLANG)/log \
			|| { cat $(SGLANG)/log >&2; exit 1; }; done

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[test]'
	touch $@

$(CONTRACT)/.ready: tests/golden/requirements.txt
	$(PYTHON) -m venv $(CONTRACT)
	$(CONTRACT)/bin/python -m pip install --quiet torch==2.13.0 setuptools wheel
	$(CONTRACT)/bin/python -m pip install --quiet -r tests/golden/requirements.txt
	$(CONTRACT)/bin/python -m pip install --quiet --no-deps llmcompressor==0.14.0.1 nvidia-modelopt==0.47.0
	SKIP_CUDA_BUILD=1 $(CONTRACT)/bin/python -m pip install --quiet --no-deps --no-build-isolation fouroversix==1.0.5
	touch $@

$(SGLANG)/.ready: pyproject.toml tests/contract/requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet torch==2.13.0
	$(SGLANG)/bin/python -m pip install --quiet -r tests/contract/requirements-sglang.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.21
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(CONTRACT) $(SGLANG) $(OUT)
