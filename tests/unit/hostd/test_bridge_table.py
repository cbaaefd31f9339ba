"""The nftables rules of a bridge, as text and with a fake nft. tests/e2e/test_bridge_table.py loads
them.
"""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from forewarn.errors import Unavailable
from forewarn.hostd.bridge_table import BridgeTable, Ports, table_name, write_script

MAC = "02:00:00:00:00:01"
ADDRESSES = ("169.254.169.254", "fe80::a9fe:a9fe")


def script(*addresses: str, guests: tuple[int, ...] = (3,), others: tuple[int, ...] = (2,)) -> str:
    return write_script("forewarn_br0", addresses, MAC, Ports(frozenset(guests), frozenset(others)))


def test_rules_are_the_same_in_whatever_order_ports_are_found() -> None:
    """Else they would be loaded again and again."""
    first = script(*ADDRESSES, guests=(9, 4, 17), others=(5, 1))

    assert first == script(*ADDRESSES, guests=(17, 9, 4), others=(1, 5))
    assert "iif { 4, 9, 17 } goto guest_request" in first


def test_bridge_without_ports_has_rules_that_nft_accepts() -> None:
    """It accepts no empty set."""
    assert "{  }" not in script(*ADDRESSES, guests=(), others=())


def test_address_by_which_the_host_is_reached_is_never_taken() -> None:
    """To drop it at the port to the LAN would cut the host off."""
    rules = script("192.168.1.10", "fe80::a9fe:a9fe")

    assert "192.168.1.10" not in rules
    assert "ip6 daddr fe80::a9fe:a9fe goto request" in rules


def test_name_of_a_table_has_only_characters_that_nft_accepts() -> None:
    assert table_name("br-lan.7") == "forewarn_br-lan.7"
    assert table_name('b"; {') == "forewarn_b_22__3b__20__7b_"


# --- keep


class FakeNft:
    """Tables by their names. `fail_on` is the command that fails; `after_load` is what other
    programs do right after each load.
    """

    def __init__(self) -> None:
        self.tables: dict[str, str] = {"filter": ""}
        self.generation = 1
        self.loads = 0
        self.fail_on: tuple[str, ...] = ()
        self.after_load: list[Callable[[], None]] = []

    def read_generation(self) -> int:
        return self.generation

    def change(self, name: str, rules: str) -> None:
        self.generation += 1
        self.tables[name] = rules

    def flush(self) -> None:
        self.generation += 1
        self.tables = {}

    async def run(self, arguments: Sequence[str], script: str) -> str:
        if self.fail_on and arguments[: len(self.fail_on)] == list(self.fail_on):
            raise Unavailable("nft takes longer than 10 seconds")
        if arguments[0] == "-f":
            self.loads += 1
            self.change("forewarn_br0", script)
            if self.after_load:
                self.after_load.pop(0)()
            return ""
        if "tables" in arguments:
            return "".join(f"table bridge {name}\n" for name in self.tables)
        return self.tables[arguments[-1]]


@pytest.fixture
def nft() -> FakeNft:
    return FakeNft()


@pytest.fixture
def table(nft: FakeNft) -> BridgeTable:
    return BridgeTable("br0", ADDRESSES, nft.run, nft.read_generation)


def keep(table: BridgeTable) -> None:
    asyncio.run(table.keep(MAC, Ports(frozenset({3}), frozenset({2}))))


def test_table_is_loaded_once(nft: FakeNft, table: BridgeTable) -> None:
    keep(table)
    nft.change("filter", "changed by another program")
    for _ in range(3):
        keep(table)

    assert nft.loads == 1


def test_table_that_is_flushed_is_loaded_again(nft: FakeNft, table: BridgeTable) -> None:
    keep(table)
    nft.flush()
    keep(table)

    assert (nft.loads, "forewarn_br0" in nft.tables) == (2, True)


def test_table_that_is_flushed_right_after_its_load_is_loaded_again(
    nft: FakeNft, table: BridgeTable
) -> None:
    """Firewalls flush and load at boot, when the daemon starts too."""
    nft.after_load = [nft.flush]
    keep(table)

    assert "forewarn_br0" in nft.tables


def test_table_that_is_always_flushed_is_a_problem(nft: FakeNft, table: BridgeTable) -> None:
    nft.after_load = [nft.flush] * 3
    with pytest.raises(Unavailable, match="forewarn_br0 was removed while it was loaded"):
        keep(table)
    keep(table)

    assert "forewarn_br0" in nft.tables


def test_table_that_is_changed_right_after_its_load_is_loaded_again(
    nft: FakeNft, table: BridgeTable
) -> None:
    nft.after_load = [lambda: nft.change("forewarn_br0", "without a rule")]
    keep(table)

    assert "goto request" in nft.tables["forewarn_br0"]


def test_tables_of_others_that_always_change_do_not_keep_the_table_from_being_loaded(
    nft: FakeNft, table: BridgeTable
) -> None:
    nft.after_load = [lambda: nft.change("filter", "changed")] * 9
    for _ in range(5):
        keep(table)

    assert nft.loads == 3


@pytest.mark.parametrize("command", [("list", "tables"), ("-s", "-t", "list")])
def test_table_is_not_taken_for_loaded_when_nft_cannot_list_it(
    nft: FakeNft, table: BridgeTable, command: tuple[str, ...]
) -> None:
    """Else its removal would not be noticed."""
    nft.fail_on = command
    with pytest.raises(Unavailable, match="nft takes longer"):
        keep(table)
    nft.fail_on = ()
    keep(table)
    nft.flush()
    keep(table)

    assert "forewarn_br0" in nft.tables


def test_table_that_nft_cannot_list_is_neither_restored_nor_forgotten(
    nft: FakeNft, table: BridgeTable
) -> None:
    keep(table)
    nft.change("filter", "changed by another program")
    nft.fail_on = ("list",)
    with pytest.raises(Unavailable, match="nft takes longer"):
        keep(table)
    nft.fail_on = ()
    keep(table)

    assert nft.loads == 1
