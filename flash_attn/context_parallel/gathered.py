"""Methods all_gather and ring: queries stay, the keys that they see come from the ranks that have them.

all_gather computes with keys of all ranks once they have come, and first what needs none of them; ring computes with
the keys of one rank while those of the next are under way. Gradients of keys go straight back to their owners, in
float32, which add them in the order of distances.
All tensors have the tokens of all batch entries in one axis: (batch * tokens, heads, head_dim).
"""

from __future__ import annotations

from flash_attn.context_parallel.compute import (
    KeptQuerySums,
    Options,
    QuerySums,
    backward_call,
    has_dq_sum,
    new_sums,
    result_sums,
)
from flash_attn.context_parallel.moves import Fetched, Returned
from flash_attn.context_parallel.tables import PassTables


def forward(passes, method, batch, q, k, v, sinks, options: Options):
    """out and LSE (heads, rows) of this rank's queries."""
    tables = passes.tables(method, options.window, options.has_exact_positions, batch, q.device)
    sums = result_sums(tables, q, v, sinks)
    for step, (step_k, step_v) in _overlapped(passes, tables, (k, v)):
        for call in step.calls:
            sums.compute(call, q, step_k, step_v, options)
        del step_k, step_v  # before the keys after the next are asked for: two buffers, not three
    return sums.result()


def backward(passes, method, batch, dout, q, k, v, out, lse, dlse, options: Options, keeps_sums=False):
    """dq, dk and dv of this rank's tokens. keeps_sums: dk and dv in the dtype of sums, for more to be added."""
    own = (dout, q, k, v, out, lse, dlse, options)
    kind = method, options.window, options.has_exact_positions, batch, q.device, True
    tables = passes.tables(*kind, keeps_dq=True)
    keeps_dq = has_dq_sum(tables, *own)
    if tables.dq_rows is not None and not keeps_dq:
        tables = passes.tables(*kind)
    only = None if keeps_sums else _only_call(tables)
    if only is not None:
        grads = backward_call(only.table, *own)
        return [grad.to(x.dtype) for grad, x in zip(grads, (q, k, v))]
    dq, (dk, dv) = KeptQuerySums(tables, *own) if keeps_dq else QuerySums(tables, q), new_sums(k, v)

    def compute(call, step_k, step_v, grads):
        given = (dout, q, step_k, step_v, out, lse, dlse, options)
        dq.add(call, lambda own, **stage: backward_call(call.table, *given, sums=grads, dq=own, **stage)[0])

    returning = None
    for step, (step_k, step_v) in _overlapped(passes, tables, (k, v)):
        grads = (dk, dv) if step.is_local else new_sums(step_k, step_v)
        for call in step.calls:
            compute(call, step_k, step_v, grads)
        del step_k, step_v
        if returning is not None:
            returning.finish()
        returning = Returned(passes, step, grads, (dk, dv))
        del grads
    for call in tables.late:
        compute(call, k, v, (dk, dv))
    returning.finish()
    return (dq.result(), dk, dv) if keeps_sums else (dq.result(), dk.to(k.dtype), dv.to(v.dtype))


def _only_call(tables: PassTables):
    """The call of a rank that neither sends nor receives anything, if it has one alone."""
    calls = [call for step in tables.steps for call in step.calls]
    moves = any(
        step.pushes or any(moves.sends or moves.receives for moves in (step.keys, *step.rounds))
        for step in tables.steps
    )
    return calls[0] if len(calls) == 1 and not moves and not tables.late else None


def _overlapped(passes, tables: PassTables, tensors):
    """(step, its keys and values), those of the next step requested before."""
    sent = [fetched := Fetched(passes, tables.steps[0], tensors)]
    for step, following in zip(tables.steps, (*tables.steps[1:], None)):
        current = fetched.wait()
        if following is not None:
            sent.append(fetched := Fetched(passes, following, tensors))
        yield step, current
        del current
    for fetched in sent:
        fetched.finish()
