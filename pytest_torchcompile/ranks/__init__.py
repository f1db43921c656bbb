"""Who runs where: rank processes, the zygote that forks them, and leases of GPUs.

Read ``execution`` first: it has a cell run and keeps its result. Pytest's end of a process is ``rank``, and
``rank_group`` the ranks of one cell and what they recorded (``torchrun``: over several nodes). A rank's own end is
``serving``, with the threads of ``listeners``. It is a fork of the ``zygote``, and ``zygotes`` starts that one and its
successor. ``leases`` says which cells hold which GPUs.
"""
