"""soar-prep <command> option=value ...: pick the command, compose its settings, call one function."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from soar_prep.errors import CheckFailed, UserError
from soar_prep.settings import (
    Capture,
    Compute,
    Quantize,
    Selftest,
    TrainDraft,
    Verify,
    check_ranges,
    manual,
    option_names,
)

BAD_INPUT, CHECK_FAILED, INTERRUPTED = 2, 3, 130


@dataclass(frozen=True)
class Command:
    settings: type
    run: Callable[[Any], None]
    summary: str
    example: str
    short: str  # which option groups may be given by the name of their source, if any


def run_quantize(settings: Quantize) -> None:
    from soar_prep.gptq.quantize import quantize  # after the settings are known to be right: this imports torch

    prepare(settings.compute)
    output = quantize(settings)
    print(f"wrote {output}\nreport: {output / 'report.html'}\ncheck it again: soar-prep verify {output}")


def run_capture(settings: Capture) -> None:
    from soar_prep.eagle3.capture import capture

    prepare(settings.compute)
    output = capture(settings)
    if not settings.dry_run:
        print(
            f"wrote {output}\ntrain from it: soar-prep train-draft target={settings.target} states={output} output=..."
        )


def run_train_draft(settings: TrainDraft) -> None:
    from soar_prep.eagle3.train import train_draft

    prepare(settings.compute)
    output = train_draft(settings)
    print(f"wrote {output}\nreport: {output / 'report.html'}")


def run_verify(settings: Verify) -> None:
    from soar_prep.verify import verify

    prepare(settings.compute)
    verify(settings)


def run_selftest(settings: Selftest) -> None:
    from soar_prep.selftest import selftest

    selftest(settings)


def prepare(compute: Compute) -> None:
    import torch
    import transformers

    if compute.threads:
        torch.set_num_threads(compute.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


COMMANDS = {
    "quantize": Command(
        Quantize,
        run_quantize,
        "a Hugging Face causal LM in, an NVFP4 checkpoint and its report out",
        "soar-prep quantize model=HuggingFaceTB/SmolLM2-135M-Instruct output=out/smollm2-nvfp4\n"
        "  soar-prep quantize model=/models/m output=/models/m-nvfp4 calibration=chat calibration.path=chats.jsonl",
        "calibration=chat (builtin, text, tokens) and evaluation=... are",
    ),
    "train-draft": Command(
        TrainDraft,
        run_train_draft,
        "a target and conversations in, an EAGLE-3 draft for speculative decoding out",
        "soar-prep train-draft target=/models/m data.path=chats.jsonl output=/models/m-draft\n"
        "  accelerate launch -m soar_prep.cli train-draft target=/models/m states=/states/m output=/models/m-draft",
        "qat=nvfp4 is short for qat.format=nvfp4; data=builtin (chat, text, tokens) is",
    ),
    "capture": Command(
        Capture,
        run_capture,
        "a target's hidden states on disk, to train several drafts without running it again",
        "soar-prep capture target=/models/m data.path=chats.jsonl output=/states/m",
        "data=builtin (chat, text, tokens) is",
    ),
    "verify": Command(
        Verify,
        run_verify,
        "check an NVFP4 checkpoint: structure always, quality if a reference is given",
        "soar-prep verify out/smollm2-nvfp4 reference=HuggingFaceTB/SmolLM2-135M-Instruct gate.max_kl=0.1",
        "evaluation=chat (builtin, text, tokens) is",
    ),
    "selftest": Command(
        Selftest,
        run_selftest,
        "compare every kernel that this device can run with the plain-torch truth",
        "soar-prep selftest device=cuda:0",
        "",
    ),
}


def main() -> int:
    """Run one command; 0 well, 2 the user's input, 3 a bad checkpoint or kernel, 130 interrupted."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else BAD_INPUT
    name = arguments[0]
    if name not in COMMANDS:
        return fail(f"{name}: no such command{suggestion(name, COMMANDS)}; there are {', '.join(COMMANDS)}")
    try:
        run_command(name, arguments[1:])
    except UserError as error:
        return fail(str(error))
    except CheckFailed as error:
        print(f"soar-prep: {error}", file=sys.stderr)
        return CHECK_FAILED
    except (HydraException, OmegaConfBaseException) as error:
        return fail(explain(error, COMMANDS[name].settings))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}; finished layers are kept, the same command resumes")
    except KeyboardInterrupt:
        print("\nsoar-prep: interrupted; the same command resumes", file=sys.stderr)
        return INTERRUPTED
    return 0


