"""YAML bombs in files of models, runs and caches: small texts that expand to billions of values."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from nemo_opd.config.composition import from_yaml
from nemo_opd.errors import ConfigError, DataError
from nemo_opd.files import load_yaml
from nemo_opd.logging.records import read_config
from nemo_opd.models.folder import OwnCard, read_own_card
from nemo_opd.teacher_cache.shard import CacheManifest, read_manifest

LAUGHS = "a0: &a0 [ha]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
ATTACKS = {
    "nested aliases": LAUGHS + "license: *a10\nrun: *a10\n",
    "a list that holds itself": "license: &a [*a]\nrun: *a\n",
    "deep nesting": "license: " + "[" * 50_000,
    "a long text": "license: " + "x" * (1 << 20),
    "an integer of base 60": "license: 1" + ":1" * 400_000 + "\n",
    "a value that its tag does not fit": "license: !!bool x\n",
    "a date that does not exist": "license: 2026-13-45\n",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_every_reader_refuses_it(tmp_path: Path, text: str) -> None:
    """Bugs: a model card of 10 GB, a report that never ended, an error without the file's name."""
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "README.md").write_text(f"---\n{text}---\nA model.\n")
    (tmp_path / "cache.yaml").write_text(text)
    assert read_own_card(str(tmp_path)) == OwnCard()
    with pytest.raises(DataError, match=r"config.yaml is damaged"):
        read_config(tmp_path)
    with pytest.raises(DataError, match=r"cache.yaml cannot be read"):
        read_manifest(tmp_path)
    with pytest.raises(yaml.YAMLError):
        from_yaml(tmp_path / "config.yaml")


def test_yaml_in_a_text_is_not_read(tmp_path: Path) -> None:
    """Bug: a file with one quoted string is parsed a second time, with aliases."""
    (tmp_path / "config.yaml").write_text(json.dumps(LAUGHS + "run: ${oc.env:HOME}\n"))
    with pytest.raises(ConfigError, match="has no keys"):
        from_yaml(tmp_path / "config.yaml")


def test_plain_values_are_as_before(tmp_path: Path) -> None:
    """Bug: strings with * and &, or values that we write ourselves, are refused."""
    text = "a: [1, 2.5, true, null, '*x', 'a & b']\nb: {c: text}\n"
    assert load_yaml(text) == yaml.safe_load(text)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: [en, de]\n---\n")
    assert read_own_card(str(tmp_path)) == OwnCard(license="mit", language=("en", "de"))


def test_a_manifest_has_values_of_its_types(tmp_path: Path) -> None:
    """Bug: a manifest with strings for numbers ended the run with a TypeError, long after it was opened."""
    manifest = CacheManifest("top_k", "a", "b", "c", "d", 10, "float32", top_k=2)
    for key, value in (("vocab_size", "ten"), ("form", "pickle"), ("top_k", [1])):
        (tmp_path / "cache.yaml").write_text(yaml.safe_dump({**asdict(manifest), key: value}))
        with pytest.raises(DataError, match=rf"cannot be read .*{key}"):
            read_manifest(tmp_path)
    (tmp_path / "cache.yaml").write_text(yaml.safe_dump(asdict(manifest)))
    assert read_manifest(tmp_path) == manifest
