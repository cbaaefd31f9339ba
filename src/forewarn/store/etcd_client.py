"""Calls to an etcd cluster: a channel for each endpoint, fail-over, authentication, our errors.

The messages and stubs are those that the package aetcd ships, generated from etcd's own files.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from aetcd import rpc

from forewarn.errors import Compacted, Error, Invalid, StoreDenied, StoreLost, StoreUnusable
from forewarn.store.etcd_options import EtcdOptions

CALL_SECONDS_MAX = 2.5
"""Longer than the election of a leader. A lease survives one call without a reply."""
CHANNEL_OPTIONS = (
    # etcd accepts a ping every 5 seconds; one that is not answered ends the connection
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
REQUIRE_LEADER = ("hasleader", "true")
"""A member that is cut off from the others refuses the call, or ends the watch."""
VERSION_MIN = [3, 4]
TOKEN_ENDED = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")

PROBLEMS: dict[str, tuple[type[Error], str]] = {
    "has been compacted": (Compacted, "the changes since then are compacted; load again"),
    "space exceeded": (StoreUnusable, "its quota is used up, nothing was written; defragment it"),
    "request is too large": (StoreUnusable, "the record is too large for --max-request-bytes"),
    "invalid user ID or password": (StoreDenied, "wrong --etcd-user or --etcd-password-file"),
    "authentication is not enabled": (StoreUnusable, "it has no users; expected no --etcd-user"),
    "user name is empty": (StoreDenied, "it needs --etcd-user and --etcd-password-file"),
    "permission denied": (StoreDenied, "this user needs a role with readwrite for the prefix"),
    "has expired": (StoreLost, "its certificate has expired"),
    "CERTIFICATE_VERIFY_FAILED": (StoreLost, "its certificate is not from --etcd-ca-file"),
    "Hostname Verification": (StoreLost, "its certificate is for another host name"),
    "Handshake read failed": (StoreLost, "no TLS there, or it expects --etcd-certificate-file"),
}
"""A part of etcd's or gRPC's message, our error, and what it means for the operator."""


class EtcdEndpoint:
    """One member. Its channel verifies this member's own host name."""

    def __init__(self, address: str, credentials: Any) -> None:
        self.address = address
        self.channel = (
            grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, CHANNEL_OPTIONS)
        )
        key_values, leases = rpc.KVStub(self.channel), rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel).Watch
        self._renew = leases.LeaseKeepAlive
        self.methods: dict[type[Any], Any] = {
            rpc.AuthenticateRequest: rpc.AuthStub(self.channel).Authenticate,
            rpc.CompactionRequest: key_values.Compact,
            rpc.LeaseGrantRequest: leases.LeaseGrant,
            rpc.LeaseKeepAliveRequest: self._renew_once,
            rpc.RangeRequest: key_values.Range,
            rpc.StatusRequest: rpc.MaintenanceStub(self.channel).Status,
            rpc.TxnRequest: key_values.Txn,
        }

    async def _renew_once(self, request: Any, **options: Any) -> Any:
        """etcd has only a stream for this."""
        call = _open(self._renew, request, **options)
        try:
            return await call.read()
        finally:
            call.cancel()
            await call.code()


