"""Parameter types that several routes share: injected services, list parameters, an empty body."""

from typing import Annotated

import msgspec
from litestar.di import NamedDependency
from litestar.params import QueryParameter

from forewarn.auth.tokens import Tokens
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.web.control.auth import Principal

LIST_MAX = 10_000

EngineDependency = NamedDependency[Engine]
OperationsDependency = NamedDependency[Operations]
PrincipalDependency = NamedDependency[Principal]
TokensDependency = NamedDependency[Tokens]
Limit = Annotated[
    int, QueryParameter(ge=1, le=LIST_MAX, description="Items per page; `total` counts all.")
]
Cursor = Annotated[
    str | None, QueryParameter(description="The `next` of the previous page; omit for the first.")
]


class EmptyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields: the path is sufficient."""


EMPTY_BODY = EmptyBody()
