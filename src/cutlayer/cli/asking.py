"""Questions to the person at the terminal, and where the answers come from if there is none."""

import os
import sys
from pathlib import Path

import typer

from cutlayer.errors import ConfigError

PASSPHRASE = "CUTLAYER_PASSPHRASE"  # in the environment


def terminal() -> bool:
    """Return whether a person can answer."""
    return sys.stdin.isatty()


def passphrase(file: Path | None, *, new: bool = False) -> bytes:
    """Return the passphrase of a CA: of a file, of the environment, or asked for, twice if it is new."""
    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--passphrase-file {file} cannot be read: {error}") from None
    elif PASSPHRASE in os.environ:
        found = os.environ[PASSPHRASE]
    elif terminal():
        found = typer.prompt("Passphrase of the CA", hide_input=True, confirmation_prompt=new, err=True)
    else:
        other = ", or --no-passphrase" if new else ""
        raise ConfigError(
            f"there is no terminal to ask for the passphrase: give --passphrase-file FILE, set ${PASSPHRASE}{other}"
        )
    if not found:
        raise ConfigError("the passphrase is empty; give one")
    return found.encode()
