"""A mapped data set on the hub, whose API is a stand-in here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
from hub_stand_in import HubStandIn
from huggingface_hub import DatasetCard

from batchradix.errors import OptionError
from batchradix.integrations.dataset_card import section, status_counts, with_section
from batchradix.integrations.hf_datasets import Extractor

ROOT = Path(__file__).parents[3]
SCRIPT = """
import datasets, json, sys
from batchradix import Extractor
datasets.disable_progress_bars()
extractor = Extractor(**json.loads(sys.argv[1]))
data = datasets.Dataset.from_dict({"text": ["a", "b", None, "x" * 600, "c"]})
for _ in range(2):
    print(extractor.push_to_hub(data.map(extractor, batched=True), "me/answers", token="t"))
"""


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    hub = HubStandIn()
    yield hub
    hub.close()


def push(hub: HubStandIn, options: dict[str, Any], home: Path) -> None:
    environ = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_pushed_data_set_says_on_its_card_how_its_answers_were_made(
    hub: HubStandIn, options: dict[str, Any], tmp_path: Path
) -> None:
    hub.files["me/answers"] = {
        "README.md": b"---\nlicense: mit\ntags:\n- mine\n---\n# My own words\n"
    }
    push(hub, options, tmp_path)
    files = hub.files["me/answers"]
    [data] = [content for name, content in files.items() if name.endswith(".parquet")]
    assert pq.read_table(io.BytesIO(data))["status"].to_pylist() == [
        "ok", "ok", "error", "error", "ok",
    ]  # fmt: skip
    card = DatasetCard(files["README.md"].decode())
    assert card.data["license"] == "mit"
    assert card.data["tags"] == ["mine", "synthetic", "batchradix"]
    assert card.data["dataset_info"]["splits"][0]["num_examples"] == 5
    assert card.text.startswith("# My own words")
    assert card.text.count("How the answers were made") == 1
    for line in ("| rows | 5 |", "| ok | 3 (60.0%) |", "| truncated | 0 (0.0%) |",
                 "| error | 2 (40.0%) |", f"| model | `{Path(options['model']).name}` |",
                 "| sampling | temperature 0.0, max_tokens 40 |", "{{ text }}"):  # fmt: skip
        assert line in card.text
    assert json.dumps(options["schema"], indent=2) in card.text
    assert str(Path(options["model"]).parent) not in card.text


def test_shares_are_counted_in_the_answers_own_status_column(options: dict[str, Any]) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", None], "status": ["open", "closed"]})
    extractor = Extractor(**options)
    assert status_counts(data.map(extractor, batched=True)) == {"ok": 1, "error": 1}
    assert status_counts(data) is None
    splits = datasets.DatasetDict(train=data, test=data.select([0]))
    assert status_counts(splits.map(extractor, batched=True)) == {"ok": 2, "error": 1}
    assert status_counts(splits) is None
    alone = Extractor(unnest=True, **options)
    mapped = data.remove_columns("status").map(alone, batched=True)
    text = section(
        alone.config,
        alone.checkpoint,
        alone.format,
        dtype="float32",
        num_rows=2,
        counts=status_counts(mapped),
    )
    assert "| ok | not recorded (no status column) |" in text


def test_a_template_with_fences_of_its_own_stays_whole(options: dict[str, Any]) -> None:
    extractor = Extractor(**options | {"template": "```\n{{ text }}\n```"})
    text = section(
        extractor.config, extractor.checkpoint, None, dtype="float32", num_rows=0, counts=None
    )
    assert "````jinja\n```\n{{ text }}\n```\n````" in text


def test_an_earlier_section_gives_way_and_the_rest_of_a_card_stays(options: dict[str, Any]) -> None:
    extractor = Extractor(**options)

    def made(num_rows: int) -> str:
        return section(
            extractor.config,
            extractor.checkpoint,
            None,
            dtype="float32",
            num_rows=num_rows,
            counts=None,
        )

    first = with_section("before\n", made(1)) + "after\n"
    second = with_section(first, made(2))
    assert second == first.replace("| rows | 1 |", "| rows | 2 |")
    assert second.startswith("before\n")
    assert second.endswith("after\n")


def test_a_bucket_has_no_card(options: dict[str, Any]) -> None:
    data = datasets.Dataset.from_dict({"text": ["a"]})
    with pytest.raises(OptionError, match="bucket"):
        Extractor(**options).push_to_hub(data, "buckets/me/answers")
