"""Every option of every command, once: name, default, unit and range. Imports no torch.

YAML files under configs/ hold only what a run changes; the manual pages (`soar-prep quantize --help`) are
printed from here.
"""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from soar_prep.errors import UserError

REQUIRED = "???"  # OmegaConf's word for an option without a default


class Choice(Enum):
    """An option with a few named values; `${scale_rule}` in another option becomes the plain name."""

    def __str__(self) -> str:
        return str(self.value)


class ScaleRule(Choice):
    six = "six"
    four_over_six = "four_over_six"
    sweep = "sweep"


class ScaleError(Choice):
    mse = "mse"
    mae = "mae"
    abs_max = "abs_max"
    hessian_diag = "hessian_diag"


class Method(Choice):
    gptq = "gptq"
    round_to_nearest = "round_to_nearest"


class Scheme(Choice):
    w4a16 = "w4a16"
    w4a4 = "w4a4"


class Memory(Choice):
    auto = "auto"
    low = "low"


class DraftFormat(Choice):
    none = "none"
    nvfp4 = "nvfp4"


class Activations(Choice):
    none = "none"
    static = "static"
    dynamic = "dynamic"


class Layout(Choice):
    compressed_tensors = "compressed_tensors"
    modelopt = "modelopt"


class TextSource(Choice):
    builtin = "builtin"
    chat = "chat"
    text = "text"
    tokens = "tokens"


class LossKind(Choice):
    hybrid = "hybrid"
    neg_log_alpha = "neg_log_alpha"
    kl = "kl"
    tv = "tv"


class PositionRule(Choice):
    natural = "natural"
    aoi = "aoi"


class Parallel(Choice):
    ddp = "ddp"
    fsdp = "fsdp"


class WandbMode(Choice):
    disabled = "disabled"
    offline = "offline"
    online = "online"


def option(default: Any, text: str, low: float | None = None, high: float | None = None) -> Any:
    """A settings field: its default, its line in the manual (with the unit) and its inclusive range from `low` on."""
    metadata = {"text": text, "low": low, "high": high}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(settings: Any, prefix: str = "") -> None:
    """UserError for the first option outside its range, by its dotted name."""
    for f in fields(settings):
        name, value = prefix + f.name, getattr(settings, f.name)
        if is_dataclass(value):
            check_ranges(value, f"{name}.")
        elif range_text(f) and value is not None:
            low, high = f.metadata["low"], f.metadata["high"]
            if not (value >= low and (high is None or value <= high)):  # NaN is in no range
                raise UserError(f"{name}={value}: expected {range_text(f)}; see --help")


def range_text(f: Field) -> str:
    """`1 or more`, `0 to 1`, or nothing where any value goes."""
    low, high = f.metadata["low"], f.metadata["high"]
    if low is None:
        return ""
    return f"{low} or more" if high is None else f"{low} to {high}"


@dataclass
class Text:
    source: TextSource = option(
        TextSource.builtin,
        "builtin: prose and code that ship with Python; chat: conversations through the chat template, each its own "
        "window; text: documents, packed; tokens: ready token ids",
    )
    path: str | None = option(
        None, "chat, text: a .jsonl, .parquet or .txt file or a dataset id; tokens: an .npy file, integers [n, T]"
    )
    samples: int = option(128, "windows", 1)
    length: int = option(2048, "tokens a window at the most", 2)
    seed: int = option(0, "order in which rows of a file are drawn", 0)


@dataclass
class Evaluation(Text):
    samples: int = option(16, "held-out windows", 1)
    length: int = option(1024, "tokens a window at the most", 2)


@dataclass
class Gate:
    max_kl: float | None = option(
        None, "fail when the mean KL divergence from the source exceeds this, nats a token", 0.0
    )


@dataclass
class Wandb:
    mode: WandbMode = option(WandbMode.disabled, "offline needs no network; `wandb sync` uploads it later")
    project: str = option("soar-prep", "Weights & Biases project")


@dataclass
class Compute:
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    dtype: str = option("auto", "arithmetic of the forward passes: auto (bfloat16 on a GPU, else float32) or a name")
    batch_tokens: int = option(8192, "tokens a forward pass at the most, on each device", 1)
    threads: int | None = option(None, "CPU threads; all cores if not given", 1)


