"""The fleet file: schema, parsing with line numbers, and files on disk."""
