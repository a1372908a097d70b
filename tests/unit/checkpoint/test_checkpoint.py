from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint import content_hash as content_hash_module
from batchradix.checkpoint.chat_template import render_chat
from batchradix.checkpoint.checkpoint import LISTED_MODELS, open_checkpoint
from batchradix.config import DEFAULT_MODEL
from batchradix.errors import ModelError, TemplateError

Make = Callable[..., Path]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def test_a_folder_opens_with_all_its_parts(make_folder: Make) -> None:
    folder = make_folder(
        kind="llama3",
        tokenizer_config={"chat_template": TEMPLATE},
        files={"generation_config.json": json.dumps({"eos_token_id": [1, 0]})},
    )
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.format == "safetensors"
    assert checkpoint.path == folder
    assert checkpoint.weight_files == (folder / "model.safetensors",)
    assert checkpoint.config.architecture == "LlamaForCausalLM"
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<s>", "<|end|>")
    assert checkpoint.tokenizer.bos_id == checkpoint.tokenizer.added_token_id("<s>")
    assert checkpoint.tokenizer.prefix_ids == (checkpoint.tokenizer.bos_id,)
    assert checkpoint.tokenizer.eos_ids == (0, 1)
    assert render_chat(checkpoint, [{"role": "user", "content": "x"}]) == "<s>x<|end|>"
    assert (checkpoint.revision, checkpoint.is_demonstration) == (None, False)


def test_a_gguf_file_opens_with_all_its_parts(make_gguf: Make) -> None:
    path = make_gguf({"tokenizer.chat_template": TEMPLATE})
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.format == "gguf"
    assert checkpoint.weight_files == (path,)
    assert checkpoint.tokenizer.eos_ids == (1,)
    assert render_chat(checkpoint, [{"role": "user", "content": "x"}]) == "<s>x<|end|>"


def test_opening_imports_neither_torch_nor_transformers(make_folder: Make, make_gguf: Make) -> None:
    names = [str(make_folder()), str(make_gguf())]
    program = (
        "import sys; from batchradix.checkpoint.checkpoint import open_checkpoint\n"
        f"for name in {names!r}: open_checkpoint(name).content_hash\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'huggingface_hub')))"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environ, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["byte_level", "llama3", "metaspace_first", "metaspace_always"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_ids_are_those_of_transformers(make_folder: Make, kind: str, add_bos: bool | None) -> None:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if add_bos is not None:
        settings["add_bos_token"] = add_bos
    folder = make_folder(kind=kind, tokenizer_config=settings)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_checkpoint(str(folder)).tokenizer
    for text in ["The cat", "  it's 12:30\n\n3 Größe🙂", "日本", "a", "\t<|en"]:
        ids = [*ours.prefix_ids, *ours.encode_plain([text], [True])[0], *ours.suffix_ids]
        assert ids == theirs(text).input_ids


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "J"),
        ("chat_template.json", json.dumps({"chat_template": "J"})),
    ],
)
def test_a_template_in_a_file_of_its_own_wins(make_folder: Make, name: str, content: str) -> None:
    folder = make_folder(tokenizer_config={"chat_template": "T"}, files={name: content})
    assert open_checkpoint(str(folder)).chat_template == "J"


def test_of_several_templates_the_default_is_taken(make_folder: Make) -> None:
    named = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    folder = make_folder(tokenizer_config={"chat_template": named})
    assert open_checkpoint(str(folder)).chat_template == "D"


def test_several_templates_without_a_default_are_refused(make_folder: Make) -> None:
    named = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
    folder = make_folder(tokenizer_config={"chat_template": named})
    with pytest.raises(ModelError, match=r"there are: a, b"):
        open_checkpoint(str(folder))


def test_a_model_without_a_template_opens(make_folder: Make) -> None:
    assert open_checkpoint(str(make_folder())).chat_template is None


def test_a_malformed_template_is_refused_at_once(make_folder: Make) -> None:
    folder = make_folder(tokenizer_config={"chat_template": "a\n{% for %}"})
    with pytest.raises(TemplateError, match="line 2"):
        open_checkpoint(str(folder))


def test_special_tokens_may_be_objects_or_stand_in_the_older_file(make_folder: Make) -> None:
    folder = make_folder(
        tokenizer_config={"bos_token": {"content": "<|user|>"}, "eos_token": None},
        files={"special_tokens_map.json": json.dumps({"eos_token": "<|end|>"})},
    )
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<|user|>", "")


