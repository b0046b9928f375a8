"""Fixtures of the tests of 2Direction."""

from tests.support.threads import one_thread as one_thread