@dataclass
class Quantize:
    model: str = option(REQUIRED, "a Hugging Face model directory or hub id")
    output: str = option(REQUIRED, "directory to write; must not exist, or be an interrupted run with these settings")
    trust_remote_code: bool = option(False, "run the modelling code that the model directory brings")
    method: Method = option(Method.gptq, "gptq, or round_to_nearest (no error compensation)")
    scheme: Scheme = option(
        Scheme.w4a16, "what later layers are calibrated on: w4a16 weights only, w4a4 quantized activations too"
    )
    scale_rule: ScaleRule = option(
        ScaleRule.sweep,
        "candidates for a block's scale. six: its maximum becomes 6; four_over_six: 6 or 4; sweep: the twelve E4M3 "
        "codes around six",
    )
    scale_error: ScaleError = option(
        ScaleError.hessian_diag,
        "what picks among them: mse, mae, abs_max, or hessian_diag (squared error weighted by diag(H))",
    )
    exact_loss: bool = option(
        False, "pick among them in the loop instead, by what GPTQ itself loses; blocks then stay together in the order"
    )
    act_order: bool = option(True, "solve the columns in order of falling diag(H); blocks stay where they are")
    correction: float = option(
        0.5,
        "how much of the error in its input, from what is rounded before it, a linear's weight makes up for; 0 is "
        "faster",
        0.0,
        1.0,
    )
    refine_passes: int = option(
        0, "passes after GPTQ in which each block's codes and scale are solved again, given all others", 0
    )
    damping: float = option(
        0.01, "share of mean diag(H) added to its diagonal; raised tenfold when the factor fails", 1e-6, 1.0
    )
    power_of_two: bool = option(True, "round tensor scales up to a power of two, lossless in kernels that use bf16")
    keep_unquantized: list[str] = option(list, "glob patterns of modules to leave as they are: '*.layers.0.*'")
    export: Layout = option(Layout.compressed_tensors, "names and config of the written tensors")
    weight_only_config: bool = option(
        False, "a config that never quantizes activations (W4A16_NVFP4); leaves out the calibrated input scales"
    )
    memory: Memory = option(Memory.auto, "where activations wait: auto, on the GPU if they fit; low, in main memory")
    calibration: Text = option(Text, "text the Hessians are made from")
    evaluation: Evaluation = option(Evaluation, "held-out text for perplexity and KL of the written files")
    gate: Gate = option(Gate, "quality the written files must have")
    compute: Compute = option(Compute, "where and how")
    wandb: Wandb = option(Wandb, "experiment tracking")

    @property
    def corrects_targets(self) -> bool:
        return self.method is Method.gptq and self.correction > 0


@dataclass
class Verify:
    directory: str = option(REQUIRED, "the NVFP4 checkpoint, in either layout, ours or another tool's")
    reference: str | None = option(None, "the source model: adds perplexity, KL and top-1 agreement")
    trust_remote_code: bool = option(False, "run the modelling code that the model directories bring")
    scheme: Scheme = option(Scheme.w4a16, "whose figures the gate looks at: w4a16 weights only, w4a4 activations too")
    evaluation: Evaluation = option(Evaluation, "held-out text")
    gate: Gate = option(Gate, "quality the checkpoint must have")
    compute: Compute = option(Compute, "where and how")


@dataclass
class Data(Text):
    source: TextSource = option(
        TextSource.chat,
        "chat: conversations through the chat template, the assistant's tokens supervised; text, tokens, builtin: all",
    )
    path: str | None = option(
        None, "chat, text: a .jsonl, .parquet or .txt file or a dataset id; tokens: an .npy file, integers [n, T]"
    )
    samples: int = option(100_000, "conversations, or rows of text, at the most", 1)
    length: int = option(2048, "tokens of a sample at the most; what is beyond is cut", 2)
    pack: bool = option(False, "several samples in a row of `length` tokens, which do not see each other: less padding")
    regenerate: bool = option(False, "chat: the target's own answers in place of those in the data")
    answer_tokens: int = option(512, "regenerate: tokens of an answer at the most", 1)
    temperature: float = option(0.0, "regenerate: 0 for the likeliest token, above to draw from the target", 0.0)


@dataclass
class HeldOut:
    samples: int = option(64, "held-out samples; without a path the first ones of data, which are not trained on", 1)
    path: str | None = option(None, "a file or dataset id of the same kind as data.path, for held-out samples")
    every: int = option(200, "training steps between two evaluations", 1)


