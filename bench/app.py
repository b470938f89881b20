"""The handler that the bench runs: it does nothing but say when it began."""

import time
from typing import Any

from millstream import App

app = App("bench")


@app.task("noop", queue="bench")
async def noop(payload: Any) -> float:
    return time.time()
