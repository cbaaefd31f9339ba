"""Fleet files on disk: reads one file, or all of a folder. Does not parse them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from forewarn.errors import Invalid
from forewarn.fleetfile.yaml_source import SIZE_MAX, SourceText

SUFFIXES = (".yaml", ".yml", ".json")
FILES_MAX = 1000
FOLDER_BYTES_MAX = 1024 * 1024 * 1024


def read_sources(path: Path) -> list[SourceText]:
    """Read the file, or all fleet files of the folder in the order of their names."""
    try:
        files = sorted(filter(_is_fleet_file, path.iterdir())) if path.is_dir() else [path]
        _check_folder(path, files)
        return [_read(file) for file in files]
    except OSError as error:
        raise Invalid(
            f"cannot read the fleet file {path}: {error.strerror or error}", file=str(path)
        ) from error


def compute_digest(sources: Sequence[SourceText]) -> str:
    """Hash the names and contents. For a single file it is the SHA-256 of its text."""
    if len(sources) == 1:
        return hashlib.sha256(sources[0].text).hexdigest()
    digest = hashlib.sha256()
    for source in sources:
        name, content = Path(source.name).name, hashlib.sha256(source.text).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _is_fleet_file(path: Path) -> bool:
    """Hidden files belong to editors and to the system."""
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _check_folder(path: Path, files: Sequence[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    problem = ""
    if not files:
        problem = f"the folder {path} has no fleet file; expected *.yaml, *.yml or *.json in it"
    elif len(files) > FILES_MAX:
        problem = f"the folder {path} has {len(files)} fleet files; expected at most {FILES_MAX}"
    elif size > FOLDER_BYTES_MAX:
        limit = f"expected at most {FOLDER_BYTES_MAX}"
        problem = f"the fleet files in {path} have {size} bytes; {limit}"
    if problem:
        raise Invalid(problem, file=str(path))


def _read(path: Path) -> SourceText:
    """Read one byte more than the parser accepts, so that it can reject the file."""
    with path.open("rb") as stream:
        return SourceText(str(path), stream.read(SIZE_MAX + 1))
