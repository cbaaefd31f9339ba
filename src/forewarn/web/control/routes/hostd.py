"""What a host daemon calls: it says what it has, and gets what it should do.

The token decides the host. The call may be repeated: that changes nothing.
"""

from types import MappingProxyType

from litestar import Controller, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from forewarn import errors
from forewarn.auth.tokens import Role
from forewarn.platform.remote import Work, WorkRequest
from forewarn.web.control.dependencies import Call, Name

BODY_BYTES_MAX = 4 * 1024 * 1024
"""2,000 VMs with long names have 1.8 MB, and a failed command of each adds 1 MB."""


class HostDaemonController(Controller):
    path = "/api/v1/hosts/{host:str}"
    tags = ("Host daemons",)
    opt = MappingProxyType(
        {
            "role": Role.HOST,
            "ignores_key": True,
            "is_limited": True,
            "errors": (errors.HostTaken,),
        }
    )

    @post("/work", status_code=HTTP_200_OK, request_max_body_size=BODY_BYTES_MAX)
    async def request_work(self, host: Name, call: Call, data: JSONBody[WorkRequest]) -> Work:
        """Reports VMs and results, and returns new work. Also the daemon's sign of life."""
        if call.principal.host != host:
            raise errors.Forbidden(
                f"{call.by} is for the host {call.principal.host}, not for {host[:80]!r}",
                host=host[:80],
            )
        scopes = call.principal.scopes
        return await call.service.hosts.work(host, data, by=call.by, scopes=scopes)
