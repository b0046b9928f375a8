"""Ray Train: its script resumes."""

import pytest

from tests.integrations.scripts import both_methods, check_resumes, integrations

pytestmark = integrations


@both_methods
@pytest.mark.timeout(900)
def test_the_script_resumes_bit_for_bit(tmp_path, method):
    check_resumes("ray_train", tmp_path, method, launcher=["-m"])
