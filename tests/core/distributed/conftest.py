"""One pair of processes for all the tests of this folder: starting them takes longer than what they do."""

import pytest

from distributed.cases import JOBS
from distributed.processes import Results, in_two_processes


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return in_two_processes(JOBS, tmp_path_factory.mktemp("checkpoints"))
