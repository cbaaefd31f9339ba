"""A fleet in several files: a folder is read as one fleet, and what is wrong with it is named with
file and line.
"""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest

from forewarn.cli import fleet as cli
from forewarn.core.timing import Timing
from forewarn.engine.engine import Engine
from forewarn.engine.operations import Operations
from forewarn.errors import Invalid
from forewarn.fleetfile.files import FILES_MAX, compute_digest, read_sources
from forewarn.fleetfile.parser import Fleet, parse, parse_all
from forewarn.fleetfile.yaml_source import SIZE_MAX
from forewarn.lab.clock import VirtualClock
from forewarn.server import apply_fleet_file
from forewarn.store.memory import MemoryStore
from tests.builders import NOON, OPERATION

ID = "602d9444-d2cd-49c7-8624-8643e7171297"
WEB = f"""scopes:
  - name: web
    kind: availability-set
    vms:
      - {{name: web-0, address: 10.0.0.1}}
      - {{name: web-1, address: 10.0.0.2, id: {ID}}}
hosts: [host-a, host-b]
"""
DB = json.dumps(
    {
        "scopes": [{"name": "db", "vms": [{"name": "db-0", "address": "10.0.0.3"}]}],
        "hosts": ["host-b", "host-c"],
    }
)


def write(folder: Path, **files: str) -> Path:
    """Files by their names, with an underscore for the dot."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def read(folder: Path) -> Fleet:
    return parse_all(read_sources(folder))


def test_files_of_a_folder_are_one_fleet(tmp_path: Path) -> None:
    """Teams keep a file each, and a fleet may be larger than a file may be."""
    folder = write(
        tmp_path / "fleet", b_yaml=WEB, a_json=DB, notes_txt="not a fleet", c_yml="scopes: []"
    )
    write(folder, _hidden_yaml="scopes: [")
    write(folder / "below", d_yaml="scopes: [")

    fleet = read(folder)
    assert [scope.name for scope in fleet.scopes] == ["db", "web"]
    assert fleet.hosts == ("host-b", "host-c", "host-a")
    assert fleet.scopes == (*parse(DB.encode(), "").scopes, *parse(WEB.encode(), "").scopes)


@pytest.mark.parametrize(
    ("scope", "field", "expected", "other", "got"),
    [
        (
            "{name: WEB, kind: scale-set}",
            "name",
            "a scope name not used by",
            "a.yaml:2: scopes[0].name",
            "WEB",
        ),
        (
            "{name: x, vms: [{name: Web-1}]}",
            "vms[0].name",
            "a VM name not used by",
            "a.yaml:6: scopes[0].vms[1].name",
            "Web-1",
        ),
        (
            "{name: x, vms: [{name: y, address: 10.0.0.1}]}",
            "vms[0].address",
            "an address not used by",
            "a.yaml:5: scopes[0].vms[0].address",
            "10.0.0.1",
        ),
        (
            "{name: x, vms: [{name: y, id: ID}]}",
            "vms[0].id",
            "an id not used by",
            "a.yaml:6: scopes[0].vms[1].id",
            ID,
        ),
        (
            "{name: x, vms: [{name: ID}]}",
            "vms[0].name",
            "a VM name that is not",
            "a.yaml:6: scopes[0].vms[1].id",
            ID,
        ),
    ],
)
def test_duplicate_across_files_names_both_lines(
    tmp_path: Path, scope: str, field: str, expected: str, other: str, got: str
) -> None:
    """Whoever reads the error did perhaps not write either of them."""
    folder = write(
        tmp_path / "fleet", a_yaml=WEB, b_yaml=f"scopes:\n  - {scope.replace('ID', ID)}\n"
    )

    with pytest.raises(Invalid) as locate:
        read(folder)
    assert locate.value.message == (
        f"{folder}/b.yaml:2: scopes[0].{field}: expected {expected} {folder}/{other}, got '{got}'"
    )
    assert locate.value.facts == {
        "source": f"{folder}/b.yaml",
        "line": 2,
        "field": f"scopes[0].{field}",
    }


def test_duplicate_scope_within_a_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "fleet", a_json=DB, b_yaml=WEB.replace("web-1", "web-0"))

    with pytest.raises(
        Invalid,
        match=r"b\.yaml:6: scopes\[0\]\.vms\[1\]\.name: expected a VM name not used by scopes\[0\]",
    ):
        read(folder)


def test_an_error_names_its_file(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "fleet",
        a_yaml=WEB,
        b_yaml="scopes:\n  - name: x\n    vms: [{name: y, update_domain: 100}]\n",
    )

    with pytest.raises(
        Invalid, match=r"/b\.yaml:3: scopes\[0\]\.vms\[0\]\.update_domain: expected a whole number"
    ):
        read(folder)


def test_a_folder_without_fleet_files_is_refused(tmp_path: Path) -> None:
    """An empty fleet would be made of it, and every VM would leave."""
    with pytest.raises(
        Invalid, match=r"has no fleet file; expected \*\.yaml, \*\.yml or \*\.json in it"
    ):
        read(tmp_path)


def test_a_folder_has_a_limit(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 1):
        (tmp_path / f"{number}.yaml").touch()
    with pytest.raises(Invalid, match="has 1001 fleet files; expected at most 1000"):
        read(tmp_path)


def test_folder_over_the_size_limit_is_not_read(tmp_path: Path) -> None:
    for number in range(17):
        with (tmp_path / f"{number}.yaml").open("wb") as sparse:
            sparse.truncate(SIZE_MAX)
    with pytest.raises(Invalid, match="have 1140850688 bytes; expected at most 1073741824"):
        read(tmp_path)


def test_unreadable_path_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"cannot read the fleet file .*/none\.yaml: No such file or directory"
    ):
        read(tmp_path / "none.yaml")


def test_the_digest_changes_with_every_file(tmp_path: Path) -> None:
    """It decides whether a folder is applied when the service starts."""
    folder = write(tmp_path / "fleet", a_yaml=WEB)
    digests = [compute_digest(read_sources(folder))]
    assert digests == [hashlib.sha256(WEB.encode()).hexdigest()]
    for files in ({"b_json": DB}, {"b_json": DB + " "}, {"c_yaml": "scopes: []"}):
        digests.append(compute_digest(read_sources(write(folder, **files))))
    (folder / "c.yaml").rename(folder / "d.yaml")
    digests.append(compute_digest(read_sources(folder)))
    assert len(set(digests)) == 5
    assert compute_digest(read_sources(folder)) == digests[-1]


def test_folder_is_applied_again_when_a_file_changed(tmp_path: Path) -> None:
    """What happened to the fleet since it was applied stands, as long as the files are the same."""
    folder = write(tmp_path / "fleet", a_yaml=WEB, b_json=DB)

    async def start() -> None:
        engine = Engine(MemoryStore(), VirtualClock(NOON), Timing())
        operations = Operations(engine, lambda: OPERATION)
        await apply_fleet_file(operations, folder)
        assert sorted(engine.board.vms) == ["db-0", "web-0", "web-1"]
        await operations.apply(Fleet(), by="operator")
        await apply_fleet_file(operations, folder)
        assert not engine.board.vms
        write(folder, c_yaml="scopes: [{name: new, vms: [{name: new-0}]}]")
        await apply_fleet_file(operations, folder)
        assert sorted(engine.board.vms) == ["db-0", "new-0", "web-0", "web-1"]

    asyncio.run(start())


def test_a_folder_can_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "fleet", a_yaml=WEB, b_json=DB)

    cli.check(str(folder))
    assert capsys.readouterr().out == f"{folder}: OK, 2 scopes with 3 VMs\n"