@dataclass
class Decoding:
    prompts: int = option(8, "held-out prompts for REAL speculative decoding, before and after training; 0 for none", 0)
    tokens: int = option(64, "tokens to decode for each", 1)
    depth: int = option(7, "guesses on a path at the most", 1)
    candidates: int = option(15, "nodes of a tree that the target scores a round, the pending token among them", 2)
    width: int = option(4, "guesses that a tree branches into; a chain is always measured too", 1)


@dataclass
class DraftShape:
    init: str | None = option(None, "a draft directory to go on from; its shapes and vocabulary are kept")
    aux_layers: list[int] | None = option(None, "three target layers, from 0, whose outputs the draft reads")
    intermediate_size: int | None = option(None, "width of the MLP; the target's if not given", 1)
    num_attention_heads: int | None = option(None, "query heads; the target's if not given", 1)
    num_key_value_heads: int | None = option(None, "key-value heads; the target's if not given", 1)
    head_dim: int | None = option(None, "width of a head; the target's if not given", 2)
    draft_vocab_size: int | None = option(None, "tokens the draft knows; 32000 or the target's if not given", 1)
    rms_norm_eps: float | None = option(None, "the target's if not given", 0.0)
    rope_theta: float | None = option(None, "the target's if not given; larger for longer contexts", 1.0)
    max_position_embeddings: int | None = option(None, "positions to serve; the target's if not given", 1)
    fc_norm: bool = option(False, "an RMSNorm on each of the target's three states (EAGLE-3.1)")
    norm_output: bool = option(False, "the next step is fed the normed hidden state (EAGLE-3.1)")
    head_from_target: bool = option(True, "start lm_head as the target's rows of the draft's tokens, else random")


@dataclass
class Loss:
    kind: LossKind = option(
        LossKind.hybrid, "hybrid: KL at first, acceptance as it grows; neg_log_alpha; kl; tv (1 - acceptance)"
    )
    eta: float = option(3.0, "hybrid: KL's share is exp(-eta * mean acceptance)", 0.0)
    steps: int = option(7, "steps of the training-time test: guesses ahead", 1)
    decay: float = option(0.8, "weight of a step's loss against the one before", 0.0, 1.0)


@dataclass
class Positions:
    rule: PositionRule = option(
        PositionRule.natural, "natural: 0, 1, 2, ...; aoi: all but a few first tokens are moved far off, anywhere"
    )
    gaps: int = option(0, "aoi: further jumps inside a sample", 0)


@dataclass
class Optimizer:
    learning_rate: float = option(3e-4, "AdamW, at the top of its cosine schedule", 0.0)
    warmup: float = option(0.03, "share of the steps in which it rises", 0.0, 1.0)
    weight_decay: float = option(0.0, "AdamW's, on matrices", 0.0)
    clip: float = option(1.0, "largest norm of the gradient", 0.0)
    epochs: float = option(1.0, "passes over the data", 0.0)
    steps: int | None = option(None, "updates; instead of epochs", 1)
    accumulate: int = option(1, "batches an update, on each device", 1)
    ema: float = option(0.0, "decay of an average of the weights, which is evaluated and written; 0: none", 0.0, 1.0)


@dataclass
class Qat:
    format: DraftFormat = option(DraftFormat.none, "what the draft is written in: none, BF16; nvfp4, 4-bit weights")
    share: float = option(
        0.25, "nvfp4: the last share of the updates runs under rounded weights; 0 rounds at the end", 0.0, 1.0
    )
    learning_rate: float | None = option(
        None,
        "nvfp4: of these updates, at the top of a cosine schedule of their own; if not given the run's goes on, and "
        "after start_from a tenth of optimizer.learning_rate is the top",
        0.0,
    )
    start_from: str | None = option(None, "nvfp4: a trained draft to round; all updates then run under rounded weights")
    activations: Activations = option(
        Activations.none,
        "nvfp4: none, W4A16, what serves small batches; static, W4A4 with calibrated scales; dynamic: for study alone",
    )
    lm_head: bool = option(False, "nvfp4: round lm_head too")
    scale_rule: ScaleRule = option(ScaleRule.four_over_six, "candidates for each block's E4M3 scale, as in quantize")
    scale_error: ScaleError = option(ScaleError.mse, "what picks among them: mse, mae, abs_max")

    def turn(self, updates: int) -> int:
        """How many of a run's updates come before weights are rounded."""
        if self.format is DraftFormat.none:
            return updates
        return 0 if self.start_from else round((1 - self.share) * updates)


