"""MiniCPM-SALA as soar-prep writes it in a real SGLang 0.5.21 Engine, on the CPU, beside soar-prep's own model.

Both state the log-probability of every token of the prompts and of what SGLang generates after them, greedily. They
must agree, and each generated token must be soar-prep's most likely one, but for ties within the same tolerance. In
fp32 the two agree to rounding, so another decay, slope, scale, norm, gate, rotation, or order of any of these shows,
and so do codes and scales read otherwise; BF16, which servers use, is held to what rounding explains. Prompts are read
in chunks and are more than there are places, so that recurrent states go from chunk to chunk and on to single steps,
and places are used again. The last config is faulty, which SGLang takes without a word, and must be noticed.

SGLang's own are the scheduler, the batches, the state pool, the model, and the Triton kernels of lightning attention,
which run in Triton's interpreter. Softmax attention is its torch_native; NVFP4 linears are stubs/contract_kernels.py's,
on activations that are not quantized (W4A16). No text is as long as dense_len: choosing blocks needs a GPU in SGLang,
and is not tested here. Run by `make contract`; fails by an exception.

    python tests/contract/sglang_sala_engine.py cuda [BF16_MODEL NVFP4_MODEL]

does the same on a GPU, where SGLang has its CUDA build: in BF16 alone, with its own attention, its CUDA graphs and its
Marlin kernels for NVFP4; on given models with prompts of the first one's held_out.txt, if it has one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import sala_checkpoint
import torch
from safetensors.torch import load_file
from torch import Tensor

from soar_prep.layouts import from_tensors, layout_of
from soar_prep.sala import MiniCPMSALAConfig, MiniCPMSALAForCausalLM

PROMPT_LENGTHS = (1, 20, 70, 9, 46)
NEW_TOKENS, CHUNK, PLACES = 8, 48, 3  # the kernel takes 32 tokens at a time: a chunk of a prompt is two of its blocks
# In nats. Measured in fp32: 8e-6, summed in another order. In BF16: 0.15, whether soar-prep computes in BF16 or fp32;
# soar-prep's two are as far apart (0.12), and logits from 8 to 16 have steps of 0.06 in BF16.
TOLERANCE = {"float32": 5e-5, "bfloat16": 0.25}
FAULT = {"lightning_layerwise_decay": True}  # slopes that shrink from layer to layer: another model's


ON_CPU = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "chunked_prefill_size": CHUNK,
    "max_running_requests": PLACES,
    "max_mamba_cache_size": PLACES,
}
ON_GPU = {
    "attention_backend": "triton",
    "disable_prefill_cuda_graph": True,
    "disable_flashinfer_autotune": True,
    "cuda_graph_max_bs_decode": 4,
    "max_running_requests": 4,
    "max_mamba_cache_size": 16,
}
NVFP4_ON_GPU = {"quantization": "modelopt_fp4", "fp4_gemm_runner_backend": "marlin"}


def write_requests(folder: Path, text: Path | None = None) -> list[list[int]]:
    count = sum(PROMPT_LENGTHS)
    if text is not None and text.exists():
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(text.parent)(text.read_text(), return_tensors="pt").input_ids[0, :count]
    else:
        tokens = torch.randint(3, sala_checkpoint.VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))
    prompts = [part.tolist() for part in tokens.split(PROMPT_LENGTHS)]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return prompts


def answer_in_sglang(
    folder: Path, model: Path, dtype: str, device: str, variables: Mapping[str, str] = MappingProxyType({})
) -> list[dict]:
    """The Engine's answers; in a process of its own, for an Engine that dies takes its parent with it."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    if device == "cpu":
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, "serve", str(folder), str(model), dtype, device]
    subprocess.run(command, env=environment, check=True, timeout=900, stdout=sys.stderr)
    return json.loads((folder / "answers.json").read_text())


