"""What can be wrong with a checkpoint: damages to its tensors and its config.json, and a copy that has one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors, Config = dict[str, Tensor], dict[str, Any]
Damage = Callable[[Tensors, Config], None]


def drop(name: str) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        del tensors[name]

    return damage


def rename(name: str, new: str) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        tensors[new] = tensors.pop(name)

    return damage


def swap(*pairs: tuple[str, str]) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        for one, other in pairs:
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return damage


def double(name: str) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        tensors[name] *= 2

    return damage


def forget(name: str) -> Damage:
    def damage(tensors: Tensors, config: Config) -> None:
        del config[name]

    return damage


def damaged(directory: Path, damage: Damage, output: Path) -> Path:
    """A copy of a checkpoint, in one file, with the damage done."""
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    config = json.loads((directory / "config.json").read_text())
    damage(tensors, config)
    output.mkdir()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config))
    return output
