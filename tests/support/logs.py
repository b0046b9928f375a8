"""Read what one module has logged."""

import logging

import pytest


def messages_of(module: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings and errors that `module` of torchcomp logged during this test.

    Others are left out: local steps that an earlier test dropped can end, and warn, at any time.
    """
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == f"torchcomp.{module}" and record.levelno >= logging.WARNING
    ]
