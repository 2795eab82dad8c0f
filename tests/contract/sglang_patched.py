"""SGLang 0.5.21 with soar-prep's patch: its Engine and its server, on the CPU, on a small MiniCPM-SALA in NVFP4.

Off, the patch must be as if it were not there. On, each feature by itself and all together, the Engine must still say
what soar-prep's own model says, to rounding in fp32. That a feature really ran shows where it must: SGLang itself has
no NVFP4 linear for a CPU, so without `nvfp4` the model is not served; other features leave a mark, which is counted.
`python -m runtime_patch.launch` must start a server that answers the same, and refuse what would be served wrong. An
SGLang whose methods take other parameters must be refused: every hook is put in, called by SGLang, and taken out.

Run by `make contract`; fails by an exception.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import sala_checkpoint
from sglang_sala_engine import (
    CHUNK,
    NEW_TOKENS,
    PLACES,
    TOLERANCE,
    answer_in_sglang,
    compare,
    our_model,
    write_requests,
)

from runtime_patch import hooks
from runtime_patch.features import FEATURES

PLUGINS = "contract,contract_float32,soar_prep"  # not contract_kernels: NVFP4 linears are the patch's own
STANDARD = "contract,contract_kernels,contract_float32"


def check_hooks() -> None:
    """Catches a hook of another signature, and one that stays when the patch is taken out."""
    places = {hook.target: hooks.place_of(hook.target) for hook in hooks.HOOKS}
    before = {target: owner.__dict__[name] for target, (owner, name) in places.items()}
    names = hooks.enable()
    assert names == [feature.name for feature in FEATURES], names
    for target, (owner, name) in places.items():
        assert owner.__dict__[name] is not before[target], f"{target} is not replaced"
    hooks.disable()
    for target, (owner, name) in places.items():
        assert owner.__dict__[name] is before[target], f"{target} is not SGLang's own again"
    print(f"{len(places)} hooks of {', '.join(names)}: put in, and SGLang's own again")


def check_engine(folder: Path, prompts: list[list[int]]) -> None:
    """Catches a feature that serves another model, and one that changes anything while it is off."""
    plain = tokens_of(answer_in_sglang(folder, folder / "nvfp4", "float32", "cpu", {"SGLANG_PLUGINS": STANDARD}))
    idle = {"SGLANG_PLUGINS": STANDARD + ",soar_prep"}
    assert tokens_of(answer_in_sglang(folder, folder / "nvfp4", "float32", "cpu", idle)) == plain, "changed while off"
    model = our_model(folder / "nvfp4", "float32")
    features = [feature.name for feature in FEATURES if feature.name != "nvfp4"]
    for asked in ("nvfp4", *(f"nvfp4,{name}" for name in features), "1"):
        variables = {"SOAR_PATCH": asked, "SGLANG_PLUGINS": PLUGINS}
        answers = answer_in_sglang(folder, folder / "nvfp4", "float32", "cpu", variables)
        found = compare(model, prompts, answers)
        print(f"SOAR_PATCH={asked}: {found}", flush=True)
        assert found.holds(TOLERANCE["float32"]), "the patch serves another model"
        assert [tokens for tokens, _ in tokens_of(answers)] == [tokens for tokens, _ in plain]


def tokens_of(answers: list[dict]) -> list[tuple[list[int], list[float]]]:
    """Each answer's tokens and their log-probabilities."""
    return [(a["output_ids"], [each[0] for each in a["meta_info"]["output_token_logprobs"]]) for a in answers]


def check_refusals(folder: Path) -> None:
    """Catches a launcher that starts what cannot be served."""
    model = str(folder / "nvfp4")
    for wrong, words in (
        (["--model", str(folder / "none")], "no such directory"),
        (["--model", model, "--draft", model], "expected a draft"),
        (["--model", model, "--features", "0"], "no NVFP4 linears for a CPU"),
        (["--model", model, "--features", "speed"], "no feature speed"),
    ):
        ran = launch([*wrong, "--dry-run"])
        assert ran.returncode == 2, ran
        assert words in ran.stderr, ran.stderr
        assert ran.stderr.count("\n") == 1, ran.stderr
        print(f"refused: {ran.stderr.strip()}")


def launch(arguments: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "runtime_patch.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def check_server(folder: Path, prompts: list[list[int]]) -> None:
    """Catches flags or an environment with which a server does not come up, or serves something else."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = (
        f"--port {port} --dtype float32 --sampling-backend pytorch --grammar-backend none --skip-tokenizer-init "
        "--skip-server-warmup --max-total-tokens 2048 --context-length 512 --mem-fraction-static 0.3 "
        f"--disable-cuda-graph --chunked-prefill-size {CHUNK} --max-running-requests {PLACES} "
        f"--max-mamba-cache-size {PLACES}"
    ).split()
    command = [sys.executable, "-m", "runtime_patch.launch", "--model", str(folder / "nvfp4"), *flags]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1", "SGLANG_PLUGINS": PLUGINS}
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(server, f"{address}/health", folder / "server.log")
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        asked = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        request = urllib.request.Request(
            f"{address}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = compare(our_model(folder / "nvfp4", "float32"), prompts, json.loads(answer.read()))
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    print(f"runtime_patch.launch: {found}")
    assert found.holds(TOLERANCE["float32"]), "the server serves another model"


def wait_for(server: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended by itself:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")


def main(folder: Path) -> None:
    sala_checkpoint.make(folder)
    prompts = write_requests(folder)
    check_hooks()
    check_refusals(folder)
    check_engine(folder, prompts)
    check_server(folder, prompts)


if __name__ == "__main__":
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
    print(f"contract: SGLang 0.5.21 serves the same model with the patch ({time.perf_counter() - begin:.0f} s)")
