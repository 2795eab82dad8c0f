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


class Layout(Choice):
    compressed_tensors = "compressed_tensors"
    modelopt = "modelopt"


class TextSource(Choice):
    builtin = "builtin"
    chat = "chat"
    text = "text"
    tokens = "tokens"


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
    batch_tokens: int = option(8192, "tokens a forward pass, and a Hessian product, at the most", 1)
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
    act_order: bool = option(True, "solve the columns in order of falling diag(H); blocks stay where they are")
    damping: float = option(
        0.01, "share of mean diag(H) added to its diagonal; raised tenfold when the factor fails", 1e-6, 1.0
    )
    power_of_two: bool = option(True, "round tensor scales up to a power of two, lossless in kernels that use bf16")
    keep_unquantized: list[str] = option(list, "glob patterns of modules to leave as they are: '*.layers.0.*'")
    export: Layout = option(Layout.compressed_tensors, "names and config of the written tensors")
    weight_only_config: bool = option(
        False, "a config that never quantizes activations (W4A16_NVFP4); leaves out the calibrated input scales"
    )
    calibration: Text = option(Text, "text the Hessians are made from")
    evaluation: Evaluation = option(Evaluation, "held-out text for perplexity and KL of the written files")
    gate: Gate = option(Gate, "quality the written files must have")
    compute: Compute = option(Compute, "where and how")
    wandb: Wandb = option(Wandb, "experiment tracking")


@dataclass
class Verify:
    directory: str = option(REQUIRED, "the NVFP4 checkpoint, in either layout, ours or another tool's")
    reference: str | None = option(None, "the source model: adds perplexity, KL and top-1 agreement")
    trust_remote_code: bool = option(False, "run the modelling code that the model directories bring")
    scheme: Scheme = option(Scheme.w4a16, "whose figures the gate looks at: w4a16 weights only, w4a4 activations too")
    evaluation: Evaluation = option(Evaluation, "held-out text")
    gate: Gate = option(Gate, "quality the checkpoint must have")
    compute: Compute = option(Compute, "where and how")


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
