"""Log lines as JSON objects, one a line, on stderr. No prompt text unless it was asked for.

In: records of `logging`, whose `fields` become members. Knows nothing of HTTP.
"""

import json
import logging
import time
from typing import Any, Final

LOGGER_NAMES: Final = ("draftree", "uvicorn.error")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logs() -> None:
    """Send what draftree and uvicorn have to say to stderr, as JSON lines."""
    output = logging.StreamHandler()
    output.setFormatter(JsonLines())
    for name in LOGGER_NAMES:
        logger = logging.getLogger(name)
        logger.handlers = [output]
        logger.setLevel(logging.INFO if name == "draftree" else logging.WARNING)
        logger.propagate = False


def log_event(name: str, **fields: Any) -> None:
    logging.getLogger("draftree").info(name, extra={"fields": fields})
