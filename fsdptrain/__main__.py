"""The `fsdptrain` command, and `python -m fsdptrain`."""

import signal


def main() -> None:
    """Run the command line. Until it has read its arguments, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fsdptrain.cli import main as command

    command()


if __name__ == "__main__":
    main()