def run_command(name: str, overrides: list[str]) -> None:
    command, config_name = COMMANDS[name], name.replace("-", "_")
    if name == "verify" and overrides and "=" not in overrides[0] and not overrides[0].startswith("-"):
        overrides = [f"directory={overrides[0]}", *overrides[1:]]
    for word in overrides:
        option = word.lstrip("-").split("=")[0]
        if word.startswith("-") and option in option_names(command.settings):
            raise UserError(f"{word}: options have no dashes; write {option}=value")
    store = ConfigStore.instance()
    store.store(name=f"{config_name}_schema", node=command.settings)
    store.store(group="hydra/help", name=config_name, node={"app_name": "soar-prep", "template": manual_page(name)})
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors come through to `main`, which prints one line for each
    sys.argv = [f"soar-prep {name}", *overrides]

    failures: list[Exception] = []  # Hydra prints a preamble of its own for what a job raises

    @hydra.main(version_base="1.3", config_path=str(config_directory()), config_name=config_name)
    def task(config: Any) -> None:
        try:
            refuse_unknown(config, option_names(command.settings))
            missing = sorted(OmegaConf.missing_keys(config))
            if missing:
                raise UserError(f"{missing[0]}: required; for example {command.example.splitlines()[0]}")
            settings: Any = OmegaConf.to_object(config)
            check_ranges(settings)
            command.run(settings)
        except (UserError, CheckFailed, OSError, OmegaConfBaseException) as error:
            failures.append(error)

    task()
    if failures:
        raise failures[0]
    leave_processes()


def leave_processes() -> None:
    """Left to the interpreter's end, the threads of a process group now and then abort a run that went well.

    The barrier lets go of the interpreter's lock, for which such a thread may wait to drop a collective's last tensor:
    taken apart with the lock held, the group would wait for that thread for ever.
    """
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()
            distributed.destroy_process_group()


def config_directory() -> Path:
    """configs/ of the installed package, or of the checkout; always absolute."""
    here = Path(__file__).resolve().parent
    packaged = here / "configs"  # looked for first: beside an installed package another one may have its own configs/
    return packaged if packaged.is_dir() else here.parent / "configs"


def overview() -> str:
    lines = ["usage: soar-prep COMMAND option=value ...", ""]
    lines += [f"  {name:12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "soar-prep COMMAND --help lists every option."])


def manual_page(name: str) -> str:
    command = COMMANDS[name]
    short = f"{command.short} short for their .source.\n" if command.short else ""
    text = (
        f"soar-prep {name}: {command.summary}\n\n  {command.example}\n\n"
        f"Options, as option=default:\n\n{manual(command.settings)}\n\n"
        f"{short}--cfg job prints the composed settings, --multirun runs every combination of comma-separated values.\n"
        "Exit codes: 0 done, 2 bad input, 3 the checkpoint is broken or above gate.max_kl, or a kernel is wrong."
    )
    return text.replace("$", "$$")


def refuse_unknown(config: Any, known: list[str], prefix: str = "") -> None:
    """UserError for an option that no settings class has; `+name=value` gets past Hydra's own check."""
    for key in config:
        name = f"{prefix}{key}"
        if name not in known:
            raise UserError(f"{name}: no such option{suggestion(name, known)}; see --help")
        if not OmegaConf.is_missing(config, key) and OmegaConf.is_dict(config[key]):
            refuse_unknown(config[key], known, f"{name}.")


def explain(error: Exception, settings: type) -> str:
    """One line for an override that Hydra or OmegaConf refused."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form option=value; quote values with special characters; see --help"
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        key = unknown.group(1)
        return f"{key}: no such option{suggestion(key, option_names(settings))}; see --help"
    value = re.search(r"override (\S+=\S*) (.*?)(?: full_key:|$)", text)
    if value:
        return f"{value.group(1)}: {value.group(2)}; see --help"
    group = re.search(r"Could not find '([^'/]+)/([^']+)' Available options in '[^']+': (.*?) Config search", text)
    if group:
        return f"{group.group(1)}={group.group(2)}: expected one of {group.group(3)}; see --help"
    return f"{text}; see --help"


def suggestion(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}" if close else ""


def fail(message: str) -> int:
    print(f"soar-prep: {message}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