def test_code_in_a_model_folder_is_never_run(make_folder: Make, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    code = f"open({str(mark)!r}, 'w').write('x')"
    folder = make_folder(
        tokenizer_config={"auto_map": {"AutoTokenizer": ["code.T", None]}},
        files={"code.py": code, "__init__.py": code, "tokenization.py": code},
    )
    open_checkpoint(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "line 1"),
        ("config.json", "[1]", "not a JSON object"),
        ("config.json", '{"architectures": ["T5Model"]}', "T5Model"),
        ("tokenizer.json", '{"model"', "not valid JSON"),
        ("tokenizer.json", "{}", "malformed"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}}}', "tokenizer"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 0}}}', "WordLevel"),
        ("tokenizer_config.json", "nul", "not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("chat_template.json", '{"chat_template": 3}', "chat template"),
    ],
)
def test_a_malformed_file_is_named(make_folder: Make, file: str, content: str, says: str) -> None:
    folder = make_folder(files={file: content})
    with pytest.raises(ModelError, match=says) as caught:
        open_checkpoint(str(folder))
    assert str(folder / file) in str(caught.value)


def test_a_missing_tokenizer_says_how_to_make_one(make_folder: Make) -> None:
    folder = make_folder(files={"tokenizer.model": ""})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.model alone is not enough"):
        open_checkpoint(str(folder))


def test_folders_of_another_kind_are_refused_by_what_they_are(tmp_path: Path) -> None:
    def refused(name: str, content: str = "{}") -> str:
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ModelError) as caught:
            open_checkpoint(str(folder))
        return str(caught.value)

    adapter = json.dumps({"base_model_name_or_path": "meta/base"})
    assert "adapter for meta/base" in refused("adapter_config.json", adapter)
    assert "name the file" in refused("model.gguf")
    assert "embedding model" in refused("modules.json", "[]")
    assert "Hugging Face's layout" in refused("params.json")
    assert "no config.json" in refused("readme.txt")


def test_the_hash_follows_the_content_and_not_the_place(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder(tokenizer_config={"chat_template": "T"})
    first = open_checkpoint(str(folder)).content_hash
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    (moved / "README.md").write_text("hello")
    assert open_checkpoint(str(moved)).content_hash == first
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        kept = (moved / name).read_text()
        (moved / name).write_text(kept + "\n")
        assert open_checkpoint(str(moved)).content_hash != first
        (moved / name).write_text(kept)
    (moved / "chat_template.jinja").write_text("T")
    assert open_checkpoint(str(moved)).content_hash != first


@pytest.mark.parametrize("full_hash_bytes", [2**31, 0])
def test_the_hash_follows_the_weights_however_large(
    make_folder: Make, monkeypatch: pytest.MonkeyPatch, full_hash_bytes: int
) -> None:
    monkeypatch.setattr(content_hash_module, "FULL_HASH_BYTES", full_hash_bytes)
    folder = make_folder()
    first = open_checkpoint(str(folder)).content_hash
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert open_checkpoint(str(folder)).content_hash != first


def test_a_gguf_file_may_be_renamed_without_changing_its_hash(make_gguf: Make) -> None:
    path = make_gguf()
    first = open_checkpoint(str(path)).content_hash
    other = path.rename(path.with_name("other.gguf"))
    assert open_checkpoint(str(other)).content_hash == first


def test_a_checkpoint_can_be_pickled(make_folder: Make) -> None:
    checkpoint = open_checkpoint(str(make_folder(kind="metaspace_first")))
    again = pickle.loads(pickle.dumps(checkpoint))  # noqa: S301 - our own bytes
    texts, starts = ["the cat", "the cat"], [True, False]
    ids = again.tokenizer.encode_plain(texts, starts)
    assert ids == checkpoint.tokenizer.encode_plain(texts, starts)


def test_the_default_model_is_listed_as_a_demonstration() -> None:
    assert LISTED_MODELS[DEFAULT_MODEL].is_demonstration


def test_a_weight_file_that_cannot_be_read_is_named_by_the_hash(make_folder: Make) -> None:
    checkpoint = open_checkpoint(str(make_folder(kind="llama3")))
    (checkpoint.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read: No such file"):
        _ = checkpoint.content_hash
