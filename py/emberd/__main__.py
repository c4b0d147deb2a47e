"""`python -m emberd`: the same as the `emberd` command."""

from emberd.cli import main

main()
