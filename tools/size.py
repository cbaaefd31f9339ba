"""Print the lines of code of each package, without blank lines, comments and docstrings."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "forewarn"


def count_code_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), start=1)
    return sum(
        1
        for number, line in lines
        if line and not line.startswith("#") and number not in docstrings
    )


def main() -> None:
    sizes: Counter[str] = Counter()
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts
        sizes[parts[0] if len(parts) > 1 else "(top level)"] += count_code_lines(file.read_text())
    for package, lines in sorted(sizes.items()):
        print(f"{package:14} {lines:7,}")
    print(f"{'total':14} {sum(sizes.values()):7,}")


if __name__ == "__main__":
    main()
