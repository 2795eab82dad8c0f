"""A Hugging Face model directory: reading one tensor at a time, and writing one that is never half there.

A run writes to `<output>.partial` and renames it at the end, so `<output>` either is complete or does not exist.
Each part (one decoder layer, or the rest of the model) is one shard plus one record, a JSON file that names the
shard's sha256 and is written after it: a part counts as done only when both agree. Started again with the same
identity, a run takes up the parts that are done; with another, it refuses.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from soar_prep.errors import UserError

INDEX = "model.safetensors.index.json"
PIECE = 1 << 24  # bytes read at once
FLOATS = {  # as safetensors spells them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SINGLE = "model.safetensors"


class Checkpoint:
    """Read side: config and tensors of a directory, by name, each read from disk when asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = read_json(directory / "config.json")
        self.files = self._weight_map()
        self._open: dict[str, Any] = {}

    def _weight_map(self) -> dict[str, str]:
        if (self.directory / INDEX).exists():
            weight_map = read_json(self.directory / INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(
                    f"{self.directory / INDEX}: no weight_map; the file is damaged, download the model again"
                )
            for file in sorted(set(weight_map.values())):
                if not (self.directory / file).exists():
                    raise UserError(f"{self.directory / file}: named in {INDEX} but missing; download the model again")
            return weight_map
        if (self.directory / SINGLE).exists():
            with open_shard(self.directory / SINGLE) as shard:
                return dict.fromkeys(shard.keys(), SINGLE)
        raise UserError(
            f"{self.directory}: neither {INDEX} nor {SINGLE} is there; only safetensors checkpoints are read, "
            "convert others with transformers' save_pretrained"
        )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shard(self, name: str) -> Any:
        file = self.files[name]
        if file not in self._open:
            self._open[file] = open_shard(self.directory / file)
        return self._open[file]

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.shard(name).get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(name, error) from None

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.files if name.startswith(prefix))

    def dtype_and_shape(self, name: str) -> tuple[str, list[int]]:
        """From the file's header alone, as safetensors spells it: ("BF16", [576, 576])."""
        try:
            view = self.shard(name).get_slice(name)
        except SafetensorError as error:
            raise self._damaged(name, error) from None
        return view.get_dtype(), view.get_shape()

    def _damaged(self, name: str, error: Exception) -> UserError:
        return UserError(f"{self.directory / self.files[name]}: {name}: {error}; the file is damaged")

    def size(self) -> int:
        """Bytes of all shards."""
        return sum((self.directory / file).stat().st_size for file in set(self.files.values()))

    def side_files(self) -> Iterator[Path]:
        """What is neither weights nor their index nor config.json: tokenizer, templates, code, licence.

        Paths relative to the directory, those in its folders too unless a folder is hidden (.git, .cache).
        """
        weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
        for path in sorted(self.directory.rglob("*")):
            inside = path.relative_to(self.directory)
            is_hidden = any(part.startswith(".") for part in inside.parts[:-1])
            is_side = not path.name.endswith(weights) and inside != Path("config.json") and not is_hidden
            if is_side and path.is_file():
                yield inside

    def check_and_hash(self) -> dict[str, str]:
        """Read every shard once: sha256 of each file; a NaN or infinity in any weight is a UserError that names it."""
        files = sorted(set(self.files.values()))
        with ThreadPoolExecutor(max_workers=8) as pool:
            hashes = pool.map(self._check_shard, files)
            return dict(zip(files, hashes, strict=True)) | {"config.json": sha256(self.directory / "config.json")}

    def _check_shard(self, file: str) -> str:
        """Its sha256. Every byte is read once: from a network disk that is what takes the time."""
        path, digest = self.directory / file, hashlib.sha256()
        open_shard(path)  # which checks the header
        with open(path, "rb") as bytes_of:
            size = bytes_of.read(8)
            header = bytes_of.read(int.from_bytes(size, "little"))
            digest.update(size + header)
            tensors = {name: facts for name, facts in json.loads(header).items() if name != "__metadata__"}
            for name, facts in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = facts["data_offsets"]
                dtype = FLOATS.get(facts["dtype"])
                for piece in pieces(bytes_of, end - begin):
                    digest.update(piece)
                    if dtype is not None and not has_only_finite(torch.frombuffer(piece, dtype=dtype)):
                        raise UserError(f"{name} in {path}: holds NaN or infinity; the weights are damaged")
        return digest.hexdigest()


def pieces(file: BinaryIO, size: int) -> Iterator[memoryview]:
    """The next `size` bytes, a part at a time, in a buffer that is used again."""
    buffer = memoryview(bytearray(min(size, PIECE)))
    while size > 0:
        count = file.readinto(buffer[:size])  # type: ignore[attr-defined]
        if not count:
            return
        yield buffer[:count]
        size -= count


