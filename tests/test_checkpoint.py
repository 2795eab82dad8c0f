import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soar_prep.checkpoint import INDEX, Checkpoint, PartialOutput, find_model, write_atomically
from soar_prep.errors import UserError

Models = Callable[[str], Path]
Copies = Callable[..., Path]


def test_reads_one_file_and_many_alike(model_directory: Models, tmp_path: Path):
    """Catches a tensor read from the wrong shard, and sizes or types that differ from the data."""
    sharded = model_directory("llama")
    shards = [load_file(path) for path in sorted(sharded.glob("*.safetensors"))]
    assert len(shards) > 1
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for checkpoint in (Checkpoint(sharded), Checkpoint(tmp_path)):
        assert checkpoint.names() == sorted(tensors)
        assert checkpoint.names("model.layers.1.") == sorted(n for n in tensors if n.startswith("model.layers.1."))
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint[name], tensor)
            assert checkpoint.dtype_and_shape(name) == ("BF16", list(tensor.shape))
        assert "no.such.tensor" not in checkpoint
    assert Checkpoint(sharded).size() == sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_hashes_are_those_of_the_files(model_directory: Models):
    """Catches hashes of something else than the bytes: they tell whether two runs read the same model."""
    directory = model_directory("llama")
    names = [path.name for path in directory.glob("*.safetensors")] + ["config.json"]
    expected = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    assert Checkpoint(directory).check_and_hash() == expected


def spoil(directory: Path, how: str) -> None:
    shard, index = directory / "model-00002-of-00002.safetensors", directory / INDEX
    if how == "garbage":
        shard.write_bytes(b"<html>404</html>" * 100)
    elif how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "empty":
        shard.write_bytes(b"")
    elif how == "missing":
        shard.unlink()
    elif how == "index_not_json":
        index.write_text('{"weight_map": {"a')
    elif how == "index_empty":
        index.write_text("{}")
    elif how == "index_lies":
        content = json.loads(index.read_text())
        content["weight_map"]["model.layers.1.extra"] = shard.name
        index.write_text(json.dumps(content))
    elif how == "only_bin":
        for path in [index, *directory.glob("*.safetensors")]:
            path.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"x")
    elif how == "no_config":
        (directory / "config.json").unlink()
    elif how == "config_not_json":
        (directory / "config.json").write_bytes(b"\xff\xfe{")


DAMAGES = {
    "garbage": r"model-00002-of-00002\.safetensors: not a readable safetensors file \(.*download or write it again",
    "truncated": r"model-00002-of-00002\.safetensors: not a readable safetensors file",
    "empty": r"model-00002-of-00002\.safetensors: not a readable safetensors file",
    "missing": r"model-00002-of-00002\.safetensors: named in .*index\.json but missing; download the model again",
    "index_not_json": r"index\.json: not JSON \(.*the file is damaged",
    "index_empty": r"index\.json: no weight_map; the file is damaged",
    "index_lies": r"model-00002-of-00002\.safetensors: model\.layers\.1\.extra: .*the file is damaged",
    "only_bin": "only safetensors checkpoints are read, convert others with transformers' save_pretrained",
    "no_config": r"config\.json: missing; is .* a Hugging Face model directory",
    "config_not_json": r"config\.json: not JSON",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_directory_is_told(how: str, model_copy: Copies):
    """Catches a traceback, or worse a run, on a download that was cut short: every file is named, with the remedy."""
    directory = model_copy("llama")
    assert len(list(directory.glob("*.safetensors"))) == 2
    spoil(directory, how)
    with pytest.raises(UserError, match=DAMAGES[how]) as told:
        read_all(directory)
    assert "\n" not in str(told.value)


def read_all(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    for name in checkpoint.files:
        checkpoint.dtype_and_shape(name)
    checkpoint.check_and_hash()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damaged_weight_is_named(value: float, model_copy: Copies):
    """Catches one NaN among good weights: it would spread through the solve and end in a broken checkpoint."""
    directory = model_copy("mistral")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    tensors["counter"] = torch.tensor([1])  # integers have no NaN
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight in .*: holds NaN or infinity"):
        Checkpoint(directory).check_and_hash()


def test_side_files_are_all_but_weights_and_config(model_copy: Copies):
    """Catches a chat template or modelling code left behind, and gigabytes of other formats copied along."""
    directory = model_copy("mistral")
    for name in ("pytorch_model.bin", "x.gguf", "consolidated.pth", "original.safetensors", "x.index.json", "code.py"):
        (directory / name).write_bytes(b"x")
    for name in ("additional_chat_templates/tools.jinja", "original/params.pth", ".git/config", "parts/config.json"):
        (directory / name).parent.mkdir()
        (directory / name).write_bytes(b"x")
    assert [str(path) for path in Checkpoint(directory).side_files()] == [
        *("LICENSE", "additional_chat_templates/tools.jinja", "chat_template.jinja", "code.py"),
        *("generation_config.json", "parts/config.json", "tokenizer.json", "tokenizer_config.json"),
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./no/such/model", r"model=\./no/such/model: no such directory; give a Hugging Face model directory or a hub"),
        ("~/no/such/model", "no such directory"),
        (__file__, "no such directory"),
        (
            "nobody/nothing",
            r"model=nobody/nothing: not a directory here, and the hub did not give it .*`hf auth login`",
        ),
    ],
)
def test_unknown_model_is_told(model: str, message: str):
    """Catches a misspelt path that is sent to the hub, and a hub failure that is a page of traceback."""
    with pytest.raises(UserError, match=message) as told:
        find_model(model)
    assert "\n" not in str(told.value)


def test_home_directory_is_expanded(model_directory: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Catches a directory named `~` in the working directory: not every shell expands output=~/x."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").symlink_to(model_directory("mistral"))
    assert find_model("~/model").samefile(model_directory("mistral"))
    assert PartialOutput(Path("~/out"), {}, 1).directory == tmp_path / "out.partial"
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        PartialOutput(Path("~/there"), {}, 1)


PARTS = [{"a": torch.arange(3.0)}, {"b": torch.ones(2, 2), "c": torch.zeros(1)}]


def begin(output: Path, **identity: object) -> PartialOutput:
    """A run that has just begun, or was interrupted and begins again."""
    return PartialOutput(output, {"seed": 0, "model": "m"} | identity, parts=len(PARTS))


def test_whole_life_of_an_output(model_directory: Models, tmp_path: Path):
    """Catches leftovers of the run, an index that names the wrong shard, and a size that is not the tensors'."""
    output = begin(tmp_path / "new" / "out")
    for part, tensors in enumerate(PARTS):
        assert output.record(part) is None
        output.write(part, tensors, {"number": part})
        assert output.record(part) == {"number": part}
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in output.read(part).items())
    assert not output.output.exists()
    source = Checkpoint(model_directory("mistral"))
    output.complete({"new": "config"}, source, {"extra.json": {"x": 1}})
    output.add_json("run.json", {"y": 2})
    output.finish()

    side_files = [str(path) for path in source.side_files()]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    written = sorted(path.name for path in output.output.iterdir())
    assert written == sorted([*shards, *side_files, INDEX, "config.json", "extra.json", "run.json"])
    assert json.loads((output.output / INDEX).read_text()) == {
        "metadata": {"total_size": 3 * 4 + 4 * 4 + 4},
        "weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]},
    }
    for name in side_files:
        assert (output.output / name).read_bytes() == (source.directory / name).read_bytes()
    assert not output.directory.exists()


