"""Read what one module has logged."""

import logging

import pytest


def messages_of(module: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings and errors that `module` of torchcomp logged during this test."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == f"torchcomp.{module}" and record.levelno >= logging.WARNING
    ]