def find_model(model: str, option: str = "model") -> Path:
    """Local directory of a model: `model` itself, or a snapshot of that hub id. UserError, with the option's name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")):
        raise UserError(f"{option}={model}: no such directory; give a Hugging Face model directory or a hub id")
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.py", "*.jinja", "LICENSE*"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{option}={model}: not a directory here, and the hub did not give it ({reason}); "
            "check the name, the network and `hf auth login`"
        ) from None


class PartialOutput:
    """Write side: `<output>.partial`, resumable part by part, renamed to `<output>` by `finish`."""

    def __init__(self, output: Path, identity: dict[str, Any], parts: int, stem: str = "model"):
        output = output.expanduser()
        self.output = output
        self.directory = partial_directory(output)
        self.parts, self.stem = parts, stem
        refuse_existing(output)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign()
            self._lock = open(self.directory / "lock", "w")  # noqa: SIM115 (held while the run lasts)
        except OSError as error:
            raise UserError(
                f"output={output}: cannot be written ({error.strerror}); choose another directory"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"output={output}: another run is writing {self.directory}; wait for it or stop it"
            ) from None
        self._keep_or_check_identity(identity)
        self._behind = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    @classmethod
    def joined(cls, output: Path, parts: int, stem: str = "model") -> "PartialOutput":
        """The directory for another process of the run that opened it: to write other parts, not to finish."""
        self = cls.__new__(cls)
        self.output, self.directory, self.parts, self.stem = output, partial_directory(output), parts, stem
        return self

    def _refuse_foreign(self) -> None:
        names = sorted(path.name for path in self.directory.iterdir())
        foreign = [name for name in names if name not in ("lock", "identity.json.tmp")]
        if foreign and "identity.json" not in names:
            raise UserError(
                f"{self.directory}: holds {foreign[0]}, which no run of this program began; "
                "move the directory away or choose another output"
            )

    def _keep_or_check_identity(self, identity: dict[str, Any]) -> None:
        path = self.directory / "identity.json"
        if not path.exists():
            write_json(path, identity)
            return
        begun = read_json(path)
        changed = [key for key in identity if identity[key] != begun.get(key)]
        if changed:
            raise UserError(
                f"{self.directory}: an interrupted run with another {', '.join(changed)}; give the same options to "
                "resume it, or remove the directory to start anew"
            )

    def shard_name(self, part: int) -> str:
        return f"{self.stem}-{part + 1:05d}-of-{self.parts:05d}.safetensors"

    def record(self, part: int) -> dict[str, Any] | None:
        """What `write` kept beside a part, or None if the part is not there whole."""
        path, shard = self.directory / f"part-{part:05d}.json", self.directory / self.shard_name(part)
        if not path.exists() or not shard.exists():
            return None
        kept = read_json(path)
        return kept["record"] if kept["sha256"] == sha256(shard) else None

    def read(self, part: int) -> dict[str, Tensor]:
        with open_shard(self.directory / self.shard_name(part)) as shard:
            return {name: shard.get_tensor(name) for name in shard.keys()}

    def write(self, part: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write one part: the shard, then its record. OSError (disk full, say) leaves the finished parts intact."""
        payload = save({name: t.contiguous().cpu() for name, t in tensors.items()}, metadata={"format": "pt"})
        write_atomically(self.directory / self.shard_name(part), payload)
        shapes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
        kept = {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": shapes, "record": record}
        write_json(self.directory / f"part-{part:05d}.json", kept)

    def write_behind(self, part: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """`write` while the caller goes on, one part at a time; what goes wrong is raised by the next call."""
        self.wait()
        self._pending = self._behind.submit(self.write, part, {name: t.cpu() for name, t in tensors.items()}, record)

    def wait(self) -> None:
        """Until all parts are on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def written(self) -> list[dict[str, Any]]:
        """Of every part its file's name, sha256 and record: `finish` drops them."""
        kept = [read_json(self.directory / f"part-{part:05d}.json") for part in range(self.parts)]
        return [{"file": self.shard_name(part)} | each for part, each in enumerate(kept)]

    def complete(self, config: dict[str, Any], source: Checkpoint, extra: dict[str, dict[str, Any]]) -> None:
        """Write index, config.json, `extra` JSON files and the source's side files: all but the final name."""
        self.wait()
        weight_map: dict[str, str] = {}
        total = 0
        for part in range(self.parts):
            sizes = read_json(self.directory / f"part-{part:05d}.json")["bytes"]
            weight_map |= dict.fromkeys(sizes, self.shard_name(part))
            total += sum(sizes.values())
        for path in source.side_files():
            (self.directory / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.directory / path, self.directory / path)
        for name, content in extra.items():
            write_json(self.directory / name, content)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self.directory / INDEX, index)
        write_json(self.directory / "config.json", config)

    def add_json(self, name: str, content: dict[str, Any]) -> None:
        write_json(self.directory / name, content)

    def finish(self) -> None:
        """Give the directory its final name and drop what only a resume needs: in this order, or a kill between
        the two would leave a directory that can be neither resumed nor used."""
        refuse_existing(self.output)
        os.rename(self.directory, self.output)
        for path in [*self.output.glob("part-*.json"), self.output / "identity.json", self.output / "lock"]:
            path.unlink()
        self._lock.close()


def partial_directory(output: Path) -> Path:
    """Where a run writes until all is there."""
    output = output.expanduser()
    return output.with_name(output.name + ".partial")


def refuse_existing(output: Path) -> None:
    if output.expanduser().exists():
        raise UserError(f"output={output}: exists already; choose another directory or remove it")


def has_only_finite(tensor: Tensor) -> bool:
    """False if any element is NaN or infinite; works for float8 too, which has no isfinite."""
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error}); download or write it again") from None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 24):
            digest.update(chunk)
        return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; is {path.parent} a Hugging Face model directory?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}); the file is damaged") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_atomically(path: Path, payload: bytes) -> None:
    """The file holds all of `payload` or is not there, also after a power cut. OSError names it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # on a full disk half a shard is in the way
        raise OSError(error.errno, error.strerror, str(path)) from None
