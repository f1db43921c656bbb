"""Reuse: a cell that passed and whose key is unchanged is not run again. Nothing here imports torch at its top.

The lookup has two stages, as ccache has. What is known before anything runs (the cell, the machine, the packages) names
a folder of the store. Each entry in it says what its run read: modules, files, folders. All of these must be the same
now. What a run read is recorded in its rank process; what cannot be followed makes the cell one that always runs.

To read in this order: ``definitions`` (which parts of the project's modules a cell rests on), ``watched_files`` (what
a rank process opened), ``run_inputs`` (both together, as plain data), ``machine_facts`` and ``variables`` (what is the
same for all cells), ``cell_key``, ``named_lines`` (the lines that a kept result names, where they are today),
``cell_reuse``, which looks results up and keeps them, and ``code_reuse``, which does so with comparisons of what
compiles to the same code.
"""
