"""What the patch replaces in SGLang, in one table, and how that is put in and taken out again.

A replacement is called with the original before the arguments, `replacement(original, *arguments)`, and so may fall
back to it. Its parameters are those of the original, by name: an SGLang that changed them is refused, not served wrong.
"""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pkgutil import resolve_name
from typing import Any

from runtime_patch.features import check_version, chosen, this_machine
from soar_prep.errors import UserError


@dataclass(frozen=True)
class Hook:
    """feature: that it serves. target: a method in SGLang, "module:Class.method". replacement: "module:function"."""

    feature: str
    target: str
    replacement: str
    reason: str


MODELOPT = "sglang.srt.layers.quantization.modelopt_quant:ModelOptFp4"
HOOKS = (
    Hook(
        "nvfp4",
        MODELOPT + "LinearMethod.process_weights_after_loading",
        "runtime_patch.nvfp4:keep_weights",
        "the kernel reads weights and scales as the file has them; SGLang repacks them for one backend",
    ),
    Hook(
        "nvfp4",
        MODELOPT + "LinearMethod.apply",
        "runtime_patch.nvfp4:multiply",
        "the product is chosen by the number of tokens; SGLang has one backend for the process",
    ),
)

_originals: dict[str, Any] = {}


def enable(asked: str = "1") -> list[str]:
    """Put in the hooks of the features asked for (see features.chosen) and name those features.

    SystemExit with one line if it cannot be done: SGLang logs a plugin's Exception and starts without it.
    """
    try:
        machine = this_machine()
        check_version(machine, os.environ.get("SOAR_PATCH_ANY_SGLANG") == "1")
        names = [feature.name for feature in chosen(asked, machine)]
        for hook in HOOKS:
            if hook.feature in names and hook.target not in _originals:
                put_in(hook)
    except UserError as error:
        disable()
        raise SystemExit(f"soar-prep's runtime_patch: {error}") from None
    return names


def disable() -> None:
    """Take all hooks out: SGLang's own objects are in their places again."""
    while _originals:
        target, original = _originals.popitem()
        owner, name = place_of(target)
        setattr(owner, name, original)


def put_in(hook: Hook) -> None:
    owner, name = place_of(hook.target)
    original, replacement = owner.__dict__[name], resolve_name(hook.replacement)
    check_parameters(hook, original, replacement)

    @wraps(original)
    def hooked(*arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    setattr(owner, name, hooked)
    _originals[hook.target] = original


def place_of(target: str) -> tuple[type, str]:
    """(class, the method's name). UserError if this SGLang does not have it."""
    path, _, name = target.rpartition(".")
    try:
        owner = resolve_name(path)
        if name in owner.__dict__:
            return owner, name
    except (ImportError, AttributeError) as error:
        raise UserError(f"{target}: not in this SGLang ({error})") from None
    raise UserError(f"{target}: not in this SGLang")


def check_parameters(hook: Hook, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    theirs = list(inspect.signature(original).parameters)
    ours = list(inspect.signature(replacement).parameters)[1:]
    if theirs[1:] != ours[1:]:  # the first is self, under a name of ours
        raise UserError(f"{hook.target}: takes {theirs} in this SGLang; the patch was made for {ours}")