def serve(folder: Path, model: str, dtype: str, device: str) -> None:
    import sglang

    chosen = ON_CPU if device == "cpu" else ON_GPU
    if device != "cpu" and "quantization_config" in json.loads((Path(model) / "config.json").read_text()):
        chosen |= NVFP4_ON_GPU
    engine = sglang.Engine(
        model_path=model,
        dtype=dtype,
        device=device,
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        max_total_tokens=2048,
        context_length=512,
        mem_fraction_static=0.3,
        **chosen,
    )
    answers = engine.generate(
        input_ids=json.loads((folder / "prompts.json").read_text()),
        sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    (folder / "answers.json").write_text(json.dumps(answers))
    engine.shutdown()


def our_model(directory: Path, dtype: str) -> MiniCPMSALAForCausalLM:
    """soar-prep's model of a checkpoint, NVFP4 linears dequantized."""
    tensors: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    modules = {name.rpartition(".")[0] for name in tensors}
    quantized = {module: from_tensors(module, tensors) for module in modules if layout_of(module, tensors)}
    weights = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in quantized}
    model = MiniCPMSALAForCausalLM(MiniCPMSALAConfig.from_pretrained(directory)).requires_grad_(False)
    model.to(getattr(torch, dtype))
    model.load_state_dict(
        weights | {f"{module}.weight": each.weight.dequantize(model.dtype) for module, each in quantized.items()}
    )
    return model


@dataclass
class Agreement:
    """difference: of a log-probability, the largest, in nats. same: how many generated tokens are soar-prep's most
    likely; behind: by how many nats another is less likely than that, at most."""

    difference: float = 0
    same: int = 0
    behind: float = 0

    def __str__(self) -> str:
        others = f", others within {self.behind:.2f}" if self.behind else ""
        total = len(PROMPT_LENGTHS) * NEW_TOKENS
        return f"log-probabilities within {self.difference:.1e}; {self.same} of {total} tokens the same{others}"

    def holds(self, tolerance: float) -> bool:
        return self.difference <= tolerance and self.behind <= tolerance


def compare(model: MiniCPMSALAForCausalLM, prompts: list[list[int]], answers: list[dict]) -> Agreement:
    """AssertionError unless SGLang states a finite log-probability for all tokens but a prompt's first."""
    result = Agreement()
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor(prompt + answer["output_ids"])
        said = [*answer["meta_info"]["input_token_logprobs"][1:], *answer["meta_info"]["output_token_logprobs"]]
        ours = model(tokens[None, :-1]).logits[0].float().log_softmax(-1)
        chosen = ours.gather(1, tokens[1:, None]).squeeze(1)
        differences = (chosen - torch.tensor([each[0] for each in said])).abs()
        behind = (ours.max(-1).values - chosen)[-NEW_TOKENS:]
        assert len(said) == len(prompt) - 1 + NEW_TOKENS
        assert differences.isfinite().all()
        result.difference = max(result.difference, float(differences.max()))
        result.behind = max(result.behind, float(behind.max()))
        result.same += int((behind == 0).sum())
    return result


def check(folder: Path, model: Path, dtype: str, device: str, prompts: list[list[int]]) -> None:
    answers = answer_in_sglang(folder, model, dtype, device)
    for own in dict.fromkeys((dtype, "float32")):
        found = compare(our_model(model, own), prompts, answers)
        print(f"{model.name}, {dtype} in SGLang, {own} in soar-prep: {found}", flush=True)
        assert found.holds(TOLERANCE[dtype]), "SGLang serves another model"


def on_the_cpu(folder: Path) -> None:
    sala_checkpoint.make(folder)
    prompts = write_requests(folder)
    for name in ("bf16", "nvfp4"):
        for dtype in ("float32", "bfloat16"):
            check(folder, folder / name, dtype, "cpu", prompts)
    faulty = folder / "faulty"
    shutil.copytree(folder / "bf16", faulty)
    config = json.loads((faulty / "config.json").read_text()) | FAULT
    (faulty / "config.json").write_text(json.dumps(config))
    answers = answer_in_sglang(folder, faulty, "float32", "cpu")
    found = compare(our_model(folder / "bf16", "float32"), prompts, answers)
    print(f"{FAULT}: {found}")
    assert found.difference > TOLERANCE["bfloat16"], "nothing notices it"


def on_a_gpu(folder: Path, models: list[Path]) -> None:
    if not models:
        sala_checkpoint.make(folder)
        models = [folder / "bf16", folder / "nvfp4"]
    prompts = write_requests(folder, models[0] / "held_out.txt")
    for model in models:
        check(folder, model, "bfloat16", "cuda", prompts)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), *sys.argv[3:])
        return
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        if sys.argv[1:2] == ["cuda"]:
            on_a_gpu(Path(temporary), [Path(name) for name in sys.argv[2:]])
        else:
            on_the_cpu(Path(temporary))
    seconds = time.perf_counter() - begin
    print(f"contract: in SGLang 0.5.21's Engine MiniCPM-SALA is the model that soar-prep has ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
