"""Tables in Markdown."""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        head,
        [
            ("-" * width if column == 0 else "-" * (width - 1) + ":")
            for column, width in enumerate(widths)
        ],
        *rows,
    ]
    return [
        "| "
        + " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(pairs)
        )
        + " |"
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
