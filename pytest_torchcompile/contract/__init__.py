"""The contract: what may a caller legitimately do with a module, and does the compiled one agree with eager?

Histories of calls are drawn, each call with *mutations*: another memory format, inputs that share memory, a frozen
block, autocast, another thread, a module that is changed between calls. What eager refuses is not judged.

Read ``mutation`` (what one is), any file of ``mutations/`` (each needs torch alone, as it goes into scripts),
``history_run`` (one history, both sides), ``worker`` (the process that it runs in, which may die of it),
``contract_search`` (drawing, shrinking) and ``script`` (what is printed in the end).
"""