@dataclass
class TrainDraft:
    target: str = option(REQUIRED, "a Hugging Face model directory or hub id: BF16, or NVFP4 by soar-prep quantize")
    output: str = option(REQUIRED, "directory to write; must not exist, or be an interrupted run with these settings")
    states: str | None = option(None, "target states from `soar-prep capture`, with their data; instead of data.path")
    trust_remote_code: bool = option(False, "run the modelling code that the model directory brings")
    scheme: Scheme = option(
        Scheme.w4a16, "how an NVFP4 target will be served: w4a16 weights only, w4a4 quantized activations too"
    )
    seed: int = option(0, "weights at the start, order of the data, drawn positions", 0)
    parallel: Parallel = option(Parallel.ddp, "several processes: ddp, each with all weights; fsdp, each with a part")
    checkpointing: bool = option(False, "compute each step's activations twice, to keep fewer of them")
    save_every: int = option(200, "updates between two saved states, from which a killed run resumes", 1)
    data: Data = option(Data, "what is trained on")
    evaluation: HeldOut = option(HeldOut, "held-out text: acceptance figures")
    decoding: Decoding = option(Decoding, "real speculative decoding of held-out prompts")
    draft: DraftShape = option(DraftShape, "the draft's shape, and what it starts from")
    loss: Loss = option(Loss, "training-time test and its loss")
    positions: Positions = option(Positions, "positions for RoPE")
    optimizer: Optimizer = option(Optimizer, "and its schedule")
    qat: Qat = option(Qat, "quantization-aware training")
    compute: Compute = option(Compute, "where and how")
    wandb: Wandb = option(Wandb, "experiment tracking")


@dataclass
class Capture:
    target: str = option(REQUIRED, "a Hugging Face model directory or hub id: BF16, or NVFP4 by soar-prep quantize")
    output: str = option(REQUIRED, "directory to write; must not exist, or be an interrupted run with these settings")
    trust_remote_code: bool = option(False, "run the modelling code that the model directory brings")
    scheme: Scheme = option(
        Scheme.w4a16, "how an NVFP4 target will be served: w4a16 weights only, w4a4 quantized activations too"
    )
    aux_layers: list[int] | None = option(None, "three layers, from 0, whose outputs the draft will read")
    shard_tokens: int = option(65_536, "tokens a file at the most", 1)
    dry_run: bool = option(False, "only tell how large the states will be")
    data: Data = option(Data, "whose states")
    evaluation: HeldOut = option(HeldOut, "held-out text, whose states are kept too")
    compute: Compute = option(Compute, "where and how")


@dataclass
class Selftest:
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")


def manual(settings: type, prefix: str = "") -> str:
    """The options of a settings class as manual-page text, nested classes by their dotted names."""
    lines: list[str] = []
    for f in fields(settings):
        default = f.default if f.default is not NO_DEFAULT else f.default_factory()  # type: ignore[misc, operator]
        if is_dataclass(default):
            lines += [f"\n{f.name}: {f.metadata['text']}", manual(type(default), f"{prefix}{f.name}.")]
            continue
        shown = {REQUIRED: "required", None: "none"}.get(default) if isinstance(default, str | None) else None
        shown = shown or (default.value if isinstance(default, Enum) else str(default))
        allowed = ", ".join(e.value for e in type(default)) if isinstance(default, Enum) else range_text(f)
        lines.append(f"  {prefix}{f.name}={shown}" + (f"   [{allowed}]" if allowed else ""))
        lines.append(f"      {f.metadata['text']}")
    return "\n".join(lines)


def option_names(settings: type, prefix: str = "") -> list[str]:
    """Dotted names of all options of a settings class."""
    names: list[str] = []
    for f in fields(settings):
        default = f.default if f.default is not NO_DEFAULT else f.default_factory()  # type: ignore[misc, operator]
        names.append(prefix + f.name)
        if is_dataclass(default):
            names += option_names(type(default), f"{prefix}{f.name}.")
    return names
