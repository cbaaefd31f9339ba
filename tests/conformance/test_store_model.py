"""Each store against the simplest model, a dict and a list, under any sequence of commits."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from forewarn.errors import Conflict
from forewarn.store.base import Record, RevisionCheck, Store, Write
from tests.conformance.stores import STORES, TEST_SECONDS_MAX, Open, etcd

KEYS = st.sampled_from(["scope/a", "scope/b", "scope/ab", "scopes", "campaign/1"])
VALUES = st.one_of(st.none(), st.binary(max_size=8))
ENTRIES = st.one_of(st.none(), st.binary(max_size=4))
SETTINGS = settings(max_examples=25, stateful_step_count=20, deadline=None, database=None)
ETCD_SETTINGS = settings(SETTINGS, max_examples=6)  # each call is one over a network


class StoreAndModel(RuleBasedStateMachine):
    """The model has the live records, the last change of each record, and the history."""

    def __init__(self, open_store: Open) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.exit_stack = AsyncExitStack()
        self.store: Store = self.runner.run(self.exit_stack.enter_async_context(open_store()))
        self.live: dict[str, Record] = {}
        self.last: dict[str, Record] = {}
        self.history: list[tuple[int, bytes]] = []
        self.first = self.revision = self.runner.run(self.store.load()).revision

    def teardown(self) -> None:
        self.runner.run(self.exit_stack.aclose())
        self.runner.close()

    @rule(
        values=st.dictionaries(KEYS, VALUES, max_size=4),
        checked=st.sets(KEYS, max_size=3),
        entries=ENTRIES,
    )
    def commit(
        self, values: dict[str, bytes | None], checked: set[str], entries: bytes | None
    ) -> None:
        writes = [Write(key, value, self.live_revision(key)) for key, value in values.items()]
        checks = [
            RevisionCheck(key, self.live_revision(key)) for key in sorted(checked - values.keys())
        ]
        revision = self.runner.run(self.store.commit(writes, checks, entries))
        assert revision > self.revision
        self.revision = revision
        if entries is not None:
            self.history.append((revision, entries))
        for write in writes:
            self.apply(write, revision)

    @rule(
        values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4),
        wrong=st.integers(min_value=0, max_value=30),
        index=st.integers(min_value=0, max_value=3),
        is_check=st.booleans(),
    )
    def commit_with_one_wrong_revision(
        self, values: dict[str, bytes | None], wrong: int, index: int, is_check: bool
    ) -> None:
        writes = [Write(key, value, self.live_revision(key)) for key, value in values.items()]
        right = writes.pop(index % len(writes))
        wrong += self.first if wrong else 0  # 0 stands for absent
        revision = wrong if wrong != right.revision else wrong + 1
        checks = [RevisionCheck(right.key, revision)] if is_check else []
        if not is_check:
            writes.append(Write(right.key, right.value, revision))
        with pytest.raises(Conflict):
            self.runner.run(self.store.commit(writes, checks, b"never"))

    @rule(
        before=st.integers(min_value=0, max_value=40), limit=st.integers(min_value=0, max_value=5)
    )
    def trim(self, before: int, limit: int) -> None:
        before += self.first
        old = [position for position, _ in self.history[:-1] if position < before]
        count = min(len(old), limit)
        assert self.runner.run(self.store.trim(before, limit)) == count
        del self.history[:count]

    @invariant()
    def reads_match(self) -> None:
        for prefix in ("", "scope/", "scope/a", "t"):
            loaded = self.runner.run(self.store.load(prefix))
            assert set(loaded.records) == {
                record for record in self.live.values() if record.key.startswith(prefix)
            }
            assert loaded.revision >= self.revision  # etcd counts its other uses, too
        for key in ("scope/a", "campaign/1"):
            expected = self.live.get(key, Record(key, None, self.revision))
            assert self.runner.run(self.store.get(key)) == expected

    @invariant()
    def watches_match(self) -> None:
        for after in (self.first, (self.first + self.revision) // 2, self.revision - 1):
            expected = {record for record in self.last.values() if record.revision > after}
            if expected:
                records = self.runner.run(self.first_batch(after))
                assert set(records) == expected
                revisions = [record.revision for record in records]
                assert revisions == sorted(revisions)

    @invariant()
    def histories_match(self) -> None:
        for read, expected in (
            (self.store.history(), self.history),
            (self.store.history(limit=3), self.history[:3]),
            (self.store.latest(limit=3), self.history[::-1][:3]),
        ):
            values = self.runner.run(read)
            assert [(value.position, value.value) for value in values] == expected

    def live_revision(self, key: str) -> int:
        return self.live[key].revision if key in self.live else 0

    def apply(self, write: Write, revision: int) -> None:
        if write.value is None and write.key not in self.live:
            return
        self.last[write.key] = Record(write.key, write.value, revision)
        self.live.pop(write.key, None)
        if write.value is not None:
            self.live[write.key] = self.last[write.key]

    async def first_batch(self, after: int) -> tuple[Record, ...]:
        async with asyncio.timeout(TEST_SECONDS_MAX):
            return (await anext(self.store.watch(after))).records


@pytest.mark.parametrize("open_store", STORES, ids=lambda store: store.__name__)
def test_a_store_behaves_like_the_model(open_store: Open) -> None:
    """Whatever the order of calls, the store and the dict agree."""

    class OnThisStore(StoreAndModel):
        def __init__(self) -> None:
            super().__init__(open_store)

    run_state_machine_as_test(
        OnThisStore, settings=ETCD_SETTINGS if open_store is etcd else SETTINGS
    )
