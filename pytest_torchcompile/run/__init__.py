"""One cell in one rank: the runner, its subject, the environment, and the verdicts made of what was observed.

To read in this order: ``options`` and ``settings`` (what a run was asked for), ``subject`` (the model, its batches and
loss), ``runner`` (builds, runs, measures; the only way from a job to an observation), ``verdicts`` (from the
observation on, without torch). ``environment`` and ``imported`` say what ran, ``offspring`` ends what it left behind.
``counters`` and ``fuzz_test`` are what tests of the user's call.
"""
