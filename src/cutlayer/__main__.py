"""`python -m cutlayer` is the command line."""

from cutlayer.cli import main

main()
