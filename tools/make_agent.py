"""Build the agent as one file that needs only Python: `python tools/make_agent.py [FILE]`.

It contains only what runs inside a VM. The build is reproducible: sorted names, one date, one mode.
"""

import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PARTS = (
    *("__init__.py", "error_report.py", "errors.py", "log.py", "process_table.py", "systemd.py"),
    *("client", "agent"),
)
FIRST_LINE = b"#!/usr/bin/env python3\n"
START = """import sys

from forewarn.agent.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
"""
DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a zip file can have."""


def build(target: Path, source: Path = SOURCE) -> None:
    roots = [source / "forewarn" / part for part in PARTS]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py"))]
    contents = {file.relative_to(source).as_posix(): file.read_bytes() for file in files}
    contents["__main__.py"] = START.encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as output:
        output.write(FIRST_LINE)
        with zipfile.ZipFile(output, "w") as archive:
            for name in sorted(contents):
                member = zipfile.ZipInfo(name, DATE)
                member.create_system, member.external_attr = 3, 0o644 << 16
                archive.writestr(member, contents[name], zipfile.ZIP_DEFLATED, 9)
    target.chmod(0o755)


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/forewarn-agent.pyz")
    build(path)
    print(f"{path}: {path.stat().st_size:,} bytes; try: {path} --help")
