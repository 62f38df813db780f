"""Messages between the stages of a pipeline: hidden states to the next stage, their gradients to the one before.

Each kind of message has a process group of its own, in which messages are received in the order in which they are sent,
and a send may wait until it is received. With both directions in one group two ranks would wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

ACTIVATIONS, GRADIENTS = "hidden states", "gradients"  # of kinds of messages
AROUND = " around"  # of those from the last place of the pipeline to the first, and back


def kinds_of_messages(stages_of_rank: int) -> list[str]:
    """Return the kinds of messages in a pipeline."""
    kinds = [ACTIVATIONS, GRADIENTS]
    return kinds + [kind + AROUND for kind in kinds] if stages_of_rank > 1 else kinds


class Messages:
    """Sends to and receives from the ranks that have the same rows at the other places of the pipeline."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]) -> None:
        """Take a group for each of `kinds_of_messages`; its ranks are in the order of their places."""
        self._groups = groups
        self._place, self._places = groups[ACTIVATIONS].rank(), groups[ACTIVATIONS].size()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: dict[str, tuple[Any, torch.Tensor]] = {}  # kind → the next message, which may have come

    def send(self, kind: str, tensor: torch.Tensor) -> None:
        """Send a tensor; nothing waits until it is received."""
        group, neighbour = self._towards(kind, 1)
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, group=group, group_dst=neighbour), tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def expect(self, kind: str, into: torch.Tensor) -> None:
        """Let the next message come into a tensor while something else is computed.

        What is sent after it in the same group waits for it: expect it only when what was computed before is sent.
        """
        group, neighbour = self._towards(kind, -1)
        self._posted[kind] = dist.irecv(into, group=group, group_src=neighbour), into

    def receive(self, kind: str, into: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Return the next message; `into` takes it unless it is expected already. `micro_batch` is for reports."""
        if kind not in self._posted:
            self.expect(kind, into)
        work, message = self._posted.pop(kind)
        group, neighbour = self._towards(kind, -1)
        await_message(work, f"{kind} of micro-batch {micro_batch} from rank {dist.get_global_rank(group, neighbour)}")
        return message

    def exchange_ends(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the rank at the other end of the pipeline; called at both ends."""
        other = self._places - 1 - self._place
        ways = [self._groups[kind] for kind in (ACTIVATIONS, GRADIENTS)][:: -1 if self._place else 1]
        sent = dist.isend(tensor.contiguous(), group=ways[0], group_dst=other)
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        await_message(dist.irecv(received, group=ways[1], group_src=other), "the gradient of the tied embedding")
        await_message(sent, "the other end of the pipeline")
        return received

    def finish(self) -> None:
        """Wait until all that was sent is received."""
        while self._sent:
            work, _ = self._sent.popleft()
            await_message(work, "the neighbours to receive what was sent")

    def _towards(self, kind: str, step: int) -> tuple[dist.ProcessGroup, int]:
        """Return group and number of the neighbour that is a step along the way of a kind of messages."""
        neighbour = self._place + (step if kind == ACTIVATIONS else -step)
        inside = 0 <= neighbour < self._places
        return self._groups[kind if inside else kind + AROUND], neighbour % self._places


def await_message(work: Any, what: str) -> None:
    """Wait for a message; a rank that hangs here is reported to wait for `what`."""
    work.wait()
