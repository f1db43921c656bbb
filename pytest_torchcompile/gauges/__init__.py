"""Gauges: instruments beside the ledger. Each is a file with functions that measure one thing; a check shows it.

- of a call: ``coverage`` (the share that ran in graphs), ``kernels`` (generated and launched), ``memory``
  (and of the GPU: is it still usable?)
- of CUDA graphs: ``replays``
- of the compiler: ``autotune`` (its cost, and a limit to it), ``compiler`` (what a process pays and keeps; a
  planned outage)
- of several ranks: ``flight_recorder`` (collectives begun)
"""
