"""Log lines are JSON."""

import json
import logging
import sys

from draftree.serve.log import JsonLines


def write(message, *arguments, error=None, **details):
    record = logging.LogRecord("draftree", logging.INFO, "f", 1, message, arguments, error)
    record.__dict__.update(details)
    return json.loads(JsonLines().format(record))


def test_line_has_time_level_event_and_fields():
    line = write("request %d", 5, fields={"status": 200, "text": "a\nb"})
    assert line["event"] == "request 5"
    assert (line["level"], line["status"], line["text"]) == ("info", 200, "a\nb")
    assert line["time"].endswith("Z")


def test_error_is_one_line_too():
    try:
        raise ValueError("what")
    except ValueError:
        assert "ValueError: what" in write("failed", error=sys.exc_info())["error"]
