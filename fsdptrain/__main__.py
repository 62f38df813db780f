"""The `fsdptrain` command, and `python -m fsdptrain`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C during its imports ends the process without a traceback."""
    not_ignored = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs ignore SIGINT
    if not_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fsdptrain.cli import main as command

    if not_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
