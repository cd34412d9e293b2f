"""The evenness with which tokens are sent to experts, and the memory that experts may take."""

from __future__ import annotations

import pytest

from mlxr.core.errors import DeviceError, SettingError
from mlxr.kernels.moe import ExpertsUse
from mlxr.models.components.weights import plan_experts
from mlxr.models.decoder import measure_evenness, sum_up

GIB = 2**30


def test_evenness_is_one_for_even_rows_and_nought_where_one_expert_has_all() -> None:
    assert measure_evenness([5, 5, 5, 5]) == pytest.approx(1)
    assert measure_evenness([0, 7, 0, 0]) == 0
    assert measure_evenness([8, 8, 0, 0]) == pytest.approx(0.5)
    assert measure_evenness([3]) == 1


def test_layers_are_summed_up_and_those_without_rows_do_not_count() -> None:
    uses = [ExpertsUse((4, 4), 3, 6, 1), ExpertsUse((8, 0), 3, 3, 2), ExpertsUse((0, 0), 0, 0)]
    routing = sum_up(uses)
    assert routing is not None
    assert (routing.rows, routing.layer_steps, routing.experts, routing.file_reads) == (16, 6, 9, 3)
    assert routing.evenness == pytest.approx((1 + 0) / 2)
    assert routing.busiest == pytest.approx((1 + 2) / 2)
    empty = sum_up(uses[2:])
    assert empty is not None
    assert (empty.rows, empty.evenness, empty.busiest) == (0, 0, 0)
    assert sum_up([None, None]) is None
    assert sum_up([]) is None


def test_experts_stay_in_their_file_where_memory_has_no_room_for_the_model() -> None:
    sizes = (0, 4 * GIB, 4 * GIB)
    assert plan_experts(sizes, 9 * GIB, "cpu", None, 20 * GIB) is None
    assert plan_experts(sizes, 9 * GIB, "cpu", None, None) is None
    assert plan_experts(sizes, 9 * GIB, "cuda", None, 5 * GIB) is None
    assert plan_experts((), 9 * GIB, "cpu", None, 5 * GIB) is None
    assert plan_experts(sizes, 9 * GIB, "cpu", None, 10 * GIB) is None
    budget = plan_experts(sizes, 9 * GIB, "cpu", None, 10 * GIB - 16)
    assert budget is not None
    assert budget.nbytes == pytest.approx(6 * GIB)  # of 70 % of what is free, what other weights leave
    assert budget.count_slots(1, GIB // 8 - 1, 32) == 24
    assert budget.count_slots(1, GIB // 8 - 1, 10) == 10


def test_budgets_are_shared_by_the_sizes_of_layers_and_too_small_ones_are_refused() -> None:
    budget = plan_experts((0, 100, 300), 500, "cpu", 200, None)
    assert budget is not None
    assert (budget.count_slots(1, 10, 10), budget.count_slots(2, 30, 10)) == (5, 5)
    small = plan_experts((0, 100, 300), 500, "cpu", 39, None)
    assert small is not None
    with pytest.raises(SettingError, match="one expert of each layer takes 43 bytes, and there is room for 39"):
        small.count_slots(1, 10, 10)
    enough = plan_experts((0, 100, 300), 500, "cpu", 43, None)
    assert enough is not None
    assert (enough.count_slots(1, 10, 10), enough.count_slots(2, 30, 10)) == (1, 1)
    with pytest.raises(DeviceError, match="expert_bytes: experts stay in their file on device 'cpu' only"):
        plan_experts((100,), 200, "reference", 50, None)
