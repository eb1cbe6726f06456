"""Where the time of a run goes: per phase, layer kind, part and rank, with advice.

`megatron_dcp.profiling.run.profile` measures; what reads its report needs no torch.
"""
