"""`python -m fsdptrain` is the same as the `fsdptrain` command."""

from fsdptrain.cli import main

main()
