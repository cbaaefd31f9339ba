"""What operators read when an etcd cannot be used."""

import asyncio

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from forewarn.store.etcd_client import EtcdClient
from forewarn.store.etcd_options import EtcdOptions

UNRESOLVED = (
    "errors resolving h1:2379: [field:hostname lookup error:address lookup failed for h1:2379: "
    "Domain name not found]"
)
REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:2379: "
    "Failed to connect to remote host: Connection refused"
)


@pytest.mark.parametrize(
    ("details", "cause"),
    [(UNRESOLVED, "Domain name not found"), (REFUSED, "Connection refused")],
)
def test_message_has_the_cause_alone(details: str, cause: str) -> None:
    """gRPC puts what it tried before it, and may put brackets around it."""
    error = AioRpcError(StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)

    async def message() -> str:
        client = EtcdClient(["h1:2379"], EtcdOptions())
        await client.close()
        return client.translate(error).message

    assert asyncio.run(message()) == f"etcd at h1:2379: {cause}"
