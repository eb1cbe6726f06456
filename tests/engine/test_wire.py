import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcp.engine.batch import SeqStep
from megatron_dcp.engine.wire import Kind, Known, Message, Outcome, SeqPlan, Tables, decode, encode

whole = st.integers(0, 2**53)
fp32 = st.floats(width=32, allow_nan=False)
lists = st.lists(whole, max_size=5)


@st.composite
def outcomes(draw):
    tokens = draw(lists)
    logprobs = draw(st.lists(fp32, min_size=len(tokens), max_size=len(tokens)))
    reason = draw(st.sampled_from([None, "stop", "length", "abort"]))
    return Outcome(draw(whole), tokens, logprobs, draw(st.lists(fp32, max_size=4)), reason, draw(whole))


@st.composite
def seq_plans(draw):
    """With the blocks of windows for all of them or for none."""
    windows = draw(st.booleans())
    plans = []
    for _ in range(draw(st.integers(0, 4))):
        blocks = draw(lists)
        in_window = draw(st.lists(st.integers(-1, 2**53), min_size=len(blocks), max_size=len(blocks)))
        plans.append(
            SeqPlan(
                draw(whole), draw(whole), draw(whole), draw(whole), blocks, in_window if windows else [], draw(lists)
            )
        )
    return plans


messages = st.builds(
    Message,
    st.sampled_from(Kind),
    st.lists(outcomes(), max_size=4),
    seq_plans(),
    lists,
    whole,
    st.text(max_size=9),
    st.booleans(),
)


@given(messages, st.integers(0, 3))
def test_a_message_comes_out_as_it_went_in(message, behind):
    numbers = encode(message)
    assert numbers.dtype == np.float64 and numbers[0] == len(numbers)
    assert decode(np.append(numbers, [math.nan] * behind)) == message


def test_log_probabilities_that_were_not_asked_for():
    (outcome,) = decode(encode(Message(Kind.END, [Outcome(1, [2], [math.nan], [], None, 0)]))).outcomes
    assert math.isnan(outcome.logprobs[0])


def test_a_decode_step_of_many_sequences_fits_the_first_broadcast():
    from megatron_dcp.engine.link import FIXED

    outcomes = [Outcome(10**6 + i, [i], [math.nan], [], None, 0) for i in range(64)]
    seqs = [SeqPlan(10**6 + i, 10**5, 1, 10**3, (), (), [i]) for i in range(64)]
    assert len(encode(Message(Kind.STEP, outcomes, seqs))) <= FIXED


@settings(max_examples=50)
@given(st.data(), st.booleans())
def test_tables_follow_those_of_the_driver(data, windows):
    """Sequences start, grow, lose what was reserved for drafts, are preempted, come back with other blocks and end."""
    known, mirror = Known(), Tables()
    tables: dict[int, list[int]] = {}
    blocks = iter(range(10**6))
    for _ in range(data.draw(st.integers(1, 12))):
        stepping = data.draw(st.lists(st.sampled_from(range(4)), unique=True))
        seqs = []
        for index in stepping:
            table = tables.setdefault(index, [])
            table += [next(blocks) for _ in range(data.draw(st.integers(0 if table else 1, 3)))]
            shown = table[: data.draw(st.integers(1, len(table)))]
            seqs.append(SeqStep([7], 3, shown, 1, [block + 5 for block in shown] if windows else []))
        plans, gone = known.plan(stepping, seqs, tables.keys())
        batch = mirror.batch(decode(encode(Message(Kind.STEP, seqs=plans, gone=gone))))
        assert [seq._replace(block_table=list(seq.block_table)) for seq in batch.seqs] == seqs
        assert mirror._tables.keys() <= tables.keys()
        # As the scheduler does: who loses its blocks sits out at least one step.
        for index in data.draw(st.sets(st.sampled_from(range(4)))) & tables.keys():
            del tables[index]
        plans, gone = known.plan([], [], tables.keys())
        mirror.batch(Message(Kind.STEP, seqs=plans, gone=gone))
