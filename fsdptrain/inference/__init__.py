"""An exported model in one process: its loss on files, and answers at a terminal."""
