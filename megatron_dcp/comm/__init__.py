"""What ranks tell each other: exchanges of partial attention, plain collectives, and consensus on errors."""

from megatron_dcp.comm.consensus import agree, same_on_all
from megatron_dcp.comm.exchange import (
    Exchange,
    Exchanged,
    all_reduce_sum,
    gather_heads,
    get_exchange,
)

__all__ = [
    "Exchange",
    "Exchanged",
    "agree",
    "all_reduce_sum",
    "gather_heads",
    "get_exchange",
    "same_on_all",
]
