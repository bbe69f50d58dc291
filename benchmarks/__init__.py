"""Side-by-side benchmark of mha_ext and PyTorch: `python -m mha_ext bench`.

rows.py      what is measured: shapes, features, targets
peers.py     the implementations, ours among them, given the same inputs and parameters
timing.py    all implementations of a row in turns
memory.py    peak memory of one implementation, in a process of its own
machine.py   what this machine can do: FMA, exp, read bandwidth, linear layers
report.py    tables, JSON, comparison with an earlier run
plots.py     pictures
models.py    whole models before and after replace_attention
compiled.py  torch.compile against eager mode
heads.py     what recording and gating heads costs
cli.py       the command
"""
