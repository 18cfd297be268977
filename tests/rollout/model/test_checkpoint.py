"""Model folders: exact round trips, strict loads, saves that appear whole or not at all."""

import json
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.model import Decoder, DecoderConfig, checkpoint
from rollout.model.checkpoint import load_pretrained, load_weights, save_pretrained
from rollout.model.files import CheckpointError, whole_folder
from rollout.model.weight_files import save_state

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_ids=(2, 5),
)


def decoder(seed: int = 0, dtype: torch.dtype = torch.float32, tied: bool = False) -> Decoder:
    model = Decoder(replace(CONFIG, tie_word_embeddings=tied), dtype)
    model.init_weights(seed)
    return model


def bits(model: Decoder) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(decoder(), tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*has no tokenizer.json")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_is_the_same_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    """W8: tied embeddings stay tied and are stored once."""
    model = decoder(3, dtype, tied)
    save_pretrained(model, tmp_path / "model")
    loaded, tokenizer = load_pretrained(tmp_path / "model", dtype=dtype)
    assert tokenizer is None
    assert loaded.config == model.config
    assert_same(bits(loaded), bits(model))
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    with pytest.raises(AssertionError):
        assert_same(bits(loaded), bits(decoder(4, dtype, tied)))


def test_shards_hold_the_same_bits_and_no_more_than_asked(tmp_path: Path) -> None:
    model = decoder()
    limit = 20_000
    save_pretrained(model, tmp_path / "model", max_shard_bytes=limit)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        assert sum(t.nbytes for t in load_file(shard).values()) <= limit
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    other = decoder(1)
    load_weights(other, tmp_path / "model")
    assert_same(bits(other), bits(model))


def test_loading_writes_into_the_existing_parameters(folder: Path) -> None:
    """W7: nothing is re-bound, so an optimizer or an arena still holds the live tensors."""
    model = decoder(1)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    load_weights(model, folder)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert_same(bits(model), bits(decoder(0)))


@pytest.mark.filterwarnings("ignore:.*has no tokenizer.json")
def test_weights_are_converted_to_the_dtype_asked_for(folder: Path) -> None:
    loaded, _ = load_pretrained(folder, dtype=torch.bfloat16)
    for name, p in decoder().named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], p.to(torch.bfloat16))


def _drop_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add_bias(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = torch.zeros(95, 32)


def _quantise(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop_norm, "lacks the tensor model.norm.weight"),
        (_add_bias, "unexpectedly, the tensor model.layers.0.self_attn.q_proj.bias"),
        (_reshape, r"lm_head.weight has shape \[95, 32\], config.json makes it \[96, 32\]"),
        (_quantise, "lm_head.weight is stored as I8"),
    ],
)
def test_wrong_tensors_are_named_and_nothing_is_written(
    folder: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    """F6: the model is what it was before the refused load."""
    edit(folder, change)
    model = decoder(1)
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, folder)
    assert_same(bits(model), bits(decoder(1)))


def test_rotary_buffers_of_old_checkpoints_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    load_weights(decoder(1), folder)


def test_a_tied_model_takes_a_stored_projection_only_if_it_is_equal(tmp_path: Path) -> None:
    """W8"""
    folder = tmp_path / "model"
    save_pretrained(decoder(tied=True), folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = decoder(1, tied=True)
    load_weights(model, folder)
    assert_same(bits(model), bits(decoder(tied=True)))
    edit(folder, lambda t: t["lm_head.weight"].view(-1)[7].add_(1))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_weights(model, folder)


@pytest.mark.parametrize("keep", [3, 200, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    """F6"""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors"):
        load_weights(decoder(), folder)


def test_a_missing_shard_or_a_lying_index_is_named(tmp_path: Path) -> None:
    """F6"""
    folder = tmp_path / "model"
    save_pretrained(decoder(), folder, max_shard_bytes=20_000)
    index = folder / "model.safetensors.index.json"
    right = index.read_text()
    wrong = json.loads(right)
    wrong["weight_map"]["model.norm.weight"] = wrong["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=r"places model\.norm\.weight in"):
        load_weights(decoder(), folder)
    index.write_text(right)
    load_weights(decoder(), folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} does not exist"):
        load_weights(decoder(), folder)


def test_a_folder_without_weights_says_what_it_has(folder: Path) -> None:
    """F6"""
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_weights(decoder(), folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        load_weights(decoder(), folder)


def test_paths_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6"""
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_pretrained(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; a model is a folder"):
        load_pretrained(str(tmp_path / "file"))

    def offline(name: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError(f"cannot reach the hub for {name}\nsecond line")

    monkeypatch.setattr(checkpoint, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"failed: cannot reach the hub for someone/model$"):
        load_pretrained("someone/model")


@pytest.mark.filterwarnings("ignore:.*has no tokenizer.json")
def test_a_hub_id_loads_from_the_local_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda name, allow_patterns: str(folder))
    loaded, _ = load_pretrained("someone/model")
    assert_same(bits(loaded), bits(decoder()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_where_there_is_none(folder: Path) -> None:
    """F6"""
    with pytest.raises(CheckpointError, match="torch sees no CUDA device"):
        load_pretrained(folder, device="cuda")


def test_no_tokenizer_is_said(folder: Path) -> None:
    """F6"""
    with pytest.warns(UserWarning, match=r"has no tokenizer\.json"):
        load_pretrained(folder)


@pytest.mark.filterwarnings("ignore:.*has no tokenizer.json")
def test_generation_config_travels_along(tmp_path: Path) -> None:
    """L10"""
    generation = {"eos_token_id": [2, 9], "temperature": 0.6, "transformers_version": "4.42.0"}
    save_pretrained(decoder(), tmp_path / "a", generation_config=generation)
    model, _ = load_pretrained(tmp_path / "a")
    assert model.config.eos_token_ids == (2, 9)
    save_pretrained(model, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == generation
    save_pretrained(decoder(), tmp_path / "c")
    written = json.loads((tmp_path / "c" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [2, 5]}


def test_saving_over_a_checkpoint_leaves_no_stale_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_pretrained(decoder(), folder, max_shard_bytes=20_000)
    (folder / "notes.txt").write_text("mine")
    (folder / "optimizer").mkdir()
    (folder / "optimizer" / "state").write_text("mine too")
    save_pretrained(decoder(1), folder)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "optimizer" / "state").read_text() == "mine too"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    model = decoder(2)
    load_weights(model, folder)
    assert_same(bits(model), bits(decoder(1)))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No space is imitated by a limit on the bytes of a file."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)


@pytest.mark.parametrize("size", [0, 100, 1 << 12, 1 << 16, (1 << 18) + 400])
def test_a_full_disk_is_the_cause_that_is_told(tmp_path: Path, size: int) -> None:
    """F6: torch's own error would be about a position in a file."""
    state = {"step": 3, "exp_avg": torch.zeros(1 << 16)}
    path = tmp_path / "state.pt"
    with room_for(size), pytest.raises(OSError, match="File too large"):
        save_state(state, path)
    save_state(state, path)
    assert torch.load(path, weights_only=True)["step"] == 3


def test_what_cannot_be_pickled_is_not_the_disk_s_fault(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_state({"loss": lambda: 0}, tmp_path / "state.pt")


def test_a_full_disk_leaves_the_old_checkpoint(folder: Path) -> None:
    """F6"""
    with room_for(30_000), pytest.raises(CheckpointError, match="could not be written"):
        save_pretrained(decoder(1), folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    model = decoder(2)
    load_weights(model, folder)
    assert_same(bits(model), bits(decoder(0)))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """F6"""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/model could not be written"):
        save_pretrained(decoder(), tmp_path / "file" / "model")


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), whole_folder(tmp_path / "out") as staging:
        (staging / "half").write_text("x")
        raise KeyError("stop")
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_writers_stands_when_asked(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out", replace=False) as slow:
        (slow / "who").write_text("slow")
        with whole_folder(tmp_path / "out", replace=False) as fast:
            (fast / "who").write_text("fast")
    assert (tmp_path / "out" / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_save_leaves_whole_folders_only(tmp_path: Path) -> None:
    """F3: SIGKILL in the middle of saving; every folder under its final name loads."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rollout.model import Decoder, DecoderConfig, save_pretrained\n"
        "model = Decoder(DecoderConfig.from_folder(sys.argv[1]))\n"
        "model.init_weights(0)\n"
        "print('ready', flush=True)\n"
        "for step in range(10**6):\n"
        "    save_pretrained(model, Path(sys.argv[2]) / f'step-{step}', max_shard_bytes=9000)\n"
    )
    save_pretrained(decoder(), tmp_path / "model")
    out = tmp_path / "out"
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            process.kill()
    whole = [path for path in out.iterdir() if not path.name.startswith(".")]
    assert whole
    for path in whole:
        model = decoder(1)
        load_weights(model, path)
        assert_same(bits(model), bits(decoder(0)))
