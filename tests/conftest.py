"""Settings of all tests: made-up cases are the same in every run, and no verdict depends on the machine's speed."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import amounts
import everyday
import pytest
from hypothesis import HealthCheck, settings

# NumPy's products here are of small matrices, which take longer on several threads, and tests run side by side anyway.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile(
    "mlxr", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mlxr")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every test, as in continuous integration")
    parser.addoption("--exhaustive", action="store_true", help="the same with random cases and kills at full length")
    parser.addoption(
        "--quick", action="store_true", help="tests of changed packages, and one case of the quickest others"
    )
    parser.addoption("--cluster", type=int, metavar="N", help="let a cluster of N replicas answer tests of the server")
    parser.addoption(
        "--apple", action="store_true", help="emulate kernels with Metal's words and an Apple GPU's limits"
    )
    parser.addoption("--gpus", type=int, metavar="N", help="fail where this machine shows fewer GPUs than these")
    parser.addoption("--mutated-files", type=int, metavar="N", help="model files that lie, for each instruction set")
    parser.addoption("--schedules", type=int, metavar="N", help="random schedules of each family of models")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_server(reason): what a cluster does not do, or each replica does by itself")
    if platform.machine() in ("aarch64", "arm64"):  # vector units there set flags that mean nothing (numpy/numpy#28687)
        config.addinivalue_line("filterwarnings", "ignore:.* encountered in matmul:RuntimeWarning")
    config.option.thorough = config.option.thorough or config.option.exhaustive
    amounts.is_thorough, amounts.is_exhaustive = config.option.thorough, config.option.exhaustive
    amounts.family_schedules = config.getoption("--schedules")
    everyday.mark(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough") or any("::" in argument for argument in config.args):
        return  # a test that is named always runs
    chosen = everyday.choose(items, is_quick=config.getoption("--quick"), changed=everyday.list_changed())
    left_out = set(map(id, items)) - set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = chosen


@pytest.fixture(scope="module", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder for models if a test names none: whoever runs the tests may have models, and one of these would
    answer a request that names no model.
    """
    folder = tmp_path_factory.mktemp("data")
    os.environ["XDG_DATA_HOME"] = str(folder)
    return folder
