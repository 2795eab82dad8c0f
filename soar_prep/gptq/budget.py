"""What a run will take, before it begins: memory of the device and the host, and disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from accelerate import PartialState

from soar_prep.checkpoint import Checkpoint
from soar_prep.errors import UserError
from soar_prep.gptq.layers import LayerPlan
from soar_prep.settings import Memory, Quantize
from soar_prep.streaming import StreamedModel, linears_of
from soar_prep.text import Windows

GIB = 2**30


@dataclass(frozen=True)
class Budget:
    """Bytes. On a machine without a GPU `device` is main memory and holds the activations as well."""

    activations: int  # hidden states of this process's calibration windows, and what is kept of a layer beside them
    layer: int  # one decoder layer, as read and as quantized
    hessians: int  # of one layer, and the workspace of the largest solve
    rest: int  # embeddings, last norm, head
    forward: int  # one batch inside a layer, or its logits
    output: int  # the checkpoint on disk, less what an interrupted run has written
    device_free: int
    host_free: int
    disk_free: int
    on_gpu: bool
    is_low: bool  # activations stay in main memory even if the GPU could hold them

    @property
    def device(self) -> int:
        return self.layer + self.hessians + self.rest + self.forward

    @property
    def keep_activations_on_gpu(self) -> bool:
        return self.on_gpu and not self.is_low and self.device + self.activations < 0.9 * self.device_free

    def lines(self) -> list[str]:
        """The budget as a person reads it."""
        parts = "layer {} + Hessians {} + embeddings and head {} + forward {}".format(
            *(gib(n) for n in (self.layer, self.hessians, self.rest, self.forward))
        )
        where = "GPU" if self.on_gpu else "main memory"
        held = "GPU" if self.keep_activations_on_gpu else "main memory"
        return [
            f"{where}: {parts} = {gib(self.device)} (free: {gib(self.device_free)})",
            f"activations: {gib(self.activations)} in the {held} (main memory free: {gib(self.host_free)})",
            f"disk: {gib(self.output)} (free: {gib(self.disk_free)})",
        ]

    def check(self) -> None:
        """UserError, with numbers and the option to turn, if it cannot fit."""
        on_host = 0 if self.keep_activations_on_gpu else self.activations
        if not self.on_gpu:
            on_host += self.device
        elif self.device > self.device_free:
            raise UserError(
                f"GPU memory: {gib(self.device)} needed beside the activations, {gib(self.device_free)} free; "
                "lower compute.batch_tokens or use compute.device=cpu"
            )
        if on_host > self.host_free:
            raise UserError(
                f"main memory: {gib(on_host)} needed, {gib(self.host_free)} free; activations take "
                f"{gib(self.activations)}: lower calibration.samples, calibration.length or compute.batch_tokens"
            )
        if self.output > self.disk_free:
            raise UserError(
                f"disk: {gib(self.output)} needed for the output, {gib(self.disk_free)} free; "
                "free some or write the output elsewhere"
            )


def plan_budget(
    settings: Quantize, checkpoint: Checkpoint, model: StreamedModel, plan: LayerPlan, windows: Windows
) -> Budget:
    """Budget of a run; `plan` is the first layer's, and stands for all of them."""
    layer = model.layers[0]
    linears = linears_of(layer)
    item = torch.empty(0, dtype=model.dtype).element_size()
    layer_elements = sum(p.numel() for p in layer.parameters())
    widths = [linears[group[0]].in_features for group in plan.groups]
    heights = [sum(linears[name].out_features for name in group) for group in plan.groups]
    largest_solve = max(((4 * k * k + 8 * n * k) * 4 for k, n in zip(widths, heights, strict=True)), default=0)
    # Corrected targets: the source's hidden states as well, of both what the attention gives; a drift beside a
    # Hessian, but one group of linears at a time.
    states = 4 if settings.corrects_targets else 1
    hessians = 8 * max(widths, default=0) ** 2 if settings.corrects_targets else sum(4 * k * k for k in widths)
    text_config = model.model.config.get_text_config()
    batch = max(settings.compute.batch_tokens, windows.token_ids.shape[1])
    width = 6 * model.hidden_size + 3 * getattr(text_config, "intermediate_size", 4 * model.hidden_size)
    in_layers = {name for name in checkpoint.files if name.startswith(model.layers_name + ".")}
    elements = {name: torch.Size(checkpoint.dtype_and_shape(name)[1]).numel() for name in checkpoint.files}
    rest = sum(n for name, n in elements.items() if name not in in_layers)
    quantized = sum(linears[name].weight.numel() for group in plan.groups for name in group) * len(model.layers)
    on_gpu = model.device.type == "cuda"
    host_free = psutil.virtual_memory().available
    output = Path(settings.output).expanduser()
    existing = next(p for p in (output, *output.absolute().parents) if p.exists())
    written = sum(p.stat().st_size for p in output.with_name(output.name + ".partial").glob("*.safetensors"))
    return Budget(
        activations=states * windows.token_ids.numel() * model.hidden_size * item // PartialState().num_processes,
        layer=2 * layer_elements * item,
        hessians=hessians + largest_solve,
        rest=rest * item,
        forward=max(batch * width * item, 3 * 512 * text_config.vocab_size * 4),
        output=(sum(elements.values()) - quantized) * 2 + int(quantized * (0.5 + 1 / 16)) - written,
        device_free=torch.cuda.mem_get_info(model.device)[0] if on_gpu else host_free,
        host_free=host_free,
        disk_free=shutil.disk_usage(existing).free,
        on_gpu=on_gpu,
        is_low=settings.memory is Memory.low,
    )


def gib(n: float) -> str:
    return f"{n / GIB:.2f} GiB"
