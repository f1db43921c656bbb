"""Lowering: what became of a graph in Inductor, kernel by kernel: operators, reads and writes, what stays inside.

To read in this order: ``kernel_records`` is plain data. ``scheduler_notes`` hooks into Inductor's scheduler, and
``kernel_facts`` corrects what was planned by the code that came of it. ``kernel_watch`` does both beside a ledger:
for the check ``kernels`` and for ``explain``. ``places`` finds the user's line in a stack trace.
"""
