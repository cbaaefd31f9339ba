"""Every store against the plainest one: a dict of records and a list of notes, under any sequence
of commits.
"""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from forewarn.errors import Conflict, StoreLost
from forewarn.store.base import Record, Store, Write
from tests.conformance.stores import STORES, STORY_SECONDS_MAX, Opening

KEYS = st.sampled_from(["scope/a", "scope/b", "scope/ab", "scopes", "campaign/1"])
VALUES = st.one_of(st.none(), st.binary(max_size=8))
NOTES = st.lists(st.binary(max_size=4), max_size=3)
SETTINGS = settings(max_examples=25, stateful_step_count=20, deadline=None, database=None)


class StoreAndModel(RuleBasedStateMachine):
    """The model holds live records and every record's last change; the store must agree after each
    step.
    """

    def __init__(self, opening: Opening) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.open_things = AsyncExitStack()
        self.store: Store = self.runner.run(self.open_things.enter_async_context(opening()))
        self.live: dict[str, Record] = {}
        self.last: dict[str, Record] = {}
        self.notes: list[bytes] = []
        self.trimmed = 0
        self.revision = 0
        self.forgotten = 0

    def teardown(self) -> None:
        self.runner.run(self.open_things.aclose())
        self.runner.close()

    @rule(wanted=st.dictionaries(KEYS, VALUES, max_size=4), notes=NOTES)
    def commit_on_what_is_true(self, wanted: dict[str, bytes | None], notes: list[bytes]) -> None:
        writes = [Write(key, value, self.found(key)) for key, value in wanted.items()]
        revision = self.runner.run(self.store.commit(writes, notes))
        assert revision > self.revision
        self.revision = revision
        self.notes += notes
        for write in writes:
            self.apply(write, revision)

    @rule(
        wanted=st.dictionaries(KEYS, VALUES, min_size=1, max_size=4),
        wrong=st.integers(min_value=0, max_value=30),
        chosen=st.integers(min_value=0, max_value=3),
    )
    def commit_with_one_thing_untrue(
        self, wanted: dict[str, bytes | None], wrong: int, chosen: int
    ) -> None:
        writes = [Write(key, value, self.found(key)) for key, value in wanted.items()]
        place = chosen % len(writes)
        stale = Write(
            writes[place].key,
            writes[place].value,
            wrong if wrong != writes[place].revision else wrong + 1,
        )
        with pytest.raises(Conflict):
            self.runner.run(
                self.store.commit([*writes[:place], stale, *writes[place + 1 :]], [b"never"])
            )

    @rule(
        before=st.integers(min_value=0, max_value=40), limit=st.integers(min_value=0, max_value=5)
    )
    def trim(self, before: int, limit: int) -> None:
        count = max(min(before - 1 - self.trimmed, limit, len(self.notes) - self.trimmed - 1), 0)
        assert self.runner.run(self.store.trim(before, limit)) == count
        self.trimmed += count

    @rule(revision=st.integers(min_value=0, max_value=30))
    def forget(self, revision: int) -> None:
        dead = [one for one in self.last.values() if one.value is None and one.revision <= revision]
        assert self.runner.run(self.store.forget(revision)) == len(dead)
        for one in dead:
            del self.last[one.key]
            self.forgotten = max(self.forgotten, one.revision)

    @invariant()
    def loads_are_the_model(self) -> None:
        for prefix in ("", "scope/", "scope/a", "t"):
            loaded = self.runner.run(self.store.load(prefix))
            assert set(loaded.records) == {
                record for record in self.live.values() if record.key.startswith(prefix)
            }
            assert loaded.revision == self.revision

    @invariant()
    def watches_are_the_model(self) -> None:
        for after in (0, self.revision // 2, self.revision - 1):
            expected = {record for record in self.last.values() if record.revision > after}
            if after < self.forgotten:
                with pytest.raises(StoreLost):
                    self.runner.run(self.first_batch(after))
            elif expected:
                told = self.runner.run(self.first_batch(after))
                assert set(told) == expected
                assert [record.revision for record in told] == sorted(
                    record.revision for record in told
                )

    @invariant()
    def the_history_is_the_model(self) -> None:
        kept = list(enumerate(self.notes, start=1))[self.trimmed :]
        assert [(note.number, note.body) for note in self.runner.run(self.store.history())] == kept
        assert [
            (note.number, note.body) for note in self.runner.run(self.store.history(limit=3))
        ] == kept[:3]
        assert [
            (note.number, note.body) for note in self.runner.run(self.store.latest(limit=3))
        ] == kept[::-1][:3]

    def found(self, key: str) -> int:
        return self.live[key].revision if key in self.live else 0

    def apply(self, write: Write, revision: int) -> None:
        if write.value is None and write.key not in self.live:
            return
        self.last[write.key] = Record(write.key, write.value, revision)
        self.live.pop(write.key, None)
        if write.value is not None:
            self.live[write.key] = self.last[write.key]

    async def first_batch(self, after: int) -> tuple[Record, ...]:
        async with asyncio.timeout(STORY_SECONDS_MAX):
            return (await anext(self.store.watch(after))).records


@pytest.mark.parametrize("opening", STORES, ids=lambda opening: opening.__name__)
def test_a_store_is_a_dict_that_remembers_its_changes(opening: Opening) -> None:
    """Whatever is asked in whatever order, the store and the dict tell the same."""

    class OnThisStore(StoreAndModel):
        def __init__(self) -> None:
            super().__init__(opening)

    run_state_machine_as_test(OnThisStore, settings=SETTINGS)
