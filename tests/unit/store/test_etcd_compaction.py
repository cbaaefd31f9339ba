"""Old revisions of etcd are compacted for as long as the process runs."""

import asyncio
from typing import Any

import pytest
from aetcd import rpc

from forewarn.errors import StoreLost
from forewarn.store.etcd import EtcdStore
from tests.unit.web.instant_loop import EagerLoop

HOUR = 3600.0


class Client:
    """Each call gets the next revision, or raises the next of these errors."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self._revision = 0
        self.compacted = list[int]()

    async def read(self, request: Any) -> Any:
        self._raise_next()
        self._revision += 1
        return rpc.TxnResponse(
            header=rpc.ResponseHeader(revision=self._revision),
            responses=[rpc.ResponseOp(response_range=rpc.RangeResponse())],
        )

    async def write(self, request: Any) -> Any:
        self.compacted.append(request.revision)
        self._raise_next()

    async def close(self) -> None: ...

    def _raise_next(self) -> None:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error


def compacted(hours: int, *errors: Exception | None) -> list[int]:
    """The revisions that were compacted in this time, with a retention of an hour."""

    async def main() -> list[int]:
        client: Any = Client(*errors)
        store = EtcdStore(client, "test", HOUR)
        await asyncio.sleep(hours * HOUR + 1)
        await store.close()
        return list(client.compacted)

    with asyncio.Runner(loop_factory=EagerLoop) as runner:
        return runner.run(main())


def test_revision_is_compacted_when_the_retention_has_passed() -> None:
    assert compacted(3) == [1, 2, 3]


def test_compaction_continues_while_another_server_compacts_more() -> None:
    assert compacted(3, None, None, StoreLost("it has been compacted")) == [1, 2, 3]


@pytest.mark.parametrize("error", [StoreLost("no leader"), ValueError("a malformed reply")])
def test_compaction_continues_after_an_error(error: Exception) -> None:
    """Else etcd would fill up, which nobody would notice."""
    assert compacted(3, error) == [1, 2]
    assert compacted(4, None, error) == [2, 3]
