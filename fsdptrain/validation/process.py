"""The process of a dry run. Those that forecast start to import before it imports torch itself: each takes seconds."""

from __future__ import annotations

import contextlib
import os

from fsdptrain.forecast.forecaster import Forecaster
from fsdptrain.processes import answer_parent, import_and_freeze, records_of_parent
from fsdptrain.validation.request import Request

MOST_FORECASTERS, CORES_OF_FORECASTER = 4, 2  # of a search; there are two at least


def main() -> None:
    """Answer the request of the parent with records of progress, and the outcome last."""
    send = answer_parent()
    request = Request.from_record(next(records_of_parent()))
    of_search = max(2, min(MOST_FORECASTERS, (os.cpu_count() or 1) // CORES_OF_FORECASTER))
    count = 0 if not request.build else of_search if request.advise else 1
    with contextlib.ExitStack() as stack:
        forecasters = [stack.enter_context(Forecaster()) for _ in range(count)]
        import_and_freeze("fsdptrain.validation.dry_run").answer(request, forecasters, send)
