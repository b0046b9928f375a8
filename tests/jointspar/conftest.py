"""Fixtures of the tests of JointSpar."""

from tests.support.threads import one_thread as one_thread
