"""What a recorded step reads behind the values of a smaller step."""

import torch
from torch import Tensor

from tests.unit.engine import decode_steps
from worker.engine import device, graph_inputs
from worker.engine.graph_shapes import Shape


def test_padding_is_one_key_on_page_0_for_no_query_but_its_own() -> None:
    memory, stage = decode_steps.pool(), device.Host().stage
    inputs = graph_inputs.Inputs(stage, Shape(8, 4, 8, 4, 8, 2), memory)
    for rows in (7, 5):
        sizes = decode_steps.Sizes(rows, 2, (3,), windows=True)
        inputs.fill(decode_steps.step(rows, sizes, memory, stage))
    step = inputs.step
    assert step.own.decode is not None
    assert step.whole.decode is not None
    assert step.shared is not None
    assert not torch.cat([step.ids[5:], step.positions[5:], step.slots[5:], step.wanted[5:]]).any()
    for keys, real in ((step.own.decode, 5), (step.whole.decode, 5), (step.shared.rows, 1)):
        assert set(keys.lengths[real:].tolist()) == {1}
        assert keys.ends.diff().tolist() == keys.lengths.tolist()
        assert not keys.tables[real:].any()
        assert keys.most_keys == keys.tables.shape[1] * decode_steps.PAGE
    assert step.own.decode.starts.tolist() == [*range(9)]
    assert step.shared.rows.starts.tolist() == [0, 5, 5, 5, 5]
    assert step.shared.rows.most_queries == 8
    assert not step.shared.queries[5:].any()
    assert _all(step.shared.places[5:], -1)
    assert _all(step.shared.places[:, 1:], -1)


def _all(values: Tensor, wanted: int) -> bool:
    return bool((values == wanted).all())
