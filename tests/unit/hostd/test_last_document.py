"""What the relay keeps of the documents that guests got has limits, whatever guests ask for."""

import sys

import pytest

from forewarn.hostd.last_document import (
    DOCUMENT_BYTES_MAX,
    GUESTS_MAX,
    REQUESTS_MAX,
    LastDocuments,
    Poll,
)
from forewarn.hostd.upstream import Response

DIGITS_5000 = "9" * 5000
UNCHANGED = Response(304, [(b"ETag", b'"5"')], b"")


def poll(query: str = "", vm: str = "id-1", tag: str = "") -> Poll:
    return Poll(vm, (query.encode(), b"true"), frozenset({tag} if tag else ()), 0)


def document(incarnation: int, body: bytes = b"{}") -> Response:
    return Response(200, [(b"ETag", b'"%d"' % incarnation)], body)


def test_old_documents_of_one_guest_have_a_limit() -> None:
    """A guest can make up as many query strings as it likes while all servers are cut off."""
    documents = LastDocuments()
    for number in range(REQUESTS_MAX + 1):
        documents.record_old(poll(f"a={number}"), document(5))
    assert not documents.is_older(poll("a=0"), document(4)), "the first is forgotten"
    assert documents.is_older(poll("a=1"), document(4))


def test_old_documents_of_all_guests_have_a_limit() -> None:
    documents = LastDocuments()
    for number in range(GUESTS_MAX + 2):
        documents.record_old(poll(vm=f"id-{number}"), document(5))
    assert not documents.is_older(poll(vm="id-0"), document(4))
    assert documents.is_older(poll(vm=f"id-{GUESTS_MAX + 1}"), document(4))


@pytest.mark.parametrize(("more_bytes", "is_kept"), [(0, True), (1, False)])
def test_of_an_old_document_that_is_too_large_only_the_incarnation_is_kept(
    more_bytes: int, *, is_kept: bool
) -> None:
    documents = LastDocuments()
    body = b" " * (DOCUMENT_BYTES_MAX + more_bytes)
    references = sys.getrefcount(body)
    documents.record_old(poll(), document(5, body))
    assert (sys.getrefcount(body) > references) is is_kept
    assert documents.is_older(poll(), document(4))
    documents.record(poll(tag="5"), UNCHANGED, 0.0)  # a server that knows has confirmed it
    assert bool(documents.find(poll(), 0.0)) is is_kept


def test_old_document_that_has_not_changed_is_kept() -> None:
    """A guest that is restarted asks without the tag, and must not see events end."""
    documents = LastDocuments()
    documents.record_old(poll(tag="5"), UNCHANGED)
    assert documents.is_older(poll(), document(4))


@pytest.mark.parametrize("tag", [DIGITS_5000, "abc", "", "0", "-1", "1.5"])
def test_tag_that_is_no_incarnation_makes_no_document_old(tag: str) -> None:
    """The interpreter refuses to read a number of 5,000 digits: the guest would get a 500."""
    documents = LastDocuments()
    assert not documents.is_older(poll(tag=tag), document(1))


def test_guest_with_a_later_document_is_not_sent_an_older_one() -> None:
    documents = LastDocuments()
    assert documents.is_older(poll(tag="10"), document(9))
    assert not documents.is_older(poll(tag="9"), document(9))
