"""`draftree models`: which models draftree knows by name, and which of them are here."""


def models() -> None:
    """List the models that can be pulled by name."""
    from rich.console import Console
    from rich.table import Table

    from draftree.cli.inspect import format_bytes
    from draftree.weights import hub

    table = Table("name", box=None, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("here")
    table.add_column("what it is")
    for status in hub.list_models():
        size = "" if status.num_bytes is None else format_bytes(status.num_bytes)
        here = "yes" if status.is_downloaded else ""
        table.add_row(status.entry.name, size, here, status.entry.summary)
    Console(highlight=False, markup=False).print(table)
