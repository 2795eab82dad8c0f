"""What a server is about to load, checked before it starts: config, headers and scales, no weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.verify import index_problems, structure_problems

DRAFT_CLASS = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Artifact:
    """A model's or a draft's directory that is sound. method: its quantization's, None for dense weights."""

    directory: Path
    config: dict[str, Any]
    method: str | None
    gibibytes: float

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["unknown"])[0]

    @property
    def is_sala(self) -> bool:
        return self.architecture == "MiniCPMSALAForCausalLM"

    def __str__(self) -> str:
        kind = "dense weights" if self.method is None else f"NVFP4 as {self.method} writes it"
        return f"{self.directory}: {self.architecture}, {kind}, {self.gibibytes:.2f} GiB, sound"


def read_artifact(option: str, path: str) -> Artifact:
    """UserError with one line for a directory that is missing, half-written or broken."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise UserError(f"{option} {path}: no such directory; expected what soar-prep wrote")
    checkpoint = Checkpoint(directory)
    quantization = checkpoint.config.get("quantization_config")
    problems = index_problems(checkpoint) if quantization is None else structure_problems(checkpoint)
    if problems:
        more = f" (and {len(problems) - 1} more; see soar-prep verify)" if len(problems) > 1 else ""
        raise UserError(f"{option} {path}: {problems[0]}{more}")
    method = quantization.get("quant_method") if quantization else None
    return Artifact(directory, checkpoint.config, method, checkpoint.size() / 2**30)


def check_pair(model: Artifact, draft: Artifact) -> None:
    """UserError for a draft that was made for another target: it would be served, and never guess right."""
    if draft.architecture != DRAFT_CLASS:
        raise UserError(f"--draft {draft.directory}: {draft.architecture}; expected a draft, {DRAFT_CLASS}")
    if model.is_sala:
        raise UserError(
            "--draft: SGLang 0.5.21 cannot speculate on MiniCPM-SALA, and the patch does not yet add it; leave it away"
        )
    for key in ("hidden_size", "vocab_size"):
        if draft.config.get(key) != model.config.get(key):
            raise UserError(
                f"--draft {draft.directory}: {key} {draft.config.get(key)}, the model has {model.config.get(key)}; "
                "it is a draft for another model"
            )
    layers = draft.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    if not layers or max(layers) >= model.config["num_hidden_layers"]:
        raise UserError(
            f"--draft {draft.directory}: reads layers {layers}, the model has {model.config['num_hidden_layers']}; "
            "it is a draft for another model"
        )
