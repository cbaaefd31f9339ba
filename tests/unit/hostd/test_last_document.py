"""The relay compares the documents of servers that are cut off with what a guest has."""

import pytest

from forewarn.hostd.last_document import LastDocuments, Poll
from forewarn.hostd.upstream import Response

DIGITS_5000 = "9" * 5000


def poll(query: str = "", vm: str = "id-1", tag: str = "") -> Poll:
    return Poll(vm, (query.encode(), b"true"), frozenset({tag} if tag else ()), 0)


def document(incarnation: int) -> Response:
    return Response(200, [(b"ETag", b'"%d"' % incarnation)], b"{}")


@pytest.mark.parametrize("tag", [DIGITS_5000, "abc", "", "0", "-1", "1.5"])
def test_tag_that_is_no_incarnation_makes_no_document_old(tag: str) -> None:
    """The interpreter refuses to read a number of 5,000 digits: the guest would get a 500."""
    documents = LastDocuments()
    assert not documents.is_older(poll(tag=tag), document(1))


def test_guest_with_a_later_document_is_not_sent_an_older_one() -> None:
    documents = LastDocuments()
    assert documents.is_older(poll(tag="10"), document(9))
    assert not documents.is_older(poll(tag="9"), document(9))
