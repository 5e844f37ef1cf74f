import stat

import pytest

from config import ConfigError, Key, load_keys
from config.keys import digest, generate, read_keys, write_keys

DIGEST = "a" * 64


def test_round_trip(tmp_path):
    path = tmp_path / "keys.toml"
    secret = generate()
    keys = [Key(name="a", sha256=digest(secret)), Key(name="b.c", sha256=DIGEST, lanes=("long",), models=("x/y", 'q"'))]
    write_keys(path, keys)
    assert read_keys(path) == keys
    assert load_keys(path).find(secret) == keys[0]
    assert load_keys(path).find(secret + "x") is None
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "keys.toml"
    write_keys(path, [Key(name="a", sha256=DIGEST)])

    def broken():
        yield Key(name="b", sha256="b" * 64)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_keys(path, broken())
    assert [key.name for key in read_keys(path)] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_keys_carry_256_random_bits():
    secrets = {generate() for _ in range(100)}
    assert len(secrets) == 100
    assert all(secret.startswith("ll-") and len(secret) == 3 + 43 for secret in secrets)


TABLE = f'[[keys]]\nname = "a"\nsha256 = "{DIGEST}"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no key", "python -m router.keys add"]),
        ("[[keys]]\nname = 'a'", ["key 1", "sha256", "required"]),
        (TABLE + "lane = ['long']", ["key 1", "lane", "did you mean lanes?"]),
        (TABLE + "lanes = ['fast']", ["key 1", "lanes.0", "'long' or 'short'"]),
        (TABLE + "lanes = []", ["key 1", "lanes", "at least 1"]),
        (TABLE.replace(DIGEST, "ll-plain"), ["key 1", "sha256"]),
        (TABLE + TABLE, ["two keys have the same name: a"]),
        (TABLE + TABLE.replace('"a"', '"b"'), ["two keys have the same sha256"]),
        ("keys = 5", ["only [[keys]] tables"]),
        ("keys = [5]", ["key 1"]),
        ("[other]", ["only [[keys]] tables"]),
        ("[[keys", ["not TOML"]),
    ],
)
def test_wrong_files_say_what_to_change(tmp_path, text, words):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        load_keys(tmp_path / "none.toml")
