import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter, convert_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from soar_prep.checkpoint import INDEX, Checkpoint
from soar_prep.gptq.solve import solve_group
from soar_prep.layouts import from_tensors
from soar_prep.quality import last_hidden
from soar_prep.settings import Compute, Quantize, Scheme
from soar_prep.streaming import StreamedModel
from soar_prep.text import Windows, builtin_documents, load_windows, pad

SUPPORTED = [
    *("llama", "qwen2", "qwen2_window", "qwen3", "mistral", "smollm3", "gemma2", "gemma3", "odd_width"),
    *("granite", "phi3", "cohere2", "lfm2", "opt", "remote_code"),
]
SMALL = (
    *("calibration.samples=4", "calibration.length=32", "evaluation.samples=2", "evaluation.length=32"),
    "compute.device=cpu",
)
Models = Callable[[str], Path]
Outputs = Callable[..., Path]
SoarPrep = Callable[..., Any]


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def facts_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def load_in_transformers(directory: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=True).eval()


def linears_by_name(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", SUPPORTED)
def test_transformers_loads_what_is_written(name: str, quantized: Outputs):
    """Catches a directory that only we can read: transformers and compressed-tensors see our very weights and logits.

    compressed-tensors decodes to bf16, where every weight is exact, and runs the kernels that we run: bitwise. Its own
    activation rounding stays off here, because it computes scales in bf16.
    """
    directory = quantized(name)
    model = load_in_transformers(directory)
    for module in model.modules():
        module.quantization_enabled = False  # type: ignore[assignment]
    ids = torch.randint(2, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()

    checkpoint = Checkpoint(directory)
    quantized_names = set()
    for linear, module in linears_by_name(model).items():
        weight = from_tensors(linear, checkpoint)
        if weight is not None:
            quantized_names.add(linear)
            assert torch.equal(module.weight, weight.weight.dequantize(torch.bfloat16))
        assert hasattr(module, "quantization_scheme") == (weight is not None)
    assert quantized_names == set(facts_of(directory)["linears"])

    streamed = StreamedModel(checkpoint, Compute(device="cpu", dtype="bfloat16"), trust_remote_code=True)
    hidden = streamed.embed(ids)
    for index in range(len(streamed.layers)):
        hidden = streamed.run_layer(index, streamed.load_layer(index), hidden)
    assert torch.equal(streamed.logits(ids, hidden), expected)


@pytest.mark.parametrize("layout", ["compressed_tensors", "modelopt"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_every_linear_is_quantized_or_ignored(name: str, layout: str, quantized: Outputs, model_directory: Models):
    """Catches a module that a loader would misread: in neither list, in both, or without one of its tensors."""
    directory, source = quantized(name, f"export={layout}"), tensors_of(model_directory(name))
    written, ignore = tensors_of(directory), config_of(directory)["quantization_config"]["ignore"]
    model = load_in_transformers(model_directory(name))
    linears = linears_by_name(model)
    done = {linear for linear in linears if from_tensors(linear, written) is not None}
    assert done | set(ignore) == set(linears)
    assert not done & set(ignore)
    assert "lm_head" in ignore
    assert all("layers" in linear for linear in done)
    assert [linear for linear in ignore if linear != "lm_head"] == list(facts_of(directory)["kept"])

    assert len(written) == 4 * len(done) + len(source) - len(done)  # codes, block scales and two scalars
    for linear in done:
        weight = from_tensors(linear, written)
        assert weight is not None
        assert weight.input_scale is not None
        assert weight.weight.codes.shape == (linears[linear].out_features, linears[linear].in_features // 2)
        assert weight.weight.block_scales.shape == (linears[linear].out_features, linears[linear].in_features // 16)
        assert (weight.weight.block_scales.float() > 0).all()
        dense = linears[linear].weight.float()
        # NVFP4 of Gaussian weights loses about 1 % of their energy; GPTQ trades some of it for output error
        assert (weight.weight.dequantize() - dense).square().mean() < 0.05 * dense.square().mean()
    for tensor in source.keys() & written.keys() - {f"{linear}.weight" for linear in done}:
        assert bits(source[tensor]) == bits(written[tensor])
    assert source.keys() - written.keys() <= {f"{linear}.weight" for linear in done}
    assert set(json.loads((directory / INDEX).read_text())["weight_map"]) == set(written)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "remote_code"])
def test_modelopt_layout_holds_the_same_numbers(name: str, quantized: Outputs, tmp_path: Path):
    """Catches a scalar that is not inverted in one layout: compressed-tensors converts ModelOpt's to exactly ours."""
    source = quantized(name, "export=modelopt")
    convert_checkpoint(
        source, tmp_path / "converted", ModelOptNvfp4Converter(targets=["re:.*proj$"], ignore=["lm_head"])
    )
    converted, ours = tensors_of(tmp_path / "converted"), tensors_of(quantized(name))
    assert converted.keys() == ours.keys()
    for tensor in ours:
        assert bits(converted[tensor]) == bits(ours[tensor])
    hf_quant_config = json.loads((source / "hf_quant_config.json").read_text())
    assert hf_quant_config["quantization"]["exclude_modules"] == config_of(source)["quantization_config"]["ignore"]
    assert not (quantized(name) / "hf_quant_config.json").exists()


@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma3", "smollm3"])
def test_fused_groups_share_their_scalars(name: str, quantized: Outputs):
    """Catches q, k, v with scales of their own: a server that fuses them keeps one, and two are read wrongly."""
    facts, written = facts_of(quantized(name)), tensors_of(quantized(name))
    for query in [linear for linear in facts["linears"] if linear.endswith(("q_proj", "gate_proj"))]:
        others = ("k_proj", "v_proj") if query.endswith("q_proj") else ("up_proj",)
        for other in others:
            member = query.rpartition(".")[0] + "." + other
            for scalar in ("weight_global_scale", "input_global_scale"):
                assert bits(written[f"{query}.{scalar}"]) == bits(written[f"{member}.{scalar}"])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm3", "gemma3", "llama"])
def test_head_stays_and_tied_ones_stay_tied(name: str, quantized: Outputs, model_directory: Models):
    """Catches a tied head written twice, an untied one dropped as a duplicate, and a config that says otherwise."""
    directory = quantized(name)
    is_tied = name != "llama"
    assert config_of(directory)["tie_word_embeddings"] is is_tied
    assert ("lm_head.weight" in tensors_of(directory)) is not is_tied
    assert "model.embed_tokens.weight" in tensors_of(directory)
    model = load_in_transformers(directory)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied  # type: ignore[union-attr]
    head = tensors_of(model_directory(name)).get("lm_head.weight", model.model.embed_tokens.weight)  # type: ignore
    assert torch.equal(model.lm_head.weight, head)  # type: ignore[arg-type, union-attr]


def test_tied_head_that_the_source_holds_twice(model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path):
    """Catches a head saved beside the embeddings it is tied to: loaders warn, or take the wrong one."""
    directory = model_copy("qwen2")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ran = soar_prep("quantize", f"model={directory}", f"output={tmp_path / 'out'}", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")


@pytest.mark.parametrize("name", ["llama", "remote_code", "qwen2"])
def test_side_files_are_copied_byte_for_byte(name: str, quantized: Outputs, model_directory: Models):
    """Catches a tokenizer, template, licence or modelling code that is lost, re-encoded or `cleaned up`."""
    names = {p.name for p in model_directory(name).iterdir()} - {"config.json", INDEX}
    names = {name for name in names if not name.endswith(".safetensors")}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"}
    assert name != "remote_code" or "modeling_tiny.py" in names
    for file in names:
        assert (quantized(name) / file).read_bytes() == (model_directory(name) / file).read_bytes()
    left = config_of(quantized(name))
    del left["quantization_config"]
    assert left == config_of(model_directory(name))


def test_output_holds_nothing_else(quantized: Outputs, model_directory: Models):
    """Catches locks, records and temporary files that outlive the run."""
    files = {path.name for path in quantized("mistral").iterdir()}
    source = {path.name for path in model_directory("mistral").iterdir()} - {"model.safetensors"}
    shards = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert files == source | shards | {INDEX, "run.json", "report.html", "metrics.jsonl"}


def test_run_json_tells_what_was_done(quantized: Outputs, model_directory: Models):
    """Catches notes that say 90 samples where 8 were used: samples, tokens and hash are counted here once more."""
    directory = quantized("llama", "scale_rule=four_over_six", "damping=0.05", "keep_unquantized=[*.2.mlp.down_proj]")
    facts = facts_of(directory)
    assert facts["settings"]["scale_rule"] == "four_over_six"
    assert facts["settings"]["calibration"]["samples"] == 4
    source = model_directory("llama")
    for file, digest in facts["model_sha256"].items():
        assert hashlib.sha256((source / file).read_bytes()).hexdigest() == digest
    assert set(facts["model_sha256"]) == {"config.json"} | {path.name for path in source.glob("*.safetensors")}

    # windows packed by hand: <s>, then 31 tokens of the documents one after another
    tokenizer = AutoTokenizer.from_pretrained(source)
    for group, held_out, samples in (("calibration", False, 4), ("evaluation", True, 2)):
        documents = "".join(
            f"{document}\n\n" for document, _ in zip(builtin_documents(held_out), range(3), strict=False)
        )
        ids = tokenizer(documents, add_special_tokens=False).input_ids
        digest = hashlib.sha256()
        for window in range(samples):
            digest.update(np.array([0, *ids[31 * window : 31 * window + 31]], dtype="<i8").tobytes() + b"|")
        assert facts[group] == {
            "samples": samples,
            "tokens": 32 * samples,
            "truncated": 0,
            "sha256": digest.hexdigest(),
        }

    assert facts["kept"] == {"model.layers.2.mlp.down_proj": "keep_unquantized"}
    assert len(facts["linears"]) == 3 * 7 - 1
    for linear in facts["linears"].values():
        assert linear["method"] == "gptq"
        assert linear["damping"] == 0.05
        assert 0 < linear["relative_error"] < 0.05
        assert 0.1 < linear["share_of_fours"] < 0.9
        assert linear["input_scale"] > 0
    assert facts["environment"]["packages"]["torch"] == torch.__version__
    assert facts["source_bytes"] == sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert facts["output_bytes"] == sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    assert facts["output_bytes"] < facts["source_bytes"]
    assert facts["quality"].keys() == {"w4a16", "w4a4"}
    assert facts["quality"]["w4a4"]["kl"] > facts["quality"]["w4a16"]["kl"] > 0
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_road_is_the_one_a_person_would_walk(name: str, correction: bool, quantized: Outputs, model_directory: Models):
    """Catches a linear calibrated on something else than what the written ones before it give, and a target that is
    corrected by something else than what the source model gives.

    Walked again with plain transformers: two whole models, forward hooks, float64 statistics, and after each group of
    linears its written weights put in. Codes may differ where the two Hessians round a weight differently.
    """
    options = () if correction else ("correction=0",)
    directory, source = quantized(name, *options), model_directory(name)
    model, original = (load_in_transformers(source, torch.float32) for _ in range(2))
    linears, written = linears_by_name(model), tensors_of(directory)
    settings = Quantize(model="m", output="o")
    settings.calibration.samples, settings.calibration.length = 4, 32
    ids = load_windows(settings.calibration, AutoTokenizer.from_pretrained(source), 256, "calibration").token_ids
    originals = tensors_of(source)
    facts = facts_of(directory)["linears"]

    def input_of(model: nn.Module, linear: str) -> Tensor:
        """Float64 [n, K]."""
        inputs: list[Tensor] = []
        hook = model.get_submodule(linear).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        hook.remove()
        return inputs[0].flatten(0, 1).double()

    def put_in(names: list[str]) -> None:
        for n in names:
            weight = from_tensors(n, written)
            assert weight is not None
            linears[n].weight.data = weight.weight.dequantize()

    for layer in range(2):
        prefix = f"model.layers.{layer}."
        solved_late = []
        for group in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            block = "self_attn." if group[0] in ("q_proj", "o_proj") else "mlp."
            names = [prefix + block + member for member in group]
            x, y = input_of(model, names[0]), input_of(original, names[0])
            drift = ((y - x).T @ x / len(x)).float() if correction else None
            weights = {n: originals[f"{n}.weight"] for n in names}
            solved = solve_group(weights, (x.T @ x / len(x)).float(), settings, drift)
            for n in names:
                weight = from_tensors(n, written)
                assert weight is not None
                assert weight.weight.tensor_scale == solved[n].weight.tensor_scale
                same = (weight.weight.dequantize() == solved[n].weight.dequantize()).float().mean()
                assert same > 0.99
                assert facts[n]["relative_error"] == pytest.approx(solved[n].relative_error, rel=0.02)
                assert weight.input_scale is not None
                assert weight.input_scale.item() * 2688 == pytest.approx(x.abs().max().item(), rel=1e-5)
            if correction:
                put_in(names)
            solved_late += names
        put_in(solved_late)


def test_same_command_writes_the_same_bytes(
    quantized: Outputs, model_directory: Models, soar_prep: SoarPrep, tmp_path: Path
):
    """Catches any dependence on time, hash seeds or the order of files."""
    soar_prep("quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL)
    for path in quantized("mistral").iterdir():
        if path.name not in ("run.json", "report.html", "metrics.jsonl"):  # these name the output, or times
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_w4a4_calibrates_later_layers_on_quantized_activations(quantized: Outputs):
    """Catches a scheme that changes nothing, or that already changes what no rounded linear comes before."""
    weight_only, both = tensors_of(quantized("mistral")), tensors_of(quantized("mistral", "scheme=w4a4"))
    differs = {name for name in both if bits(both[name]) != bits(weight_only[name])}
    assert any(name.startswith("model.layers.1.") for name in differs)
    assert any(name.startswith("model.layers.0.self_attn.o_proj.") for name in differs)
    assert not any(name.startswith("model.layers.0.self_attn.q_proj.") for name in differs)


@pytest.mark.parametrize("layout", ["compressed_tensors", "modelopt"])
def test_weight_only_config_leaves_activations_alone(layout: str, quantized: Outputs):
    """Catches an input scale without a config that uses it, and a config that asks for one that is not there."""
    directory = quantized("mistral", f"export={layout}", "weight_only_config=true")
    full = quantized("mistral", f"export={layout}")
    written, others = tensors_of(directory), tensors_of(full)
    assert {name for name in others if "input" in name and "layernorm" not in name} == others.keys() - written.keys()
    assert all(bits(written[name]) == bits(others[name]) for name in written)
    config = config_of(directory)["quantization_config"]
    assert config["config_groups"]["group_0"].get("input_activations") is None
    assert facts_of(directory)["quality"].keys() == {"w4a16"}
    assert facts_of(directory)["quality"]["w4a16"] == facts_of(full)["quality"]["w4a16"]


@pytest.mark.parametrize("pattern", ["*.layers.0.*", "*.o_proj"])
def test_kept_linears_are_those_of_the_source(pattern: str, quantized: Outputs, model_directory: Models):
    """Catches a kept linear that is quantized after all, or missing from `ignore`."""
    directory = quantized("mistral", f"keep_unquantized=['{pattern}']")
    source, written = tensors_of(model_directory("mistral")), tensors_of(directory)
    kept = [name for name in source if name.endswith("proj.weight") and name in written]
    expected = 7 if "0" in pattern else 2
    assert len(kept) == expected == len(facts_of(directory)["kept"])
    assert all(bits(source[name]) == bits(written[name]) for name in kept)
    ignore = config_of(directory)["quantization_config"]["ignore"]
    assert sorted(ignore) == sorted(["lm_head", *(name.removesuffix(".weight") for name in kept)])


def test_columns_that_divide_into_no_blocks(quantized: Outputs, model_directory: Models):
    """Catches a crash, or a silent pad, where K % 16 != 0: such a linear stays, is ignored, and the report says why."""
    directory = quantized("odd_width")
    kept = {f"model.layers.{i}.mlp.down_proj": "72 input columns do not divide into blocks of 16" for i in range(2)}
    assert facts_of(directory)["kept"] == kept
    assert {*kept, "lm_head"} == set(config_of(directory)["quantization_config"]["ignore"])


def test_rounding_is_told_and_worse(quantized: Outputs):
    """Catches a method that is recorded wrongly, and GPTQ that is no better than rounding on its own calibration."""
    gptq, rounded = (facts_of(quantized("llama", *o))["linears"] for o in ((), ("method=round_to_nearest",)))
    assert {linear["method"] for linear in rounded.values()} == {"round_to_nearest"}
    assert {linear["damping"] for linear in rounded.values()} == {None}
    errors = [sum(linear["relative_error"] for linear in facts.values()) for facts in (gptq, rounded)]
    assert errors[0] < 0.9 * errors[1]


def test_batches_do_not_change_the_result(quantized: Outputs):
    """Catches masks or sample numbers that belong to another batch: one window at a time must give the same codes."""
    together, apart = (tensors_of(quantized("mistral", f"compute.batch_tokens={n}")) for n in (8192, 32))
    for name in together:
        if name.endswith("weight_packed"):
            assert (together[name] == apart[name]).float().mean() > 0.99


def test_padding_is_not_calibrated_on(
    model_directory: Models, soar_prep: SoarPrep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches padded chats that teach the solver the padding: whichever token it is, the files must be the same."""
    chats = [{"messages": [{"role": "user", "content": "word " * n}]} for n in (1, 9, 3)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    written = []
    for padding in (0, 5):

        def pad_with(rows: list[list[int]], truncated: int = 0, padding: int = padding) -> Windows:
            windows = pad(rows, truncated)
            return Windows(windows.token_ids.masked_fill(~windows.mask, padding), windows.mask, truncated)

        monkeypatch.setattr("soar_prep.text.pad", pad_with)
        output = tmp_path / f"out{padding}"
        ran = soar_prep(
            *("quantize", f"model={model_directory('mistral')}", f"output={output}", *SMALL, "calibration=chat"),
            f"calibration.path={tmp_path / 'x.jsonl'}",
        )
        assert (ran.code, ran.err) == (0, "")
        assert "calibration: 3 of 4 windows" in ran.out
        written.append({name: bits(tensor) for name, tensor in tensors_of(output).items()})
    assert written[0] == written[1]


def test_gate_that_fails_keeps_the_work_and_writes_no_output(
    model_directory: Models, soar_prep: SoarPrep, quantized: Outputs, tmp_path: Path
):
    """Catches a bad checkpoint that looks finished; a raised gate must finish it without solving anything again."""
    output = tmp_path / "out"
    arguments = ("quantize", f"model={model_directory('mistral')}", f"output={output}", *SMALL)
    ran = soar_prep(*arguments, "gate.max_kl=1e-9")
    assert ran.code == 3
    assert ran.err.startswith("soar-prep: gate.max_kl=1e-09: the mean KL divergence is 0.")
    assert ran.err.count("\n") == 1
    assert not output.exists()
    partial = tmp_path / "out.partial"
    shards = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(shards) == 3

    assert soar_prep(*arguments, "gate.max_kl=100").code == 0
    assert not partial.exists()
    assert {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")} == shards
    for name in shards:
        assert (output / name).read_bytes() == (quantized("mistral") / name).read_bytes()


def test_gate_looks_at_the_scheme_that_was_asked_for(
    model_directory: Models, soar_prep: SoarPrep, quantized: Outputs, tmp_path: Path
):
    """Catches a gate on weights alone for a model that will be served in W4A4."""
    quality = facts_of(quantized("mistral", "scheme=w4a4"))["quality"]
    between = (quality["w4a16"]["kl"] + quality["w4a4"]["kl"]) / 2
    ran = soar_prep(
        *("quantize", f"model={model_directory('mistral')}", f"output={tmp_path / 'out'}", *SMALL),
        *("scheme=w4a4", f"gate.max_kl={between}"),
    )
    assert ran.code == 3


def test_activations_that_overflow_are_traced(model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path):
    """Catches `NaN loss` somewhere: module and sample are named. Only window 2 holds the token that overflows."""
    directory = model_copy("remote_code")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = 3e38  # finite, but scale_emb = 12 makes it infinite
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ids = np.full((4, 8), 5)
    ids[2, 3] = 7
    np.save(tmp_path / "ids.npy", ids)
    ran = soar_prep(
        *("quantize", f"model={directory}", f"output={tmp_path / 'out'}", "trust_remote_code=true", *SMALL),
        *("calibration=tokens", f"calibration.path={tmp_path / 'ids.npy'}"),
    )
    assert ran.code == 2
    assert "model.layers.0.self_attn.q_proj: NaN or infinite activations in calibration sample 2; try" in ran.err
    assert not (tmp_path / "out").exists()


REFUSED: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "quantized_already": (
        "mistral",
        {"quantization_config": {"quant_method": "fp8"}},
        [],
        "quantized already (fp8); give the BF16 or FP32 model",
    ),
    "no_causal_lm": (
        "mistral",
        {"architectures": ["MistralForSequenceClassification"]},
        [],
        "MistralForSequenceClassification is not a causal LM; expected ...ForCausalLM",
    ),
    "remote_code": ("remote_code", {}, [], "trust_remote_code=True"),
    "experts": ("mixtral", {}, [], "mixture-of-experts models are not supported"),
    "token_arguments": ("gemma4", {}, [], "per_layer_input, which depends on the token ids"),
    "context": ("mistral", {}, ["calibration.length=257"], "calibration.length=257: the model's context is 256"),
    "pattern": ("mistral", {}, ["keep_unquantized=[*.dwn_proj]"], "'*.dwn_proj' matches no linear"),
    "split_group": ("mistral", {}, ["keep_unquantized=[*.k_proj]"], "keep all of them or none"),
    "nothing_left": ("mistral", {}, ["keep_unquantized=['*']"], "no linear in its layers is left to quantize"),
    "device": ("mistral", {}, ["compute.device=cuda:99"], "compute.device=cuda:99: not usable here"),
    "dtype": ("mistral", {}, ["compute.dtype=float8"], "compute.dtype=float8: expected auto, float32, bfloat16 or"),
    "no_path": ("mistral", {}, ["calibration=text"], "calibration.source=text: needs a file or a dataset id"),
    "evaluation": ("mistral", {}, ["evaluation.length=300"], "evaluation.length=300: the model's context is 256"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_first(
    case: str, model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path
):
    """Catches an hour of work before a message that could have come at once, and a traceback in its place."""
    name, changes, options, message = REFUSED[case]
    ran = soar_prep("quantize", f"model={model_copy(name, **changes)}", f"output={tmp_path / 'out'}", *SMALL, *options)
    assert ran.code == 2
    assert ran.err.startswith("soar-prep: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_damaged_weight_is_refused_first(model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path):
    """Catches a NaN in the last layer that would be met after hours."""
    directory = model_copy("mistral")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ran = soar_prep("quantize", f"model={directory}", f"output={tmp_path / 'out'}", *SMALL)
    assert ran.code == 2
    assert "model.layers.1.mlp.down_proj.weight in " in ran.err
    assert not (tmp_path / "out.partial").exists()


def test_null_quantization_config_is_none(model_copy: Callable[..., Path], soar_prep: SoarPrep, tmp_path: Path):
    """Catches a dense model refused because its config.json names the field without a value."""
    directory = model_copy("mistral", quantization_config=None)
    ran = soar_prep("quantize", f"model={directory}", f"output={tmp_path / 'out'}", *SMALL)
    assert (ran.code, ran.err) == (0, "")


def test_quality_is_that_of_the_written_files(quantized: Outputs, model_directory: Models):
    """Catches figures of the weights in memory: the written directory is measured here once more."""
    directory = quantized("llama")
    compute, settings = Compute(device="cpu"), Quantize(model="m", output="o")
    settings.evaluation.samples, settings.evaluation.length = 2, 32
    tokenizer = AutoTokenizer.from_pretrained(directory)
    windows = load_windows(settings.evaluation, tokenizer, 256, "evaluation", held_out=True)
    logits = []
    for path in (model_directory("llama"), directory):
        model = StreamedModel(Checkpoint(path), compute)
        hidden = last_hidden(model, windows, Scheme.w4a16, batch_tokens=8192)
        logits.append(model.logits(windows.token_ids, hidden)[:, :-1].double().log_softmax(-1))
    p, q = logits
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    assert facts_of(directory)["quality"]["w4a16"]["kl"] == pytest.approx(kl, rel=1e-3)


def test_tokenizer_of_another_model_is_refused(
    model_copy: Callable[..., Path], soar_prep: Callable[..., Any], tmp_path: Path
):
    """Catches an index error in the embedding, after all weights were read, where tokenizer and model differ."""
    directory = model_copy("mistral", vocab_size=200)
    shard = directory / "model.safetensors"
    tensors = load_file(shard)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].clone()
    save_file(tensors, shard, metadata={"format": "pt"})
    ran = soar_prep("quantize", f"model={directory}", f"output={tmp_path / 'out'}", *SMALL)
    assert ran.code == 2
    assert "but the model embeds only 200 tokens" in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out.partial").exists()
