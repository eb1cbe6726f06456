"""What is read off a model."""

from __future__ import annotations

import pytest

from megatron_dcp import load_model, parallel_state
from megatron_dcp.layers import rotary_table
from models import tiny_model
from workers import run_on_ranks


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v2", "deepseek_v3"])
def test_tables_of_rope_lie_where_the_model_does(family):
    run_on_ranks(1, tables_on_meta, str(tiny_model(family)))


def tables_on_meta(rank, world, path):
    """Megatron makes some of them on the CPU; the meta device stands for a GPU."""
    parallel_state.initialize_model_parallel()
    model = load_model(path, parallel_state.get_process_group_collection(), device="meta")[0]
    tables = [rotary_table(model, window=window) for window in (False, True)]
    assert {table.inv_freq.device.type for table in tables if table is not None} == {"meta"}
