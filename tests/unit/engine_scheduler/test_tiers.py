"""What the scheduler loads from the store and lets it keep, against the checking runner."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.cache.spill import MIN_TOKENS, SpillSpace
from batchradix.engine.cache.store import BlockShape, KVStore

PREFIX = [1 + i % 7 for i in range(22)]


def open_store(folder: Path, block_tokens: int = 4) -> KVStore:
    """A store whose blocks hold 16 bytes of keys and of values a token."""
    shape = BlockShape(
        num_layers=1, num_kv_heads=1, k_dim=4, v_dim=4, dtype="float32", num_tokens=block_tokens
    )
    return KVStore(folder, identity={"model": "hashes"}, shape=shape, max_bytes=1 << 20)


def distinct(rows: list[list[int]]) -> int:
    return len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


def run(
    sim: ModuleType,
    folder: Path,
    rows: list[list[int]],
    *,
    num_slots: int = 2000,
    limit: int = 4,
    **changes: Any,
) -> Any:
    """A job in a fresh scheduler, with the store as it is now; answers checked."""
    simulation = sim.Simulation(
        num_slots=num_slots, store=open_store(folder), vocab_size=1000, **changes
    )
    simulation.submit(rows, [limit] * len(rows))
    outcome = simulation.drain()
    for row, prompt in enumerate(rows):
        assert outcome.answers[0, row] == sim.answer_alone(prompt, limit, 1000)
    assert not simulation.runner.store.notices
    return outcome


def ends(folder: Path) -> list[int]:
    """Where the blocks end that are there."""
    return sorted(int(path.stem.split("-")[1]) for path in folder.iterdir())


def test_the_next_run_loads_what_other_rows_share_and_computes_the_rest(
    sim: ModuleType, tmp_path: Path
) -> None:
    first = run(sim, tmp_path, [[*PREFIX, 100 + i] for i in range(8)])
    assert first.usage.computed_tokens == 22 + 8
    assert first.usage.loaded_tokens == 0
    assert ends(tmp_path) == [4, 8, 12, 16, 20]

    rows = [[*PREFIX, 200 + i] for i in range(5)]
    second = run(sim, tmp_path, rows)
    assert second.usage.loaded_tokens == 20
    assert second.usage.computed_tokens == 2 + 5
    assert second.usage.recomputed_tokens == second.usage.reloaded_tokens == 0
    assert second.usage.cached_tokens == sum(map(len, rows)) - distinct(rows)
    assert sum(step.num_tokens for step in second.steps) == 7 + sum(
        len(answer) - 1 for answer in second.answers.values()
    )


@pytest.mark.parametrize("prefix", [PREFIX[:13], [*PREFIX, 50, 51, 52, 53, 54]])
def test_a_shorter_or_longer_prefix_loads_what_is_common(
    sim: ModuleType, tmp_path: Path, prefix: list[int]
) -> None:
    run(sim, tmp_path, [[*PREFIX, 100], [*PREFIX, 101]])
    rows = [[*prefix, 100], [*prefix, 101]]
    outcome = run(sim, tmp_path, rows)
    assert outcome.usage.loaded_tokens == min(len(prefix), len(PREFIX)) // 4 * 4
    assert outcome.usage.computed_tokens + outcome.usage.loaded_tokens == distinct(rows)


def test_prefixes_of_a_sixteenth_of_the_rows_are_kept_and_those_of_fewer_are_not(
    sim: ModuleType, tmp_path: Path
) -> None:
    documents = [[20 + number, *PREFIX] for number in range(20)]
    rows = [[*document, 100 + i] for document in documents for i in range(3)]
    rows += [[*PREFIX, 100 + i] for i in range(6)]  # 6 of 66
    run(sim, tmp_path, rows)
    assert ends(tmp_path) == [4, 8, 12, 16, 20]


def test_a_single_row_keeps_nothing_but_loads_what_there_is(
    sim: ModuleType, tmp_path: Path
) -> None:
    run(sim, tmp_path, [[*PREFIX, 100]])
    assert ends(tmp_path) == []
    run(sim, tmp_path, [[*PREFIX, 100], [*PREFIX, 101]])
    assert run(sim, tmp_path, [[*PREFIX, 100]]).usage.loaded_tokens == 20


def test_the_last_token_of_a_prompt_is_computed_though_the_store_holds_it(
    sim: ModuleType, tmp_path: Path
) -> None:
    run(sim, tmp_path, [[*PREFIX, 100], [*PREFIX, 101]])
    outcome = run(sim, tmp_path, [PREFIX[:16], PREFIX[:16], PREFIX])
    assert outcome.usage.computed_tokens + outcome.usage.loaded_tokens == 22
    assert outcome.usage.recomputed_tokens == 0


def test_what_a_damaged_block_held_and_all_behind_it_is_computed_and_kept_anew(
    sim: ModuleType, tmp_path: Path
) -> None:
    rows = [[*PREFIX, 100], [*PREFIX, 101]]
    run(sim, tmp_path, rows)
    (damaged,) = tmp_path.glob("*-12.safetensors")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    simulation = sim.Simulation(num_slots=2000, store=open_store(tmp_path), vocab_size=1000)
    simulation.submit(rows, [4, 4])
    usage = simulation.drain().usage
    assert (usage.loaded_tokens, usage.computed_tokens) == (8, 14 + 2)
    assert "1 block of the KV store" in simulation.runner.store.notices[0]
    assert damaged.read_bytes() == whole
    assert run(sim, tmp_path, rows).usage.loaded_tokens == 20


class Eager(SpillSpace):
    """In memory, and worth it whatever it takes."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 32, in_memory=True)

    def pays(self, num_tokens: int) -> bool:
        return num_tokens > 0


