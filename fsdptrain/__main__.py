"""The `fsdptrain` command, and `python -m fsdptrain`."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends the process without a traceback."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fsdptrain.cli import main as command

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
