"""python -m runtime_patch.launch --model MODEL [--draft DRAFT] [any flag of SGLang's server]

Checks both directories, says what it switches on and why, and starts sglang.launch_server with the flags and the
environment they need. A flag of SGLang's that is given is left as it is.
"""

import argparse
import importlib.util
import os
import shlex
import sys

from runtime_patch.artifacts import Artifact, check_pair, read_artifact
from runtime_patch.features import Machine, check_version, chosen, state_lines, this_machine
from soar_prep.errors import UserError

DEPTH, WIDTH, CANDIDATES = 7, 4, 15  # for one request; SGLang's own adaptive depth takes chains alone
BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    options, others = parser().parse_known_args(arguments)
    try:
        command, environment, lines = prepare(options, others, this_machine())
    except UserError as error:
        print(f"runtime_patch: {error}", file=sys.stderr)
        return BAD_INPUT
    shown = [*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)]
    print(*lines, " \\\n  ".join(shown), sep="\n", flush=True)
    if not options.dry_run:
        os.execve(sys.executable, [sys.executable, *command[1:]], os.environ | environment)
    return 0


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(
        "python -m runtime_patch.launch",
        description="Serve what soar-prep wrote, in SGLang. All other flags go to sglang.launch_server.",
        allow_abbrev=False,
    )
    own.add_argument("--model", required=True, help="directory of the model, NVFP4 or dense")
    own.add_argument("--draft", help="directory of its EAGLE-3 draft, NVFP4 or BF16")
    own.add_argument("--features", default="1", help="names with commas, 0 for none; all that this machine can")
    own.add_argument("--any-sglang", action="store_true", help="try a version that the patch was not tested with")
    own.add_argument("--dry-run", action="store_true", help="print the command, start nothing")
    return own


def prepare(
    options: argparse.Namespace, others: list[str], machine: Machine
) -> tuple[list[str], dict[str, str], list[str]]:
    """(the command, its environment, what to tell). UserError for anything that would not be served right."""
    check_version(machine, options.any_sglang)
    model = read_artifact("--model", options.model)
    draft = None if options.draft is None else read_artifact("--draft", options.draft)
    if draft is not None:
        check_pair(model, draft)
    artifacts = [model, *([draft] if draft else [])]
    features, notes = features_for(artifacts, options.features, machine)
    check_gpu(machine, artifacts, features)
    flags = model_flags(model, machine) | (draft_flags(model, draft) if draft else {})
    environment, more = model_environment(model, machine)
    if features:
        environment["SOAR_PATCH"] = ",".join(features)
    if features and options.any_sglang:
        environment["SOAR_PATCH_ANY_SGLANG"] = "1"
    given = {word.partition("=")[0] for word in others if word.startswith("--")}
    mine = [word for flag, value in flags.items() if flag not in given for word in (flag, value)]
    lines = [f"{name:11} {artifact}" for name, artifact in zip(("model", "draft"), artifacts, strict=False)]
    lines += [f"note        {note}" for note in notes + more] + state_lines(machine, features)
    return ["python", "-m", "sglang.launch_server", *mine, *others], environment, lines


def features_for(artifacts: list[Artifact], asked: str, machine: Machine) -> tuple[list[str], list[str]]:
    """(names of those asked for that concern these artifacts, what to tell of the others)."""
    names, notes = [], []
    for feature in [] if asked == "0" else chosen(asked, machine, "--features"):
        if feature.name == "nvfp4" and not any(a.method == "modelopt" for a in artifacts):
            if any(a.method for a in artifacts):
                notes.append("nvfp4 leaves compressed-tensors files to SGLang; soar-prep quantize export=modelopt")
        elif artifacts[0].is_sala or not feature.only_sala:
            names.append(feature.name)
    return names, notes


def check_gpu(machine: Machine, artifacts: list[Artifact], features: list[str]) -> None:
    if any(a.method for a in artifacts) and machine.capability is not None and machine.capability < (8, 0):
        raise UserError(f"{machine.gpu} is sm_{''.join(map(str, machine.capability))}; NVFP4 is served from sm_80 on")
    if any(a.method for a in artifacts) and machine.gpu is None and "nvfp4" not in features:
        raise UserError(
            "SGLang has no NVFP4 linears for a CPU, and the patch those of ModelOpt's layout alone; expected files by "
            "soar-prep quantize export=modelopt, and the feature nvfp4"
        )


def model_flags(model: Artifact, machine: Machine) -> dict[str, str]:
    flags = {"--model-path": str(model.directory)}
    if model.method == "modelopt":
        flags["--quantization"] = "modelopt_fp4"
    if machine.gpu is None:
        flags |= {"--device": "cpu", "--attention-backend": "torch_native"}
    elif model.is_sala and not has_sparse_kernels():
        flags["--attention-backend"] = "triton"
    return flags


def model_environment(model: Artifact, machine: Machine) -> tuple[dict[str, str], list[str]]:
    environment, notes = {}, []
    if machine.gpu is None:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    if model.is_sala and not has_sparse_kernels():
        environment["SGLANG_MINICPM_FORCE_DENSE"] = "1"
        dense = (model.config.get("sparse_config") or {}).get("dense_len")
        notes.append(
            "SGLang's sparse attention needs sgl_kernel's infllmv2_attn_stage1, which is not here: attention is dense, "
            f"and a context above {dense} tokens gives other outputs than the model was trained for"
        )
    return environment, notes


def has_sparse_kernels() -> bool:
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    import sgl_kernel

    return hasattr(sgl_kernel, "infllmv2_attn_stage1")


def draft_flags(model: Artifact, draft: Artifact) -> dict[str, str]:
    flags = {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(draft.directory),
        "--speculative-num-steps": str(DEPTH),
        "--speculative-eagle-topk": str(WIDTH),
        "--speculative-num-draft-tokens": str(CANDIDATES),
    }
    if draft.method is not None:
        flags["--speculative-draft-model-quantization"] = "modelopt_fp4"
    elif model.method is not None:  # without a word a draft is taken for quantized as its target is
        flags["--speculative-draft-model-quantization"] = "unquant"
    return flags


if __name__ == "__main__":
    sys.exit(main())
