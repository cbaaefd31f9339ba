"""What every store refuses before it writes: the same rule, in the same words, whichever store is
behind.
"""

from collections.abc import Sequence

from forewarn.errors import Conflict, Invalid, StoreLost
from forewarn.store.base import WRITES_MAX, Write


def check_writes(writes: Sequence[Write]) -> None:
    """At most WRITES_MAX writes, and none of them twice to one key: only one of the two could be
    true.
    """
    if len(writes) > WRITES_MAX:
        raise Invalid(
            f"A commit of {len(writes)} writes; at most {WRITES_MAX} are accepted",
            writes_max=WRITES_MAX,
        )
    keys: set[str] = set()
    for write in writes:
        if write.key in keys:
            raise Invalid(
                f"A commit that writes {write.key!r} twice; one write to a key is accepted",
                key=write.key,
            )
        keys.add(write.key)


def check_revision(write: Write, found: int) -> None:
    """A write stands only on the revision that its writer read.

    Found 0: there is no such record.
    """
    if write.revision != found:
        raise Conflict(
            f"{write.key!r} is at revision {found}; the write stands on revision {write.revision}",
            key=write.key,
            found=found,
            expected=write.revision,
        )


def check_watch(after: int, forgotten: int) -> None:
    """A watch must not miss a deletion: where it could, whoever watches loads everything again."""
    if after < forgotten:
        raise StoreLost(
            f"What was deleted up to revision {forgotten} is forgotten; a watch after {after} would miss some: load again",
            after=after,
            forgotten=forgotten,
        )