@pytest.mark.parametrize("damage", ["shard_gone", "shard_changed", "shard_short", "record_gone"])
def test_damaged_part_is_not_taken_up(damage: str, tmp_path: Path):
    """Catches a shard that is trusted because it is there: it must be done again, and the other part kept."""
    output = begin(tmp_path / "out")
    for part, tensors in enumerate(PARTS):
        output.write(part, tensors, {"number": part})
    shard = output.directory / output.shard_name(1)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    if damage == "shard_changed":
        shard.write_bytes(content)
    elif damage == "shard_short":
        shard.write_bytes(content[:-1])
    else:
        (shard if damage == "shard_gone" else output.directory / "part-00001.json").unlink()
    assert output.record(0) == {"number": 0}
    assert output.record(1) is None


def test_second_run_waits_its_turn(tmp_path: Path):
    """Catches two runs that write into each other's directory; and a lock that outlives its run."""
    first = begin(tmp_path / "out")
    with pytest.raises(UserError, match=r"another run is writing .*out\.partial; wait for it or stop it"):
        begin(tmp_path / "out")
    first._lock.close()
    begin(tmp_path / "out")


def test_other_settings_do_not_resume(tmp_path: Path):
    """Catches layers of two different runs in one checkpoint: what differs is named."""
    begin(tmp_path / "out")
    with pytest.raises(UserError, match="an interrupted run with another seed, act_order; give the same options to"):
        begin(tmp_path / "out", seed=1, act_order=True)
    begin(tmp_path / "out", seed=0)


@pytest.mark.parametrize("where", ["out", "out.partial"])
def test_foreign_files_are_left_alone(where: str, tmp_path: Path):
    """Catches a run that overwrites what it did not write."""
    (tmp_path / where).mkdir()
    (tmp_path / where / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="exists already" if where == "out" else "holds thesis.tex, which no run"):
        begin(tmp_path / "out")
    assert [path.name for path in (tmp_path / where).iterdir()] == ["thesis.tex"]


def test_output_that_cannot_be_written_is_told(tmp_path: Path):
    """Catches a traceback for an output under a file, or in a place where nothing can be made."""
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file" / "out", Path("/proc/soar-prep")):
        with pytest.raises(UserError, match=rf"output={output}: cannot be written \(.*\); choose another directory"):
            begin(output)


def test_run_that_died_while_it_began_begins_again(tmp_path: Path):
    """Catches a directory that a full disk or a kill made unusable before its identity was written."""
    (tmp_path / "out.partial").mkdir()
    for name in ("lock", "identity.json.tmp"):
        (tmp_path / "out.partial" / name).write_text('{"se')
    output = begin(tmp_path / "out")
    output.write(0, PARTS[0], {})
    assert output.record(0) == {}


def test_run_that_died_at_the_last_moment_can_finish(
    model_directory: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Catches bookkeeping that is dropped before the directory has its name: then nothing could take it up."""
    output = begin(tmp_path / "out")
    for part, tensors in enumerate(PARTS):
        output.write(part, tensors, {})
    output.complete({}, Checkpoint(model_directory("mistral")), {})

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("soar_prep.checkpoint.os.rename", die)
    with pytest.raises(KeyboardInterrupt):
        output.finish()
    monkeypatch.undo()
    output._lock.close()
    again = begin(tmp_path / "out")
    assert [again.record(part) for part in range(2)] == [{}, {}]
    again.finish()
    assert (tmp_path / "out" / "config.json").exists()


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches half a file under the final name, a leftover that fills the disk, and an error that names no file."""
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("soar_prep.checkpoint.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/file'"):
        write_atomically(path, b"new" * 1000)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}
