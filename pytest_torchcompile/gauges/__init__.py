"""Gauges: instruments beside the ledger. Each is a file with functions that measure one thing; a check shows it.

- of a call: ``coverage`` (the share that ran in graphs), ``kernels`` (generated and launched), ``memory``
- of CUDA graphs: ``replays``
- of the compiler: ``autotune`` (its cost, and a limit to it), ``first_compile`` (what a process pays and keeps),
  ``outage`` (a planned failure of it)
- of the machine: ``gpu`` (is it still usable?), ``flight_recorder`` (collectives begun)
"""