class EtcdClient:
    """Uses one endpoint until it fails, then the next."""

    def __init__(self, addresses: Sequence[str], options: EtcdOptions) -> None:
        credentials = _read_credentials(options)
        self._options = options
        password = _read(options.password_file, "--etcd-password-file")
        self._password = password.decode(errors="replace").strip()
        self._endpoints = [EtcdEndpoint(address, credentials) for address in addresses]
        self._token = ""
        self._authenticating: asyncio.Future[None] | None = None
        self._cluster_id = 0
        self.is_closed = False

    async def connect(self) -> None:
        """Reject what is not an etcd that can be used, before anything is written."""
        status = await self.read(rpc.StatusRequest())
        if [int(part) for part in status.version.split(".")[:2]] < VERSION_MIN:
            raise StoreUnusable(
                f"{self._endpoints[0].address} is etcd {status.version}; expected 3.4 or later"
            )

    async def read(self, request: Any) -> Any:
        """Try each endpoint in turn, until one answers."""
        for _ in self._endpoints[1:]:
            with suppress(StoreLost):
                return await self.write(request)
        return await self.write(request)

    async def write(self, request: Any) -> Any:
        """Call the present endpoint. Without a reply it is unknown whether the write happened.

        It is not tried again here: the caller must read first.
        """
        endpoint = self._endpoints[0]
        try:
            return await self._call(endpoint, request)
        except StoreLost as error:
            if not isinstance(error, Compacted):
                self._leave(endpoint)
            raise

    async def open_watch(self, request: Any) -> Any:
        """A stream of the present endpoint, on which the watch has been requested."""
        endpoint = self._endpoints[0]
        await self._authenticate(endpoint)
        return _open(endpoint.watch, request, metadata=self._metadata())

    def translate(self, error: grpc.RpcError, address: str = "") -> Error:
        """One of our errors, in words for the operator."""
        details: str = error.details() or error.code().name
        kind: type[Error] = StoreLost
        problem = details.rpartition(": ")[2].rstrip("]")  # gRPC puts the cause last, in brackets
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            kind, problem = StoreUnusable, "this is not etcd; expected etcd's client URL"
        for part, (known, meaning) in PROBLEMS.items():
            if part in details:
                kind, problem = known, meaning
                break
        return kind(f"etcd at {address or self._endpoints[0].address}: {problem}", etcd=details)

    async def close(self) -> None:
        self.is_closed = True
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    async def _call(self, endpoint: EtcdEndpoint, request: Any, *, is_retry: bool = False) -> Any:
        if self.is_closed:
            raise StoreLost("the store is closed")
        try:
            await self._authenticate(endpoint)
            token = self._token
            response = await endpoint.methods[type(request)](
                request, timeout=CALL_SECONDS_MAX, metadata=self._metadata()
            )
        except grpc.RpcError as error:
            if error.details() in TOKEN_ENDED and not is_retry:  # it was not carried out
                self._token = "" if self._token == token else self._token
                return await self._call(endpoint, request, is_retry=True)
            raise self.translate(error, endpoint.address) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StoreLost("the store was closed during the call") from error
        if response is grpc.aio.EOF:
            raise StoreLost(f"{endpoint.address}: the connection was cut")
        self._check_cluster(endpoint, response.header.cluster_id)
        return response

    async def _authenticate(self, endpoint: EtcdEndpoint) -> None:
        """Get a token, once for all calls that wait for it, or fail once for all of them."""
        if not self._options.user or self._token:
            return
        if self._authenticating is None or self._authenticating.done():
            self._authenticating = asyncio.ensure_future(self._get_token(endpoint))
        await asyncio.shield(self._authenticating)

    async def _get_token(self, endpoint: EtcdEndpoint) -> None:
        request = rpc.AuthenticateRequest(name=self._options.user, password=self._password)
        method = endpoint.methods[rpc.AuthenticateRequest]
        self._token = (await method(request, timeout=CALL_SECONDS_MAX)).token

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (REQUIRE_LEADER, ("token", self._token)) if self._token else (REQUIRE_LEADER,)

    def _check_cluster(self, endpoint: EtcdEndpoint, cluster_id: int) -> None:
        """Another cluster has other data. One restored from a snapshot has a new id, too."""
        self._cluster_id = self._cluster_id or cluster_id
        if cluster_id != self._cluster_id:
            raise StoreUnusable(
                f"etcd at {endpoint.address} is of another cluster than before, or was restored;"
                " expected members of one cluster: restart this server"
            )

    def _leave(self, endpoint: EtcdEndpoint) -> None:
        """Use the next endpoint, unless a concurrent call has done that."""
        if self._endpoints[0] is endpoint:
            self._endpoints.append(self._endpoints.pop(0))


def _open(method: Any, request: Any, **options: Any) -> Any:
    """A stream with one request. gRPC ends the requests itself only if the call is cancelled."""
    ended = asyncio.Event()

    async def requests() -> AsyncGenerator[Any, None]:
        yield request
        await ended.wait()

    call = method(requests(), **options)
    call.add_done_callback(lambda _: ended.set())
    return call


def _read(path: Path | None, option: str) -> bytes:
    try:
        return path.read_bytes() if path else b""
    except OSError as error:
        raise Invalid(f"{option}: cannot read {path}: {error.strerror}", file=str(path)) from error


def _read_credentials(options: EtcdOptions) -> Any:
    """The credentials of the channels; None without TLS."""
    authority = _read(options.ca_file, "--etcd-ca-file")
    certificate = _read(options.certificate_file, "--etcd-certificate-file")
    key = _read(options.key_file, "--etcd-key-file")
    if options.ca_file is None:
        return None
    try:  # gRPC accepts any file here, and fails later without a reason
        context = ssl.create_default_context(cafile=options.ca_file)
        if options.certificate_file:
            context.load_cert_chain(options.certificate_file, options.key_file)
    except ssl.SSLError as error:
        raise Invalid(
            "--etcd-ca-file, --etcd-certificate-file, --etcd-key-file: expected PEM files, and the"
            f" key of the certificate: {error}"
        ) from error
    return grpc.ssl_channel_credentials(authority, key or None, certificate or None)