def preempting(sim: ModuleType, space: SpillSpace | None) -> Any:
    """Rows whose answers outgrow the pool together, so that some have to give way."""
    rows = [[*PREFIX, 100 + i, *range(30, 40)] for i in range(8)]
    simulation = sim.Simulation(num_slots=130, batch_size=8, vocab_size=100_000, space=space)
    simulation.submit(rows, [40] * 8)
    outcome = simulation.drain()
    for row, prompt in enumerate(rows):
        assert outcome.answers[0, row] == sim.answer_alone(prompt, 40, 100_000)
    assert outcome.usage.computed_tokens == distinct(rows)
    assert outcome.usage.preemptions > 0
    return outcome


def test_what_is_evicted_for_a_while_comes_back_instead_of_being_computed_again(
    sim: ModuleType,
) -> None:
    without, space = preempting(sim, None).usage, Eager(1000)
    assert without.recomputed_tokens > 0
    within = preempting(sim, space)
    assert within.usage.recomputed_tokens == 0
    assert within.usage.reloaded_tokens == without.recomputed_tokens
    tokens = [sum(step.num_tokens for step in run.steps) for run in (preempting(sim, None), within)]
    assert tokens[0] - tokens[1] == without.recomputed_tokens


def test_a_full_space_has_the_rest_computed_again(sim: ModuleType) -> None:
    usage = preempting(sim, Eager(20)).usage
    assert usage.recomputed_tokens > 0
    assert usage.reloaded_tokens > 0


def test_small_pieces_and_what_is_sooner_computed_are_computed(sim: ModuleType) -> None:
    space = SpillSpace(1000, 32, in_memory=True)
    assert not space.pays(MIN_TOKENS - 1)
    assert space.pays(MIN_TOKENS)  # nothing is known yet
    space.write(space.allocate(20) or [], memoryview(bytes(640)))
    space.note_computed(64, 1.0)
    assert space.pays(MIN_TOKENS)
    space.note_computed(64, 1e-9)  # a model faster than any memory
    assert not space.pays(1000)


tries = st.lists(
    st.lists(st.integers(1, 3), max_size=12).map(
        lambda row: [t for t in row for _ in range(1 + t % 2)]
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(
    nights=st.lists(st.tuples(tries, st.booleans(), st.integers(0, 4)), min_size=2, max_size=5),
    block_tokens=st.integers(1, 5),
    slack=st.one_of(st.integers(0, 8), st.just(1000)),
    batch_size=st.integers(1, 9),
    prefill_tokens=st.one_of(st.integers(1, 9), st.just(64)),
    max_node_extents=st.sampled_from([1, 4]),
    has_store=st.booleans(),
    num_places=st.sampled_from([0, 7, 30, 1000]),
    data=st.data(),
)
def test_every_row_answers_as_if_it_ran_alone_whatever_the_store_holds(
    sim: ModuleType,
    nights: list[Any],
    block_tokens: int,
    slack: int,
    batch_size: int,
    prefill_tokens: int,
    max_node_extents: int,
    has_store: bool,
    num_places: int,
    data: st.DataObject,
) -> None:
    """Jobs one after the other or at once, in one engine or one after the other."""
    limit = 12
    longest = max(len(row) for rows, *_ in nights for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[list[list[int]]] = []
        simulation: Any = None
        for rows, is_fresh, num_steps in nights:
            if simulation is None or is_fresh:
                if simulation is not None:
                    simulation.drain()
                simulation = sim.Simulation(
                    num_slots=longest + limit + slack,
                    batch_size=batch_size,
                    prefill_tokens=prefill_tokens,
                    max_node_extents=max_node_extents,
                    vocab_size=1000,
                    store=open_store(Path(folder), block_tokens) if has_store else None,
                    space=Eager(num_places) if num_places else None,
                )
                jobs = []
            jobs.append(rows)
            simulation.submit(rows, [limit] * len(rows), retain=data.draw(st.booleans()))
            for _ in range(num_steps):
                if simulation.scheduler.has_work:
                    simulation.step()
        outcome = simulation.drain()
    for job, rows in enumerate(jobs):
        for row, prompt in enumerate(rows):
            if prompt:
                answer = sim.answer_alone(prompt, limit, 1000)
                assert outcome.answers[job, row] == answer
    usage = outcome.usage
    written = sum(len(answer) - 1 for answer in outcome.answers.values())
    num_tokens = sum(step.num_tokens for step in outcome.steps)
    assert num_tokens == usage.computed_tokens + usage.recomputed_tokens + written
    if len(jobs) == 1:
        assert usage.computed_tokens + usage.loaded_tokens == distinct(jobs[0])
        if slack == 1000:
            assert usage.recomputed_tokens == usage.reloaded_tokens == 0
