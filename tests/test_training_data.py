"""Token files: where tokens come from, what is refused, and which batch a step gets."""

import re

import numpy as np
import pytest
import torch

from cs336_systems.training import data
from cs336_systems.training.data import library_text, prepare_tokens, training_batch


def _prepare(path, vocab_size=256, ctx=8, dtype="uint16", share=0.1):
    return prepare_tokens(path, dtype, vocab_size, ctx, share)


def test_a_text_files_bytes_are_its_tokens(tmp_path):
    path = tmp_path / "a.md"
    path.write_bytes(bytes(range(256)) * 2)
    tokens = _prepare(path)
    train, validation = tokens.open()
    assert (tokens.n_tokens, len(train), len(validation)) == (512, 461, 51)
    assert bytes(train) + bytes(validation) == path.read_bytes()
    assert isinstance(train, np.memmap)


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_ids_of_either_kind_of_file(tmp_path, suffix, dtype):
    ids = np.arange(300, dtype=dtype)[::-1].copy()
    path = tmp_path / f"ids{suffix}"
    if suffix == ".npy":
        np.save(path, ids)
    else:
        ids.tofile(path)
    train, validation = _prepare(path, vocab_size=300, dtype=dtype).open()
    np.testing.assert_array_equal(np.concatenate([train, validation]), ids)


def test_the_python_librarys_text_is_made_once_and_always_the_same(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "a/d.py", "test/e.py", "site-packages/f.py", "a/g.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    with pytest.raises(ValueError, match="vocab_size=50: must be 256, as many as a byte has values, without --data"):
        prepare_tokens(None, "uint16", 50, 2, 0.5, tmp_path / "one")
    with pytest.raises(ValueError, match=r"ctx=999999999: the text of Python's library has [0-9]+ tokens"):
        prepare_tokens(None, "uint16", 256, 999_999_999, 0.1, tmp_path / "one")
    first, second = library_text(tmp_path / "one"), library_text(tmp_path / "two")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert sorted(first.read_bytes().split(b"\0")) == [b"", b"# a/c.py\n", b"# a/d.py\n", b"# b.py\n"]
    made = first.stat().st_mtime_ns
    assert library_text(tmp_path / "one") == first
    assert first.stat().st_mtime_ns == made
    (library / "b.py").write_text("# another length\n")
    assert library_text(tmp_path / "one") != first


def test_the_running_pythons_library_is_real_text(tmp_path):
    tokens = prepare_tokens(None, "uint16", 256, 1024, 0.1, cache_dir=tmp_path)
    train, validation = (bytes(part[:200_000]) for part in tokens.open())
    assert tokens.n_tokens > 1_000_000
    for text in (train, validation):
        assert text.count(b"def ") > 100


def test_without_sources_or_a_cache_it_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"which can't be written .*; set XDG_CACHE_HOME, or name a file"):
        library_text(tmp_path / "file" / "cache")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"has no \.py sources to stand in for it; name a file"):
        library_text(tmp_path / "cache")


def _array(path, array):
    np.save(path, array)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("no.txt", None, r"data='.*no.txt': must be a file"),
        ("a.txt", lambda p: p.write_bytes(b""), r"data='.*a.txt': is empty"),
        ("a.txt", lambda p: p.write_bytes(b"x" * 80), r"80 tokens, of which 8 for validation; context 8 needs more"),
        ("a.txt", lambda p: p.write_bytes(b"x" * 8), r"has 8 tokens, of which 7 for training; context 8 needs more"),
        ("a.bin", lambda p: p.write_bytes(b"x" * 301), r"301 bytes are no whole number of uint16 ids"),
        ("a.npy", lambda p: p.write_bytes(b"not an array"), r"is not a NumPy array file"),
        ("a.npy", lambda p: _array(p, np.zeros((20, 20), int)), r"must be one-dimensional .*int64 of shape \(20, 20\)"),
        ("a.npy", lambda p: _array(p, np.zeros(400)), r"of integers; it is float64"),
        ("a.npy", lambda p: _array(p, np.zeros(0, int)), r"is empty"),
        ("a.npy", lambda p: _array(p, np.r_[np.zeros(399, int), 256]), r"token 399 is id 256, outside .* of 256 \("),
        ("a.npy", lambda p: _array(p, np.r_[np.zeros(5, int), -1, np.zeros(400, int)]), r"token 5 is id -1, outside"),
        ("a.bin", lambda p: np.full(400, 300, "uint16").tofile(p), r"token 0 is id 300, outside .*--token-dtype"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_with_the_reason(tmp_path, name, write, message):
    if write is not None:
        write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        _prepare(tmp_path / name)


def test_a_truncated_array_file_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(1000, int))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is not a NumPy array file"):
        _prepare(tmp_path / "a.npy")


def test_an_id_outside_the_vocabulary_is_found_beyond_the_first_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK", 64)
    np.save(tmp_path / "a.npy", np.r_[np.zeros(200, int), 9, np.zeros(200, int), 10])
    with pytest.raises(ValueError, match="token 200 is id 9, outside the vocabulary of 5"):
        _prepare(tmp_path / "a.npy", vocab_size=5)


def test_a_steps_batch_depends_on_seed_and_step_alone():
    tokens = np.arange(1000)
    inputs, targets = training_batch(tokens, 4, 8, seed=3, step=5, device="cpu")
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs + 1, targets)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again, _ = training_batch(tokens, 4, 8, seed=3, step=5, device="cpu")
    assert torch.equal(again, inputs)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, step in ((3, 6), (4, 5), (5, 3)):
        assert not torch.equal(training_batch(tokens, 4, 8, seed, step, "cpu")[0], inputs)


def test_the_hash_is_of_the_data(tmp_path):
    for name, text in (("a", "x" * 200), ("b", "x" * 200), ("c", "y" * 200)):
        (tmp_path / name).write_text(text)
    hashes = [_prepare(tmp_path / name).sha256 for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert re.fullmatch(r"[0-9a-f]{64}", hashes[0])
