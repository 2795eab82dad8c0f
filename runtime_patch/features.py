"""What the patch can do, and what a machine must be for it. Imports no SGLang: a server's start must stay fast."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from soar_prep.errors import UserError

TESTED = ("0.5.21",)  # of SGLang: what hooks.py replaces is internal there, and moves fast


@dataclass(frozen=True)
class Machine:
    """sglang, torch, flashinfer: versions, None if not installed. gpu: its name. capability: of an NVIDIA GPU."""

    sglang: str | None
    torch: str | None
    flashinfer: str | None
    gpu: str | None
    capability: tuple[int, int] | None


def this_machine() -> Machine:
    import torch

    capability = torch.cuda.get_device_capability() if torch.version.cuda and torch.cuda.is_available() else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Machine(installed("sglang"), installed("torch"), installed("flashinfer-python"), gpu, capability)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Feature:
    """name: as SOAR_PATCH takes it. does, without: what is served with it, and what without. obstacle: why a machine
    cannot, None if it can. only_sala: it concerns no other model."""

    name: str
    does: str
    without: str
    obstacle: Callable[[Machine], str | None]
    only_sala: bool = False


def kernels_obstacle(machine: Machine) -> str | None:
    """Of what has a Triton kernel, and a plain-torch truth for CPUs."""
    if machine.gpu is None:
        return None
    if machine.capability is None:
        return f"{machine.gpu} is no NVIDIA GPU; the kernels were compiled for sm_80 and newer"
    if machine.capability < (8, 0):
        return f"{machine.gpu} is sm_{machine.capability[0]}{machine.capability[1]}; the kernels need sm_80 or newer"
    return None if find_spec("triton") else "triton is not installed"


FEATURES = (
    Feature(
        "nvfp4",
        "NVFP4 linears: few tokens by a W4A16 kernel on the plain ModelOpt layout, more by W4A4 where the GPU has "
        "FP4 units, and decoded to BF16 where not",
        "one of SGLang's FP4 backends for all sizes; none on a CPU",
        kernels_obstacle,
    ),
)


def chosen(asked: str, machine: Machine, option: str = "SOAR_PATCH") -> list[Feature]:
    """Of "1" all that the machine can do; of names with commas those. UserError for one unknown or impossible."""
    if asked == "1":
        return [feature for feature in FEATURES if feature.obstacle(machine) is None]
    by_name = {feature.name: feature for feature in FEATURES}
    features = []
    for name in filter(None, asked.split(",")):
        if name not in by_name:
            raise UserError(f"{option} {asked}: no feature {name}; expected 1, or of {', '.join(by_name)}")
        why = by_name[name].obstacle(machine)
        if why is not None:
            raise UserError(f"{option} {asked}: {name} is impossible here: {why}")
        features.append(by_name[name])
    return features


def state_lines(machine: Machine, names: list[str]) -> list[str]:
    """A line for each feature: on, off or impossible, what is served then, and why it is impossible."""
    lines = []
    for feature in FEATURES:
        why = feature.obstacle(machine)
        state = "on" if feature.name in names else "off" if why is None else "impossible"
        text = feature.does if state == "on" else f"{feature.without}" + (f" ({why})" if why else "")
        lines.append(f"{state:11} {feature.name:12} {text}")
    return lines


def check_version(machine: Machine, any_version: bool) -> None:
    """UserError if SGLang is missing or not one of those that the patch was tested with."""
    tested = ", ".join(TESTED)
    if machine.sglang is None:
        raise UserError(f"SGLang is not installed beside soar-prep; the patch was tested with {tested}")
    if machine.sglang not in TESTED and not any_version:
        raise UserError(
            f"SGLang {machine.sglang}: the patch was tested with {tested}; install one of these, or say --any-sglang "
            "(SOAR_PATCH_ANY_SGLANG=1) to try it nevertheless"
        )
