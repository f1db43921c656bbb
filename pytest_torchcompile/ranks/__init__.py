"""Who runs where: rank processes, the zygote that forks them, and leases of GPUs.

Read ``execution`` first: it has a cell run and keeps its result. Pytest's end of a process is ``rank``, and
``rank_group`` the ranks of one cell (``torchrun``: over several nodes); ``blame`` puts together what they recorded. A
rank's own end is ``serving``, with the threads of ``hangup`` and ``flight``. It is a fork of the ``zygote``, and
``zygotes`` starts that one and its successor. ``leases`` says which cells hold which GPUs.
"""
