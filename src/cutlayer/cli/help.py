"""What `--help` shows of a command beside its options."""

import inspect

import typer


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["Examples:", *(f"[bold]cutlayer {line}[/bold]" for line in lines)])


def unbreak(app: typer.Typer) -> None:
    """Let the terminal break the lines of each command's help, wherever the source breaks them."""
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
